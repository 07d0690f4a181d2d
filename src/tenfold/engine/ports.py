"""What the engine needs from the outside, as protocols: a runner, a clock, a tokenizer, an observer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tenfold.core import FinishReason, Request, StepOutcome, StepPlan, TokenEvent


class ModelRunner(Protocol):
    """Executes plans in the order they are submitted."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step. May return before it is done."""
        ...

    def collect(self) -> StepOutcome:
        """The outcome of the oldest submitted step; blocks until it is there."""
        ...

    def reset(self) -> None:
        """Forget every step that was submitted and not collected, after one of them failed."""
        ...


class Clock(Protocol):
    def __call__(self) -> float:
        """Seconds since an arbitrary start, never falling."""
        ...


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the engine uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class Instrument(Protocol):
    """Observes the engine. Implementations must be cheap: they are called in every step."""

    def submitted(self, request: Request, now: float) -> None: ...

    def planned(self, plan: StepPlan, now: float) -> None: ...

    def stepped(self, plan: StepPlan, outcome: StepOutcome, events: list[TokenEvent], now: float) -> None: ...

    def ended(self, request: Request, reason: FinishReason, now: float) -> None: ...


Messages = list[dict[str, Any]]
"""A conversation in OpenAI's form: dictionaries with ``role`` and ``content``."""
