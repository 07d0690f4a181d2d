"""Requests as OpenAI's clients send them, checked field by field: what is not supported is refused by name.

Only types are checked here; ``SamplingParams`` checks the ranges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from tenfold.core import SamplingParams
from tenfold.core.types import MAX_LOGPROBS
from tenfold.errors import RequestError, shortened

NO_EFFECT = frozenset({"user", "metadata", "safety_identifier"})
"""They identify the caller to OpenAI: accepted, and without effect here."""

UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters of OpenAI's that do nothing here, with the values that ask for nothing."""
UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ()}

SHARED_PARAMETERS = (
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
)
"""Fields that go to ``SamplingParams`` under their own name."""


class Body(BaseModel):
    """A request's body. ``unsupported`` names what is refused, ``spelling`` what the engine calls differently."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Check ``body``; null means the default, as with OpenAI.

        Raises:
            RequestError: a field is unknown, not supported or of the wrong type; ``param`` names it.
        """
        known: dict[str, Any] = {}
        for name, value in body.items():
            if name in cls.unsupported:
                if value is not None and not any(_same(value, accepted) for accepted in cls.unsupported[name]):
                    raise RequestError(_not_supported(name, cls.unsupported[name]), name, "unsupported_parameter")
            elif name not in NO_EFFECT and not (value is None and name in cls.model_fields):
                known[name] = value
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            raise _request_error(error) from None

    @contextmanager
    def spelling(self) -> Iterator[None]:
        """Let a RequestError speak of parameters by the names that the client used."""
        yield


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = False
    include_obfuscation: bool | None = False

    @field_validator("include_obfuscation")
    @classmethod
    def refuse_obfuscation(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("is not supported: leave it out or send false")
        return value


BEAM_PARAMETERS = ("beam_width", "length_penalty", "early_stopping")


class Generate(Body):
    """What chat and plain completions have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_one_or_several)] = Field(default_factory=list)
    logit_bias: dict[str, float] = Field(default_factory=dict)
    max_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    cache_salt: str = ""

    @field_validator("logit_bias")
    @classmethod
    def token_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for token in value:
            if not re.fullmatch("[0-9]{1,9}", token):
                raise ValueError(f"must have token ids as its keys, not {token[:40]!r}")
        return value

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, **own: Any) -> SamplingParams:
        """The parameters for the engine. Raises RequestError for values out of range."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream: true", "stream_options")
        for name in BEAM_PARAMETERS:
            if getattr(self, name) is not None and not self.use_beam_search:
                raise RequestError(f"{name} is only allowed with use_beam_search: true", name)
        with self.spelling():
            known = (*SHARED_PARAMETERS, "use_beam_search", *BEAM_PARAMETERS)
            given = {name: getattr(self, name) for name in known if name in self.model_fields_set}
            if self.logit_bias:
                given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
            return SamplingParams(**given, **own)


class ChatRequest(Generate):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED_CHAT

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def params(self) -> SamplingParams:
        """As ``sampling``; without a bound, an answer may use up the context."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError("max_tokens and max_completion_tokens exclude each other: send one", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {self.top_logprobs}", "top_logprobs"
            )
        bound = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(max_tokens=bound, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    @contextmanager
    def spelling(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            message, param = str(error), error.param
            if self.max_completion_tokens is not None:
                message = re.sub(r"\bmax_tokens\b", "max_completion_tokens", message)
                param = "max_completion_tokens" if param == "max_tokens" else param
            raise RequestError(message, "messages" if param == "prompt" else param, error.code) from None


class CompletionRequest(Generate):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED_COMPLETION

    prompt: Any
    logprobs: int | None = None
    best_of: int | None = None

    def params(self) -> SamplingParams:
        """As ``sampling``; without a bound, 16 tokens are generated."""
        if self.stream and self.best_of is not None and self.best_of > self.n:
            raise RequestError("best_of above n is not allowed with stream: true: leave one of them out", "best_of")
        bound = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return self.sampling(logprobs=self.logprobs, best_of=self.best_of, **bound)


class TokenizeRequest(Body):
    """A text, or a conversation that the chat template makes one of."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


def _same(value: Any, accepted: Any) -> bool:
    return type(value) is type(accepted) and bool(value == accepted)


def _not_supported(name: str, accepted: tuple[Any, ...]) -> str:
    values = " or ".join(json.dumps(value) for value in accepted)
    return f"{name} is not supported: leave it out" + (f", or send {values}" if values else "")


def _request_error(error: ValidationError) -> RequestError:
    """The first thing that is wrong, in words of our own where pydantic's speak of its models."""
    first = error.errors(include_url=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return RequestError(f"{param[:80]} is not a known parameter: leave it out", param[:80], "unknown_parameter")
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param, "missing_required_parameter")
    if first["type"] == "value_error":
        return RequestError(f"{param} {first['msg'].removeprefix('Value error, ')}", param, "invalid_value")
    reason = first["msg"].replace("Input should", "should", 1)
    return RequestError(f"{param} {reason}, not {shortened(first['input'])}", param, "invalid_type")
