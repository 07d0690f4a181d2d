"""The plan of one step, and what comes back: plain data that can be logged, replayed, priced and executed.

A plan is everything the runner may know about a step. It is executed in this order:

1. ``copies``, one after the other: whole pages, for moves, copy-on-write and states alike;
2. ``entries``: a row of the batch is given to a sequence, whatever it held before;
3. per ``work``: ``gained`` blocks are appended to the row's table;
4. entries with a ``source`` take over that row's table;
5. ``rewrites``: single table entries whose block moved or became the row's own;
6. the forward pass over all ``work``, then sampling where ``sample`` is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tenfold.core.types import SamplingParams


class Copy(NamedTuple):
    """``pages`` consecutive pages from ``source`` to ``target``."""

    source: int
    target: int
    pages: int


class Entry(NamedTuple):
    """A sequence takes a row. ``reused`` are the tokens before its first work, whose state is already in the cache.

    With ``source`` (a row, else -1) it branches off a sequence that this step computes: its table is that row's, and
    its first token is sampled from that row's logits, after the samples of all work and in the order of entries.
    ``candidates`` most likely tokens are returned with every sample, whatever the parameters ask for.
    """

    row: int
    sequence: int
    epoch: int
    prompt_length: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    reused: tuple[int, ...]
    source: int = -1
    candidates: int = 0


class Rewrite(NamedTuple):
    """Entry ``place`` of the block table of ``row`` is now ``block``."""

    row: int
    place: int
    block: int


class Work(NamedTuple):
    """One sequence's share of a step: tokens ``start`` to ``start + length`` of it.

    ``tokens`` are the known inputs; one fewer than ``length`` when the last is still being sampled by an earlier step,
    in which case the runner uses the row's latest sample. ``gained`` are the blocks that the table grew by, so that
    after this work it has ``ceil((start + length) / block_size)`` entries.
    """

    row: int
    sequence: int
    epoch: int
    start: int
    length: int
    tokens: tuple[int, ...]
    gained: tuple[int, ...]
    slot: int
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    work: tuple[Work, ...]
    entries: tuple[Entry, ...] = ()
    copies: tuple[Copy, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(work.length for work in self.work)


class TokenLogprobs(NamedTuple):
    """Natural logarithms: of the chosen token, and of the most likely ones in falling order."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """``tokens`` holds one sampled token for each work with ``sample`` set, in plan order, then one for each entry
    with a ``source``; ``logprobs`` likewise.

    ``seconds`` is what the step took on the device.
    """

    step: int
    tokens: tuple[int, ...] | list[int]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    seconds: float = 0.0
