"""The best of several texts for one prompt."""

from __future__ import annotations

from collections.abc import Sequence

from tenfold.core import TokenEvent


class Score:
    """How likely the tokens of one sequence are, on average. The token that ends it counts."""

    __slots__ = ("tokens", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.tokens = 0

    def add(self, event: TokenEvent) -> None:
        """Count a token, whose log probability the engine must have been asked for."""
        if event.logprobs is None:
            raise RuntimeError(f"sequence {event.sequence} is ranked, but came without log probabilities")
        self.total += event.logprobs.logprob
        self.tokens += 1

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else float("-inf")


def best(scores: Sequence[Score], count: int) -> list[int]:
    """Indices of the ``count`` sequences with the highest log probability per token, best first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index].mean)[:count]
