"""The gated delta rule (arXiv:2412.06464) over states in the arena: one token of many sequences, or many of several.

Per value head, with unit vectors q and k, a state S [key_dim, value_dim] lives by

    S <- exp(decay) S;    S <- S + k (beta (v - k S));    output = q S / sqrt(key_dim).

``step`` is this rule. ``chunked`` does the same for a chunk of tokens at a time, with matrix products: the values that
tokens really write, ``u = beta (v - k S)``, depend on each other through a unit lower triangular system (the UT
transform of arXiv:2406.06484, section 3), which is solved for all chunks at once, before the states are known.

Both change ``states`` in place, a float32 view [slots, value_heads, key_dim, value_dim], and return float32
[T, value_heads, value_dim].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 64
"""Tokens solved together: the work within chunks grows with it, the number of dependent steps falls."""
PIECE_BYTES = 4 * 2**20
"""States that ``step`` works on at a time on a CPU: five passes over few enough to stay in its cache."""
EPSILON = 1e-6
"""Added to squared lengths before the root, as in transformers and in flash-linear-attention."""


class Inputs(NamedTuple):
    """T tokens, in any floating dtype.

    ``query`` and ``key`` are [T, key_heads, key_dim], ``value`` [T, value_heads, value_dim], ``decay`` (natural
    logarithms, at most 0) and ``beta`` [T, value_heads]. A key head serves neighbouring value heads.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor

    @property
    def group(self) -> int:
        """Value heads of each key head."""
        return self.value.shape[1] // self.key.shape[1]

    def at(self, tokens: Tensor | slice) -> Inputs:
        """Those of ``tokens`` alone, in that order."""
        return Inputs(*(x[tokens] for x in self))


