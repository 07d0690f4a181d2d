"""Causal depthwise convolution of many sequences at once, each with a tail of past inputs in the arena."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Windows:
    """Where things stand in a column that has every sequence's tail right before its new inputs.

        | tail of sequence 0 | its inputs | tail of sequence 1 | its inputs | ...

    ``inputs`` int64 [T] are the rows of the tokens, ``before`` and ``after`` int64 [B, width - 1] those of each
    sequence's tail as it was and as it becomes. ``places`` int64 [B] are the places of the slots.
    """

    inputs: Tensor
    before: Tensor
    after: Tensor
    places: Tensor

    @classmethod
    def of(cls, bounds: np.ndarray, places: np.ndarray, width: int, device: torch.device) -> Windows:
        """Lay out sequences whose tokens are ``bounds[b]`` to ``bounds[b + 1]``, with tails of ``width - 1`` inputs."""
        reach = width - 1
        count = len(places)
        owner = np.repeat(np.arange(count), np.diff(bounds))
        inputs = np.arange(bounds[-1]) + reach * (owner + 1)
        before = (bounds[:-1] + reach * np.arange(count))[:, None] + np.arange(reach)
        after = before + np.diff(bounds)[:, None]
        return cls(*(torch.from_numpy(part).to(device) for part in (inputs, before, after, places)))


def convolve(x: Tensor, weight: Tensor, tails: Tensor, windows: Windows) -> Tensor:
    """Convolve ``x`` [T, channels] with ``weight`` [channels, width], summing in float32; keeps the tails up to date.

    ``tails`` is a view [slots, channels, width - 1], changed in place. Returns [T, channels] in the dtype of ``x``.
    """
    reach = weight.shape[1] - 1
    column = x.new_empty(len(x) + windows.before.numel(), x.shape[1])
    column[windows.inputs] = x
    column[windows.before] = tails.mT[windows.places]
    tails.mT[windows.places] = column[windows.after]
    column, taps = column.float(), weight.float().T.contiguous()
    # Windows that span two sequences are computed too: cheaper than gathering, and no token's result is among them.
    count = len(column) - reach
    mixed = column[:count] * taps[0]
    for i in range(1, reach + 1):
        mixed.addcmul_(column[i : i + count], taps[i])
    return mixed[windows.inputs - reach].to(x.dtype)
