"""Every value that is out of range is refused before it costs anything, and the refusal names the parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tenfold.core import SamplingParams
from tenfold.errors import RequestError

BAD: list[Any] = [
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -math.inf),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", False),
    ("n", 0),
    ("n", 129),
    ("n", 2.0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 3.0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("min_tokens", "2"),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 0.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", [f"<{i}>" for i in range(17)]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["2"]),
    ("logit_bias", {-1: 0.0}),
    ("logit_bias", {"5": 0.0}),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {5: None}),
]


BAD += [("best_of", 0), ("best_of", 129), ("best_of", 1.5)]
BAD += [("temperature", 10**400), ("stop", 5), ("stop", {"a": 1}), ("stop_token_ids", 5), ("logit_bias", [1])]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:24])
def test_a_bad_value_is_a_request_error_that_names_its_parameter(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1},
        {"temperature": 100.0, "top_p": 1e-9, "min_p": 1.0, "repetition_penalty": 100.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"top_k": -1, "n": 128, "logprobs": 20, "seed": 2**64 - 1},
        {"top_k": 0, "n": 1, "logprobs": 0, "seed": -(2**63)},
        {"max_tokens": None, "min_tokens": 10_000},
        {"max_tokens": 5, "min_tokens": 5},
        {"stop": [f"<{i}>" for i in range(16)], "stop_token_ids": [0, 7]},
        {"logit_bias": {0: -100, 7: 100.0}},
        {"logit_bias": {}, "stop": None, "stop_token_ids": None, "seed": None},
    ],
)
def test_the_ends_of_each_range_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_stop_is_a_tuple_whichever_way_it_was_given() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == ()


def test_best_of_is_at_least_n() -> None:
    assert SamplingParams(n=2, best_of=5).samples == 5 and SamplingParams(n=2).samples == 2
    with pytest.raises(RequestError, match="best_of 2 is less than n 3") as caught:
        SamplingParams(n=3, best_of=2)
    assert caught.value.param == "best_of"


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.01).greedy
