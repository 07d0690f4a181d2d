"""What enters the core and what leaves it: requests, sampling parameters, events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from tenfold.errors import RequestError

if TYPE_CHECKING:
    from tenfold.core.plan import TokenLogprobs

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_SAMPLES = 128


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence or stop token was sampled, or a stop string appeared."""
    LENGTH = "length"
    """``max_tokens`` or the context is used up."""
    CANCELLED = "cancelled"
    """The client went away or asked to stop."""
    ERROR = "error"
    """The step that computed it failed."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch those filters off. ``max_tokens``
    None means up to the context length. ``seed`` None draws a fresh one; a given seed yields the same tokens whatever
    else is in the batch. ``logprobs`` is the number of most likely alternatives returned beside each chosen token
    (0: only the chosen one's), None returns none; values are natural logarithms of the model's distribution before
    temperature, penalties and filters. ``n`` texts are returned; with ``best_of``, which is at least ``n``, they are
    the most likely ones per token of that many.

    With ``use_beam_search`` the ``n`` best of ``beam_width`` beams are returned, scored by their summed log probability
    over their length to the power of ``length_penalty``. ``early_stopping`` true ends the search with ``beam_width``
    finished texts, false when no better one is likely, ``"never"`` only when none is possible. Temperature and seed
    have no part in it.

    Raises:
        RequestError: a value is out of its range; ``param`` names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    use_beam_search: bool = False
    beam_width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    best_of: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _listed(self.stop, "stop", "strings")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _listed(self.stop_token_ids, "stop_token_ids", "token ids"))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}", "logit_bias")
        _in_range(self.temperature, "temperature", 0.0, 100.0)
        _in_range(self.top_p, "top_p", 0.0, 1.0, open_low=True)
        _in_range(self.min_p, "min_p", 0.0, 1.0)
        _in_range(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        _in_range(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        _in_range(self.repetition_penalty, "repetition_penalty", 0.0, 100.0, open_low=True)
        _integer(self.top_k, "top_k", -1)
        _integer(self.min_tokens, "min_tokens", 0)
        _integer(self.n, "n", 1, MAX_SAMPLES)
        if self.best_of is not None:
            _integer(self.best_of, "best_of", 1, MAX_SAMPLES)
            if self.best_of < self.n:
                raise RequestError(f"best_of {self.best_of} is less than n {self.n}", "best_of")
        if self.use_beam_search:
            self._check_beam_search()
        if self.max_tokens is not None:
            _integer(self.max_tokens, "max_tokens", 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", "min_tokens"
                )
        if self.logprobs is not None:
            _integer(self.logprobs, "logprobs", 0, MAX_LOGPROBS)
        if self.seed is not None:
            _integer(self.seed, "seed", -(2**63), 2**64 - 1)
        if len(stop) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop must be at most {MAX_STOP_STRINGS} non-empty strings", "stop")
        for token in self.stop_token_ids:
            _integer(token, "stop_token_ids", 0)
        for token, bias in (self.logit_bias or {}).items():
            _integer(token, "logit_bias", 0)
            _in_range(bias, "logit_bias", -100.0, 100.0)

    def _check_beam_search(self) -> None:
        _integer(self.beam_width, "beam_width", 1, MAX_SAMPLES)
        _in_range(self.length_penalty, "length_penalty", -10.0, 10.0)
        if self.early_stopping not in (True, False, "never"):
            raise RequestError('early_stopping must be true, false or "never"', "early_stopping")
        if self.n > self.beam_width:
            raise RequestError(f"n {self.n} is more than beam_width {self.beam_width}", "n")
        for name, plain in _WITHOUT_BEAMS.items():
            if getattr(self, name) != plain:
                raise RequestError(f"{name} cannot be combined with beam search: leave it out", name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def samples(self) -> int:
        """Sequences to generate for a prompt."""
        return self.n if self.best_of is None else self.best_of


_WITHOUT_BEAMS: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "min_tokens": 0,
    "logprobs": None,
    "best_of": None,
    "stop": (),
}


def _listed(value: Any, name: str, of_what: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of {of_what}, not {value!r}", name)
    return tuple(value)


def _in_range(value: Any, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, float) and math.isnan(value))
    ):
        raise RequestError(f"{name} must be a number, not {value!r}", name)
    if not (low < value if open_low else low <= value) or value > high:
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], not {value!r}", name)


def _integer(value: Any, name: str, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}", name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {bound}, not {value}", name)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. Ids are unique and ordered by arrival.

    ``max_tokens`` is the resolved bound (the context is already taken into account), ``stop_token_ids`` the resolved
    set of tokens that end the text. ``cache_salt`` and ``breakpoints`` (token positions worth a state checkpoint) are
    hints for prefix reuse.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    cache_salt: str = ""
    breakpoints: tuple[int, ...] = ()


class TokenEvent(NamedTuple):
    """One token of one sequence came back; ``finish_reason`` is set on the last one. ``reused`` is how many tokens of
    its prompt were found in the cache."""

    sequence: int
    token: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None
    reused: int = 0
    score: float | None = None
