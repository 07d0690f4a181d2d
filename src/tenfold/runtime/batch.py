"""From a plan to the tensors of one forward pass.

The runner keeps one row per running sequence: its block table and its latest sampled token. Plans carry only what
changed, so building a batch costs by the tokens of the step and not by the lengths of the contexts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

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
        work = plan.work
        rows = np.array([w.row for w in work], dtype=np.int64)
        starts = np.array([w.start for w in work], dtype=np.int64)
        # Between steps nothing is in a cache, and every function of NumPy that is called at all takes some 20 us.
        ends = list(accumulate(w.length for w in work))
        bounds = np.array([0, *ends], dtype=np.int64)
        if ends[-1] == len(work):
            owner, positions = rows, starts
        else:
            owner = np.repeat(np.arange(len(work)), [w.length for w in work])
            positions = np.arange(ends[-1]) - (bounds[:-1] - starts)[owner]
            owner = rows[owner]
        block, offset = np.divmod(positions, size)
        contexts = [w.start + w.length for w in work]
        return Batch(
            token_ids=self._tensor(self._tokens(plan, rows, bounds)),
            positions=self._tensor(positions),
            places=self._tensor(tables[owner, block].astype(np.int64) * size + offset),
            sampled=self._tensor(np.array([end - 1 for w, end in zip(work, ends, strict=True) if w.sample], np.int64)),
            rows=rows,
            slots=np.array([w.slot for w in work], dtype=np.int64),
            starts=starts,
            contexts=np.array(contexts, dtype=np.int64),
            bounds=bounds,
            tables=tables[rows, : self.spec.blocks_for(max(contexts))],
            drawn=Draws.of(plan),
        )

    def _tokens(self, plan: StepPlan, rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Known inputs as they are; an input that an earlier step sampled comes from its row."""
        if bounds[-1] == len(rows):
            latest: np.ndarray = self.latest[rows]
            for i, w in enumerate(plan.work):
                if w.tokens:
                    latest[i] = w.tokens[0]
            return latest
        tokens = np.empty(bounds[-1], dtype=np.int64)
        for i, w in enumerate(plan.work):
            begin = bounds[i]
            tokens[begin : begin + len(w.tokens)] = w.tokens
            if len(w.tokens) < w.length:
                tokens[bounds[i + 1] - 1] = self.latest[w.row]
        return tokens

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
