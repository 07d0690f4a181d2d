"""The measures of a load as one screen of text, and as plain data for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tenfold import __version__
from tenfold.loadtest.measures import Distribution, Record, Run, Summary

SCHEMA = "tenfold-bench-serve/1"
"""Of the JSON; the number changes when a field changes its meaning or goes away."""


def as_data(run: Run, summary: Summary, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured. Times are in seconds from the start of the load; what there is none of is null.

    Args:
        settings: what was asked for; it must not have secrets in it.
    """
    return {
        "schema": SCHEMA,
        "tenfold": __version__,
        "settings": dict(settings),
        "interrupted": run.interrupted,
        "summary": _without_nan(asdict(summary) | {"per_second": _rates(summary)}),
        "requests": [_record_data(record) for record in sorted(run.records, key=lambda record: record.index)],
    }


def _rates(summary: Summary) -> dict[str, float | None]:
    return {
        "requests": summary.per_second(summary.completed),
        "output_tokens": summary.per_second(summary.output_tokens),
        "total_tokens": summary.per_second(summary.total_tokens),
        "goodput_requests": None if summary.good is None else summary.per_second(summary.good),
    }


def _without_nan(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _record_data(record: Record) -> dict[str, Any]:
    return {
        "index": record.index,
        "due": record.due,
        "admitted": record.admitted,
        "sent": record.sent,
        "first": record.first,
        "last": record.last,
        "end": record.end,
        "gaps": record.gaps.tolist(),
        "ttft": record.ttft,
        "tpot": record.tpot,
        "e2e": record.e2e,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "asked_prompt_tokens": record.asked_prompt_tokens,
        "asked_output_tokens": record.asked_output_tokens,
        "has_usage": record.has_usage,
        "failure": asdict(record.failure) if record.failure else None,
    }


def as_text(summary: Summary, heading: str, notes: list[str]) -> str:
    """One screen for people: ``heading`` and ``notes`` say what was measured."""
    parts = ([heading, *(f"  {note}" for note in notes)], _requests(summary), _latencies(summary), _throughput(summary))
    return "\n\n".join("\n".join(part) for part in (*parts, _client(summary)))


def _requests(summary: Summary) -> list[str]:
    lines = [_row("requests", ""), _row("  completed", f"{summary.completed:,}")]
    if summary.other_length:
        lines.append(_row("  of other length than asked", f"{summary.other_length:,}"))
    if summary.without_usage:
        lines.append(_row("  without usage", f"{summary.without_usage:,}", "chunks are counted for tokens"))
    lines.append(_row("  failed", f"{summary.failed:,}"))
    lines += [_row(f"    {cause}", f"{count:,}", summary.examples[cause]) for cause, count in summary.failures.items()]
    if summary.unfinished:
        lines.append(_row("  unfinished", f"{summary.unfinished:,}"))
    return lines


def _latencies(summary: Summary) -> list[str]:
    per_chunk = summary.output_tokens / summary.chunks if summary.chunks else math.nan
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    return [
        f"{'latency in ms':<{NAME}}" + "".join(f"{column:>{VALUE}}" for column in columns),
        _distribution("  time to first token (TTFT)", summary.ttft),
        _distribution("  between chunks (ITL)", summary.itl),
        _distribution("  per output token (TPOT)", summary.tpot),
        _distribution("  end to end", summary.e2e),
        *([f"  a chunk has {per_chunk:.2f} tokens on average"] if summary.chunks else []),
    ]


def _throughput(summary: Summary) -> list[str]:
    rates = _rates(summary)
    cached = summary.cached_tokens
    share = f"{cached / summary.prompt_tokens:.1%} of them" if cached is not None and summary.prompt_tokens else ""
    lines = [
        f"{'throughput':<{NAME}}{'total':>{VALUE}}{'per second':>{VALUE + 3}}",
        _total("  requests", summary.completed, rates["requests"]),
        _total("  prompt tokens", summary.prompt_tokens, summary.per_second(summary.prompt_tokens)),
        *([_row("    found in the cache", f"{cached:,}", share)] if cached is not None else []),
        _total("  output tokens", summary.output_tokens, rates["output_tokens"]),
        _total("  prompt and output tokens", summary.total_tokens, rates["total_tokens"]),
    ]
    if summary.good is not None:
        lines.append(_total("  goodput", summary.good, rates["goodput_requests"]))
        goals = ", ".join(f"{name} <= {limit * 1000:g} ms" for name, limit in summary.goals.items())
        lines.append(f"    requests with {goals}")
    return lines


def _client(summary: Summary) -> list[str]:
    lines = [_distribution("client late, in ms", summary.late)]
    if summary.queued.count and summary.queued.max > 0:
        lines.append(_distribution("held back by --concurrency, in ms", summary.queued))
    lines.append(f"{'client computing':<{NAME}}{summary.client_cores:>{VALUE}.2f} cores")
    return lines


NAME, VALUE = 34, 10


def _row(name: str, value: str, remark: str = "") -> str:
    return f"{name:<{NAME}}{value:>{VALUE}}   {remark}".rstrip()


def _total(name: str, count: int, rate: float | None) -> str:
    return f"{name:<{NAME}}{count:>{VALUE},}{rate or 0.0:>{VALUE + 3},.2f}"


def _distribution(name: str, values: Distribution) -> str:
    shown = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    return f"{name:<{NAME}}" + "".join(f"{_milliseconds(seconds):>{VALUE}}" for seconds in shown)


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:,.1f}"
