"""Beam search: several hypotheses of one prompt that fork and die step by step, sharing all blocks they have in common.

Scores, ties aside, and stopping are those of transformers' ``generate(num_beams=...)``: a hypothesis scores the sum
of its log probabilities over its generated length to the power of ``length_penalty``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tenfold.core.plan import TokenLogprobs
from tenfold.core.sequence import Sequence


class Hypothesis(NamedTuple):
    """A finished text: its generated tokens and its score."""

    score: float
    tokens: tuple[int, ...]


class Growth(NamedTuple):
    """Beam ``parent`` (an index) goes on with ``token`` at the summed log probability ``score``."""

    score: float
    parent: int
    token: int


@dataclass(slots=True, eq=False)
class BeamSearch:
    """The beams of one request.

    ``beams`` are alive with the summed log probabilities ``scores``, best first; ``idle`` are members without a beam.
    ``arrived`` holds the candidates of the beams that came back at the current length. A step of the search needs all.
    """

    width: int
    length_penalty: float
    early_stopping: bool | str
    max_tokens: int
    stop_token_ids: frozenset[int]
    beams: list[Sequence]
    idle: list[Sequence]
    scores: list[float] = field(default_factory=lambda: [0.0])
    arrived: dict[int, TokenLogprobs] = field(default_factory=dict)
    finished: list[Hypothesis] = field(default_factory=list)

    @classmethod
    def of(cls, leader: Sequence, others: list[Sequence]) -> BeamSearch:
        params = leader.request.params
        search = cls(
            params.beam_width,
            params.length_penalty,
            params.early_stopping,
            leader.request.max_tokens,
            leader.request.stop_token_ids,
            [leader],
            others,
        )
        for member in search.members:
            member.search, member.draws = search, 0
        return search

    @property
    def members(self) -> list[Sequence]:
        return [*self.beams, *self.idle]

    @property
    def candidates(self) -> int:
        """Most likely tokens needed of each beam: enough that ``width`` go on whatever stop tokens are among them."""
        return max(2, 1 + len(self.stop_token_ids)) * self.width

    @property
    def complete(self) -> bool:
        """Whether all beams came back."""
        return len(self.arrived) == len(self.beams)

    def advance(self) -> list[Growth] | None:
        """One step: the growths that go on, best first, or None when the search is over. Needs ``complete``."""
        best = self._best()
        generated = len(self.beams[0].tokens) - len(self.beams[0].request.prompt) + 1
        ends = [growth.token in self.stop_token_ids or generated >= self.max_tokens for growth in best]
        for growth, end in zip(best[: self.width], ends, strict=False):
            if end:
                self._finish(growth, generated)
        going = [growth for growth, end in zip(best, ends, strict=True) if not end][: self.width]
        self.arrived.clear()
        full = len(self.finished) == self.width
        if all(ends) or (full and self.early_stopping is True):
            return None
        longest = self.max_tokens if self.early_stopping == "never" and self.length_penalty > 0 else generated
        if full and going[0].score / longest**self.length_penalty <= self.finished[-1].score:
            return None
        self.scores = [growth.score for growth in going]
        return going

    def _best(self) -> list[Growth]:
        growths = [
            Growth(score + logprob, parent, token)
            for parent, (seq, score) in enumerate(zip(self.beams, self.scores, strict=True))
            for token, logprob in self.arrived[seq.id].top
        ]
        growths.sort(key=lambda growth: (-growth.score, growth.parent, growth.token))
        return growths[: self.candidates]

    def _finish(self, growth: Growth, generated: int) -> None:
        """Keep a finished hypothesis if it is among the best."""
        parent = self.beams[growth.parent]
        tokens = (*parent.tokens[len(parent.request.prompt) :], growth.token)
        self.finished.append(Hypothesis(growth.score / generated**self.length_penalty, tokens))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]
