"""One forward pass in plain torch, over the arena."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from torch import Tensor

from tenfold.runtime.batch import Batch
from tenfold.runtime.kernels import convolution, reference
from tenfold.runtime.kernels.convolution import Windows
from tenfold.runtime.kernels.delta_rule import Inputs, Split, gated_delta_rule
from tenfold.runtime.memory import ArenaMemory


class ForwardStep:
    """What a model sees of one forward pass (``tenfold.models.base.Step``)."""

    def __init__(self, batch: Batch, memory: ArenaMemory) -> None:
        self._batch = batch
        self._memory = memory
        self.token_ids = batch.token_ids
        self.positions = batch.positions
        self.sampled = batch.sampled
        if memory.states:
            # A slot is handed on as its former owner left it.
            memory.clear(batch.slots[batch.starts == 0].tolist())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        reference.store(keys, values, key, value, self._batch.places)
        return reference.paged_attention(query, keys, values, self._batch, scale)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return convolution.convolve(x, weight, self._memory.tails[layer], self._windows)

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        inputs = Inputs(query, key, value, decay, beta)
        return gated_delta_rule(inputs, self._memory.states[layer], self._split)

    # Which tokens go with which slot is the same in all layers.

    @cached_property
    def _windows(self) -> Windows:
        tails = self._memory.tails[0]
        return Windows.of(self._batch.bounds, self._places, tails.shape[-1] + 1, tails.device)

    @cached_property
    def _split(self) -> Split:
        return Split.of(self._batch.bounds, self._places, self._memory.states[0])

    @cached_property
    def _places(self) -> np.ndarray:
        return self._memory.places(self._batch.slots)
