"""Choosing tokens: penalties, filters and draws, without ever sorting a vocabulary.

A draw is one uniform number from a counter generator keyed by (seed, position), mapped through the cumulative
distribution of what the filters leave. It depends on nothing else in the batch, and a step that is computed again
draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tenfold.core import Entry, SamplingParams, StepPlan, TokenLogprobs
from tenfold.runtime.batch import Batch, Draws

FIRST_CANDIDATES = 128
"""Most likely tokens looked at first for a nucleus; four times as many whenever they do not cover it."""


class RowSampling:
    """What the sampler keeps of the sequence in one row."""

    __slots__ = ("candidates", "output_counts", "params", "prompt_length", "seen", "stop_token_ids", "tracked")

    def __init__(self, entry: Entry, vocab_size: int, device: torch.device) -> None:
        params = entry.params
        self.params = params
        self.candidates = min(max(entry.candidates, params.logprobs or 0), vocab_size)
        self.prompt_length = entry.prompt_length
        self.stop_token_ids = list(entry.stop_token_ids)
        self.seen: Tensor | None = None
        self.output_counts: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if params.presence_penalty or params.frequency_penalty:
            self.output_counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.tracked = self.seen is not None or self.output_counts is not None

    def observe(self, tokens: Tensor, start: int) -> None:
        """Count inputs: every sampled token is an input before the next one is sampled, so none is missed."""
        if self.seen is not None:
            self.seen[tokens] = True
        if self.output_counts is not None:
            outputs = tokens[max(0, self.prompt_length - start) :]
            self.output_counts.index_add_(0, outputs, torch.ones(len(outputs), device=outputs.device))

    def adjusts(self, position: int) -> bool:
        return self.tracked or bool(self.params.logit_bias) or self._too_short(position)

    def adjust(self, logits: Tensor, position: int) -> None:
        """Apply penalties, bias and the ban on an early end to one row of float32 logits [vocabulary], in place.

        The repetition penalty is that of CTRL (arXiv:1909.05858), the others are OpenAI's.
        """
        params = self.params
        if self.seen is not None:
            penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(self.seen, penalised, logits))
        if self.output_counts is not None:
            logits -= params.frequency_penalty * self.output_counts
            logits -= params.presence_penalty * (self.output_counts > 0)
        if params.logit_bias:
            tokens = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[tokens] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        if self._too_short(position):
            logits[self.stop_token_ids] = float("-inf")

    def _too_short(self, position: int) -> bool:
        return bool(self.stop_token_ids) and position - self.prompt_length < self.params.min_tokens


class Sampler:
    """Samples one token for each work of a step that asks for it."""

    def __init__(
        self,
        max_sequences: int,
        vocab_size: int,
        device: torch.device,
        argmax: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """``argmax`` finds the first of the largest in each row of float32 logits; torch's own if it is None."""
        self._argmax = argmax or (lambda logits: logits.argmax(-1))
        self.vocab_size = vocab_size
        self.device = device
        self._rows: list[RowSampling | None] = [None] * max_sequences

    def enter(self, entry: Entry) -> None:
        """A sequence takes a row."""
        row = RowSampling(entry, self.vocab_size, self.device)
        self._rows[entry.row] = row
        if row.tracked and entry.reused:
            row.observe(torch.tensor(entry.reused, device=self.device), 0)

    def observe(self, plan: StepPlan, batch: Batch) -> None:
        """Count the step's inputs for the rows whose penalties need it."""
        for i, w in enumerate(plan.work):
            row = self._row(w.row)
            if row.tracked:
                row.observe(batch.token_ids[batch.bounds[i] : batch.bounds[i + 1]], w.start)

    def sample(self, logits: Tensor, drawn: Draws) -> tuple[list[int], tuple[TokenLogprobs | None, ...] | None]:
        """Choose from ``logits`` [S, vocabulary] one token for each of ``drawn``."""
        rows = [self._row(row) for row in drawn.rows]
        positions = drawn.positions
        logits = logits.float()
        if len(rows) > len(logits):
            logits = logits[drawn.logits]
        adjusted = [i for i, row in enumerate(rows) if row.adjusts(positions[i])]
        wanted = [i for i, row in enumerate(rows) if row.candidates or row.params.logprobs is not None]
        original = logits[wanted] if wanted else None
        for i in adjusted:
            rows[i].adjust(logits[i], positions[i])
        tokens = self._argmax(logits)
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if random:
            tokens[random] = draw(logits[random], [rows[i].params for i in random], [positions[i] for i in random])
        result: list[int] = tokens.tolist()
        if original is None:
            return result, None
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for at, i in enumerate(wanted):
            logprobs[i] = _logprobs(original[at], result[i], rows[i].candidates)
        return result, tuple(logprobs)

    def _row(self, row: int) -> RowSampling:
        state = self._rows[row]
        if state is None:
            raise RuntimeError(f"row {row} was never entered")
        return state


