"""What a set of kernels offers to a forward pass, and where a step's recurrent states are."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from tenfold.runtime.batch import Batch
from tenfold.runtime.kernels.convolution import Windows
from tenfold.runtime.kernels.delta_rule import Inputs, Split


class Recurrent:
    """Which tokens of a step go with which slot: ``bounds[b]`` to ``bounds[b + 1]`` with the one at ``places[b]``.

    The layouts that the torch kernels work by are made when one first asks; all layers of a step share them.
    """

    def __init__(self, bounds: np.ndarray, places: np.ndarray, states: Tensor, tails: Tensor) -> None:
        """``bounds`` int64 [B + 1] and ``places`` int64 [B]; ``states`` and ``tails`` of any layer."""
        self.bounds = bounds
        self.places = places
        self._states = states
        self._tails = tails

    @cached_property
    def windows(self) -> Windows:
        """For ``convolution.convolve``."""
        return Windows.of(self.bounds, self.places, self._tails.shape[-1] + 1, self._tails.device)

    @cached_property
    def split(self) -> Split:
        """For ``delta_rule.gated_delta_rule``."""
        return Split.of(self.bounds, self.places, self._states)


class Kernels(Protocol):
    """The operations of a forward pass that follow block tables and slots. ``models.base.Step`` says what they mean."""

    name: str

    def store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, batch: Batch) -> None:
        """Write the step's keys and values [T, kv_heads, head_dim] into a layer's views."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float) -> Tensor:
        """Causal attention of [T, heads, head_dim] over what the views hold; a tensor like ``query``."""

    def convolve(self, x: Tensor, weight: Tensor, tails: Tensor, recurrent: Recurrent) -> Tensor:
        """Causal convolution of [T, channels]; ``tails`` [slots, channels, width - 1] are brought up to date."""

    def delta_rule(self, inputs: Inputs, states: Tensor, recurrent: Recurrent) -> Tensor:
        """The gated delta rule on ``states`` [slots, value_heads, ...]; a tensor like ``inputs.value``."""
