"""The kernels in plain torch, for every device and dtype."""

from __future__ import annotations

from torch import Tensor

from tenfold.runtime.batch import Batch
from tenfold.runtime.kernels import reference
from tenfold.runtime.kernels.convolution import convolve
from tenfold.runtime.kernels.delta_rule import Inputs, gated_delta_rule
from tenfold.runtime.kernels.interface import Recurrent


class ReferenceKernels:
    """``Kernels`` by ``reference``, ``convolution`` and ``delta_rule``."""

    name = "reference"

    def store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, batch: Batch) -> None:
        reference.store(keys, values, key, value, batch.places)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float) -> Tensor:
        return reference.paged_attention(query, keys, values, batch, scale)

    def convolve(self, x: Tensor, weight: Tensor, tails: Tensor, recurrent: Recurrent) -> Tensor:
        return convolve(x, weight, tails, recurrent.windows)

    def delta_rule(self, inputs: Inputs, states: Tensor, recurrent: Recurrent) -> Tensor:
        return gated_delta_rule(inputs, states, recurrent.split)
