"""Who goes first, who gives way, and how much of a step a prefill may take: the seam for other disciplines.

A policy is asked; it never changes anything. Its answers decide order and fairness, not correctness.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from tenfold.core.sequence import Sequence


class Policy(Protocol):
    def order(self, seq: Sequence) -> Any:
        """Sort key of the waiting queue, least first. Must be total and must not change while ``seq`` waits."""
        ...

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The running sequence to preempt when a block is missing; ``running`` is never empty."""
        ...

    def chunk(self, seq: Sequence, budget: int) -> int:
        """How many of the ``seq.want`` prefill tokens to issue in this step: 1 to ``min(seq.want, budget)``."""
        ...

    def headroom(self, growing: int) -> int:
        """Pages to leave when admitting beside ``growing`` sequences that have yet to take their last block."""
        ...


class FirstComeFirstServed:
    """Arrival order everywhere; the youngest gives way. A sequence once preempted keeps its place in the order."""

    def order(self, seq: Sequence) -> int:
        return seq.request.id

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=self.order)

    def chunk(self, seq: Sequence, budget: int) -> int:
        return min(seq.want, budget)

    def headroom(self, growing: int) -> int:
        return growing
