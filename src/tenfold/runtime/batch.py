"""From a plan to the tensors of one forward pass.

The runner keeps one row per running sequence: its block table and its latest sampled token. Plans carry only what
changed, so building a batch costs by the tokens of the step and not by the lengths of the contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tenfold.core import CacheSpec, StepPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """The flattened tokens of a step, T in all, of B sequences; S of them are sampled.

    ``starts`` [B] and ``contexts`` [B] are each sequence's first position and its length after the step; its tokens are
    ``bounds[b]`` to ``bounds[b + 1]``. ``tables`` [B, blocks] has each sequence's block table, valid up to
    ``ceil(contexts / block_size)``. ``places`` [T] is where each token's key and value go: page times block size plus
    offset.
    """

    token_ids: Tensor
    positions: Tensor
    places: Tensor
    sampled: Tensor
    rows: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    contexts: np.ndarray
    bounds: np.ndarray
    tables: np.ndarray
    drawn: Draws


@dataclass(frozen=True, slots=True)
class Draws:
    """Who gets a token in a step, in the order of its outcome: works that sample, then sequences that branch off.

    ``rows`` and ``positions`` say for which row of the batch and which position in its sequence, ``logits`` [len(rows)]
    from which of the S rows of logits.
    """

    rows: list[int]
    positions: list[int]
    logits: list[int]

    @classmethod
    def of(cls, plan: StepPlan) -> Draws:
        sampling = [w for w in plan.work if w.sample]
        rows = [w.row for w in sampling]
        positions = [w.start + w.length for w in sampling]
        logits = list(range(len(rows)))
        branching = [entry for entry in plan.entries if entry.source >= 0]
        if branching:
            index = {row: i for i, row in enumerate(rows)}
            for entry in branching:
                logits.append(index[entry.source])
                positions.append(positions[index[entry.source]])
                rows.append(entry.row)
        return cls(rows, positions, logits)


class Rows:
    """The state of every row of the batch: block tables and latest tokens, changed in place by plans."""

    def __init__(self, spec: CacheSpec, max_sequences: int, max_context: int, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.tables = np.zeros((max_sequences, spec.blocks_for(max_context)), dtype=np.int32)
        self.latest = np.zeros(max_sequences, dtype=np.int64)

    def apply(self, plan: StepPlan) -> Batch:
        """Bring the tables up to date and lay out the step's tokens."""
        size, tables = self.spec.block_size, self.tables
        for w in plan.work:
            if w.gained:
                end = -(-(w.start + w.length) // size)
                tables[w.row, end - len(w.gained) : end] = w.gained
        for entry in plan.entries:
            if entry.source >= 0:
                tables[entry.row] = tables[entry.source]
        for rewrite in plan.rewrites:
            tables[rewrite.row, rewrite.place] = rewrite.block
        rows = np.array([w.row for w in plan.work], dtype=np.int64)
        starts = np.array([w.start for w in plan.work], dtype=np.int64)
        lengths = np.array([w.length for w in plan.work], dtype=np.int64)
        bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(bounds[-1]) - (bounds[:-1] - starts)[owner]
        places = tables[rows[owner], positions // size].astype(np.int64) * size + positions % size
        sampling = np.flatnonzero([w.sample for w in plan.work])
        longest = int((starts + lengths).max())
        return Batch(
            token_ids=self._tensor(self._tokens(plan, rows, bounds)),
            positions=self._tensor(positions),
            places=self._tensor(places),
            sampled=self._tensor(bounds[1:][sampling] - 1),
            rows=rows,
            slots=np.array([w.slot for w in plan.work], dtype=np.int64),
            starts=starts,
            contexts=starts + lengths,
            bounds=bounds,
            tables=tables[rows, : self.spec.blocks_for(longest)],
            drawn=Draws.of(plan),
        )

    def _tokens(self, plan: StepPlan, rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Known inputs as they are; an input that an earlier step sampled comes from its row."""
        tokens = np.empty(bounds[-1], dtype=np.int64)
        if len(tokens) == len(rows):
            tokens[:] = [w.tokens[0] if w.tokens else -1 for w in plan.work]
            pending = tokens < 0
            tokens[pending] = self.latest[rows[pending]]
            return tokens
        for i, w in enumerate(plan.work):
            begin = bounds[i]
            tokens[begin : begin + len(w.tokens)] = w.tokens
            if len(w.tokens) < w.length:
                tokens[bounds[i + 1] - 1] = self.latest[w.row]
        return tokens

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
