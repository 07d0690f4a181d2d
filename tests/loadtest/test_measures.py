from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.errors import TenfoldError
from tenfold.loadtest.measures import (
    Distribution,
    Failure,
    Record,
    Run,
    meets,
    output_rate,
    parse_goals,
    percentile,
    summarize,
)

SECONDS = st.floats(0, 1e6)


def record(due: float = 0.0, first: float | None = None, gaps: tuple[float, ...] = (), tokens: int = 0) -> Record:
    last = None if first is None else first + sum(gaps)
    return Record(
        0,
        due,
        due,
        asked_prompt_tokens=10,
        asked_output_tokens=tokens,
        sent=due,
        first=first,
        last=last,
        end=last or due,
        gaps=array("d", gaps),
        prompt_tokens=10,
        output_tokens=tokens,
        has_usage=True,
    )


@given(st.lists(SECONDS, min_size=1), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


@given(st.lists(st.one_of(st.none(), SECONDS)))
def test_distributions_are_those_of_numpy(values: list[float | None]) -> None:
    found, there = Distribution.of(values), [value for value in values if value is not None]
    assert found.count == len(there)
    if not there:
        assert math.isnan(found.mean) and math.isnan(found.p99)
        return
    expected = [np.mean(there), *np.percentile(there, [50, 90, 95, 99]), max(there)]
    assert [found.mean, found.p50, found.p90, found.p95, found.p99, found.max] == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.tuples(SECONDS, st.lists(SECONDS, max_size=4))), st.floats(1, 1e6), st.floats(1, 1e6))
def test_goodput_is_that_of_numpy(requests: list[tuple[float, list[float]]], ttft: float, itl: float) -> None:
    records = [record(0.0, first, tuple(gaps), 1 + len(gaps)) for first, gaps in requests]
    summary = summarize(Run(records, 10.0, 1.0), {"ttft": ttft, "itl": itl})
    firsts = np.array([first for first, _ in requests])
    means = np.array([sum(gaps) / len(gaps) if gaps else 0.0 for _, gaps in requests])
    assert summary.good == np.count_nonzero((firsts <= ttft) & (means <= itl))


def test_latencies_count_from_when_a_request_was_due() -> None:
    found = record(due=1.0, first=1.5, gaps=(0.1, 0.3), tokens=5)
    found.sent = 1.2
    assert (found.ttft, found.e2e, found.late) == pytest.approx((0.5, 0.9, 0.2))
    assert found.itl == pytest.approx(0.2)
    assert found.tpot == pytest.approx(0.4 / 4), "a chunk has several tokens"
    assert (record(first=0.5, tokens=1).itl, record(first=0.5, tokens=1).tpot) == (None, None)
    assert record().ttft is None


def test_who_meets_the_goals() -> None:
    goals = {"ttft": 0.5, "tpot": 0.1}
    assert meets(record(first=0.5, gaps=(0.1,), tokens=2), goals)
    assert not meets(record(first=0.51, gaps=(0.1,), tokens=2), goals)
    assert not meets(record(first=0.5, gaps=(0.11,), tokens=2), goals)
    assert meets(record(first=0.5, tokens=1), goals), "one token has no time per output token"
    assert not meets(record(), goals), "no content came"
    failed = record(first=0.1, tokens=1)
    failed.failure = Failure("timeout", "")
    assert not meets(failed, {})


def test_goals() -> None:
    assert parse_goals(["ttft:500", "e2e:5000", "itl:2.5"]) == {"ttft": 0.5, "e2e": 5.0, "itl": 0.0025}
    for wrong in ("ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "speed:5", ":5"):
        with pytest.raises(TenfoldError, match="write ttft, itl, tpot, e2e and milliseconds"):
            parse_goals([wrong])


def test_a_summary() -> None:
    failures = [record(), record(), record()]
    for each, (cause, message) in zip(failures, [("HTTP 429", "a"), ("timeout", "b"), ("HTTP 429", "c")], strict=True):
        each.failure = Failure(cause, message)
    done = [record(first=1.0, gaps=(1.0,), tokens=4), record(first=2.0, tokens=1)]
    done[0].cached_tokens, done[1].has_usage, done[1].asked_output_tokens = 6, False, 2
    summary = summarize(Run([*failures, *done], 2.0, 0.5, unfinished=1, interrupted=True))
    assert (summary.completed, summary.failed, summary.unfinished) == (2, 3, 1)
    assert list(summary.failures.items()) == [("HTTP 429", 2), ("timeout", 1)]
    assert summary.examples == {"HTTP 429": "a", "timeout": "b"}
    assert (summary.prompt_tokens, summary.output_tokens, summary.total_tokens, summary.chunks) == (20, 5, 25, 3)
    assert (summary.cached_tokens, summary.without_usage, summary.other_length) == (6, 1, 1)
    assert summary.per_second(summary.output_tokens) == 2.5
    assert summary.client_cores == 0.25
    assert summary.good is None


def test_nothing_at_all() -> None:
    summary = summarize(Run([], 0.0, 0.0))
    assert summary.per_second(5) == 0.0 and summary.cached_tokens is None and summary.ttft.count == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.lists(st.floats(0, 3), max_size=3), st.integers(0, 50))))
def test_no_token_is_lost_over_time(requests: list[tuple[float, list[float], int]]) -> None:
    records = [record(0.0, first, tuple(gaps), tokens) for first, gaps, tokens in requests]
    rates = output_rate(records, 20.0, 7)
    assert sum(rates) * 20 / 7 == pytest.approx(sum(tokens for *_, tokens in requests))


def test_tokens_over_time() -> None:
    assert output_rate([record(first=0.5, gaps=(1.0, 1.0), tokens=6)], 4.0, 4) == [2.0, 2.0, 2.0, 0.0]