def _logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    logprobs = logits.log_softmax(-1)
    values, tokens = logprobs.topk(count) if count else (logprobs[:0], logprobs[:0].long())
    return TokenLogprobs(float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def uniform(seeds: list[int], positions: list[int]) -> np.ndarray:
    """One float64 in [0, 1) per pair of seed and position, by the splitmix64 finaliser (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        z = _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
        z = _mix(z + np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    fractions: np.ndarray = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


def _mix(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(logits: Tensor, params: list[SamplingParams], positions: list[int]) -> Tensor:
    """Draw one token per row of adjusted float32 logits [R, vocabulary]: temperature, top_k, top_p, then min_p.

    Rows are grouped by how many candidates they need, which only their own parameters decide, so that the order of
    equally likely candidates does not depend on the batch.
    """
    scaled = logits / torch.tensor([max(p.temperature, 1e-5) for p in params], device=logits.device)[:, None]
    draws = torch.from_numpy(uniform([p.seed or 0 for p in params], positions)).to(logits.device)
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    groups: dict[int, list[int]] = {}
    for i, p in enumerate(params):
        groups.setdefault(_candidates(p, logits.shape[1]), []).append(i)
    for count, members in groups.items():
        if count == 0:
            cumulative = scaled[members].softmax(-1).double().cumsum(-1)
            tokens[members] = _invert(cumulative, draws[members])
        else:
            _draw_filtered(scaled, draws, params, tokens, members, count)
    return tokens


def _candidates(params: SamplingParams, vocabulary: int) -> int:
    """Most likely tokens that are enough to apply the filters to begin with; 0 if nothing is filtered."""
    if params.top_k > 0:
        return min(params.top_k, vocabulary)
    if params.top_p < 1.0 or params.min_p > 0.0:
        return min(FIRST_CANDIDATES, vocabulary)
    return 0


def _draw_filtered(
    scaled: Tensor, draws: Tensor, params: list[SamplingParams], tokens: Tensor, members: list[int], count: int
) -> None:
    """Fill ``tokens`` for ``members``, looking at the ``count`` most likely tokens of each, or at more where needed."""
    vocabulary = scaled.shape[1]
    rows = scaled[members]
    values, indices = rows.topk(count, dim=-1)
    limited = torch.tensor([params[i].top_k > 0 for i in members], device=scaled.device)
    total = torch.where(limited, values.logsumexp(-1), rows.logsumexp(-1))
    likely = (values - total[:, None]).exp().double()
    top_p = torch.tensor([params[i].top_p for i in members], dtype=torch.float64, device=scaled.device)
    floor = torch.tensor([params[i].min_p for i in members], device=scaled.device) * likely[:, 0]
    before = likely.cumsum(-1) - likely
    keep = (before < top_p[:, None]) & (likely >= floor[:, None])
    keep[:, 0] = True
    covered = limited | ~keep[:, -1] | (count == vocabulary)
    done = covered.nonzero().flatten()
    if len(done):
        cumulative = torch.where(keep[done], likely[done], 0.0).cumsum(-1)
        places = torch.tensor(members, device=scaled.device)[done]
        picks = _invert(cumulative, draws[places])
        tokens[places] = indices[done].gather(1, picks[:, None]).squeeze(1)
    rest = [members[i] for i in (~covered).nonzero().flatten().tolist()]
    if rest:
        _draw_filtered(scaled, draws, params, tokens, rest, min(4 * count, vocabulary))


def _invert(cumulative: Tensor, draws: Tensor) -> Tensor:
    """Index of the first entry of each row whose cumulative weight exceeds the draw's share of the total."""
    total = cumulative[:, -1:]
    targets = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)