@dataclass(frozen=True, slots=True)
class Chunks:
    """The tokens of N sequences cut into chunks: round i holds chunk i of every sequence that has one.

    ``cells`` int64 [T] is where each token goes in a grid [chunks, size] whose rows are ordered by round, within a
    round by sequence, longest first. ``rounds`` counts the sequences of each round: always the first ones of the N.
    ``places`` int64 [N] are the places of their slots, in the same order.
    """

    cells: Tensor
    places: Tensor
    rounds: list[int]
    size: int

    @classmethod
    def of(cls, lengths: np.ndarray, places: np.ndarray, device: torch.device) -> Chunks:
        """Lay out sequences of ``lengths`` tokens, one after the other, with their states at ``places``."""
        size = min(CHUNK, int(lengths.max()))
        counts = -(-lengths // size)
        order = np.argsort(-counts, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        rounds = [int((counts > i).sum()) for i in range(counts.max())]
        first = np.cumsum([0, *rounds])
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        cells = (first[within // size] + np.repeat(rank, lengths)) * size + within % size
        return cls(torch.from_numpy(cells).to(device), torch.from_numpy(places[order]).to(device), rounds, size)


class Piece(NamedTuple):
    """Some of the sequences with one token: ``tokens`` counts them, ``places`` says where their states are.

    ``places`` is a slice where the slots are neighbours: then their states are a view, and nothing is gathered.
    """

    tokens: slice
    places: Tensor | slice

    @classmethod
    def cut(cls, places: np.ndarray, states: Tensor) -> list[Piece]:
        """Cut sequences with states at ``places``, ascending, into pieces that suit the device of ``states``."""
        count = max(1, len(places))
        if states.device.type == "cpu":
            count = max(1, PIECE_BYTES // (states.element_size() * states[0].numel()))
        pieces = []
        for begin in range(0, len(places), count):
            part = places[begin : begin + count]
            first, last = int(part[0]), int(part[-1])
            neighbours = last - first == len(part) - 1
            where = slice(first, last + 1) if neighbours else torch.from_numpy(part).to(states.device)
            pieces.append(cls(slice(begin, begin + count), where))
        return pieces


@dataclass(frozen=True, slots=True)
class Split:
    """The tokens of a step by the form that computes them.

    ``single`` int64 are those that are their sequence's only one, cut into ``pieces``; ``several`` int64 all others,
    laid out by ``chunks``.
    """

    single: Tensor
    pieces: list[Piece]
    several: Tensor
    chunks: Chunks | None

    @classmethod
    def of(cls, bounds: np.ndarray, places: np.ndarray, states: Tensor) -> Split:
        """Split sequences whose tokens are ``bounds[b]`` to ``bounds[b + 1]``; ``places`` says where in ``states``."""
        device = states.device
        lengths = np.diff(bounds)
        long = lengths > 1
        ones = np.flatnonzero(~long)
        ones = ones[np.argsort(places[ones])]
        several = np.flatnonzero(np.repeat(long, lengths))
        return cls(
            torch.from_numpy(bounds[ones]).to(device),
            Piece.cut(places[ones], states),
            torch.from_numpy(several).to(device),
            Chunks.of(lengths[long], places[long], device) if len(several) else None,
        )


def gated_delta_rule(inputs: Inputs, states: Tensor, split: Split) -> Tensor:
    """Apply the rule to every token of a step in the form that suits it. Returns a tensor like ``inputs.value``."""
    value = inputs.value
    output = value.new_empty(value.shape)
    if split.pieces:
        output[split.single] = step(inputs.at(split.single), states, split.pieces).to(value.dtype)
    if split.chunks is not None:
        output[split.several] = chunked(inputs.at(split.several), states, split.chunks).to(value.dtype)
    return output


def step(inputs: Inputs, states: Tensor, pieces: list[Piece]) -> Tensor:
    """One token of each sequence of ``pieces``."""
    output = torch.empty(inputs.value.shape, device=states.device)
    for tokens, places in pieces:
        output[tokens] = _step(inputs.at(tokens), states, places)
    return output


def _step(inputs: Inputs, states: Tensor, places: Tensor | slice) -> Tensor:
    """States are what takes the time: they are read once into decayed copies, which are read once for key and query
    together, and written once. For that, the output is taken from the old state: ``q S' = q S + (q k) u``."""
    query, key = (_unit(x).repeat_interleave(inputs.group, dim=1) for x in (inputs.query, inputs.key))
    query = query / math.sqrt(query.shape[-1])
    decayed = states[places] * inputs.decay.float().exp()[..., None, None]
    read = torch.stack((key, query), dim=2) @ decayed
    written = (inputs.value.float() - read[:, :, 0]) * inputs.beta.float()[..., None]
    outer = key[..., None], written[:, :, None]
    if isinstance(places, slice):
        torch.addcmul(decayed, *outer, out=states[places])
    else:
        states[places] = decayed.addcmul_(*outer)
    return read[:, :, 1] + (query * key).sum(-1, keepdim=True) * written


def chunked(inputs: Inputs, states: Tensor, chunks: Chunks) -> Tensor:
    """All tokens of the sequences in ``chunks``.

    Dimensions inside: chunk (or sequence), key head, value head of it, token, feature.
    """
    query, key = (_grid(_unit(x), 1, chunks) for x in (inputs.query, inputs.key))
    query = query / math.sqrt(query.shape[-1])
    value, decay, beta = (_grid(x, inputs.group, chunks) for x in (inputs.value, inputs.decay, inputs.beta))
    # Sums between any two tokens, rather than differences of sums from the start, which cancel after a strong decay.
    between = decay[..., None].expand(*decay.shape, chunks.size).tril(-1).cumsum(-2).exp().tril()
    since = decay.cumsum(-1).exp()[..., None]
    beta = beta[..., None]
    system = key @ key.mT * between * beta
    sides = torch.cat((value, key * since), dim=-1) * beta
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = query @ key.mT * between
    query = query * since
    writes = (key * between[..., -1, :, None]).mT
    output = torch.empty_like(values)
    state = states[chunks.places]
    grouped = state.view(len(state), -1, inputs.group, *state.shape[2:])
    begin = 0
    for count in chunks.rounds:
        now, end = grouped[:count], begin + count
        written = values[begin:end] - keys[begin:end] @ now
        output[begin:end] = query[begin:end] @ now + scores[begin:end] @ written
        now.mul_(since[begin:end, :, :, -1:]).add_(writes[begin:end] @ written)
        begin = end
    states[chunks.places] = state
    return output.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)[chunks.cells]


def _unit(x: Tensor) -> Tensor:
    """Vectors of the last dimension at length one, in float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def _grid(x: Tensor, group: int, chunks: Chunks) -> Tensor:
    """[T, heads, ...] to float32 [chunks, heads / group, group, size, ...]; cells without a token are zero.

    Zeros change nothing: they neither decay a state nor write to it.
    """
    cells = torch.zeros(sum(chunks.rounds) * chunks.size, *x.shape[1:], device=x.device)
    cells[chunks.cells] = x.float()
    split = cells.view(-1, chunks.size, x.shape[1] // group, group, *x.shape[2:])
    return split.movedim(1, 3).contiguous()
