"""The kernels compiled from C++, for a CPU in bfloat16 or float32."""

from __future__ import annotations

from torch import Tensor

from tenfold.runtime.batch import Batch
from tenfold.runtime.kernels import native
from tenfold.runtime.kernels.delta_rule import Inputs
from tenfold.runtime.kernels.interface import Recurrent


class NativeKernels:
    """``Kernels`` by ``native``."""

    name = "native"

    def store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, batch: Batch) -> None:
        native.store(keys, values, key, value, batch.places)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float) -> Tensor:
        return native.paged_attention(query, keys, values, batch.tables, batch.starts, batch.bounds, scale)

    def convolve(self, x: Tensor, weight: Tensor, tails: Tensor, recurrent: Recurrent) -> Tensor:
        return native.convolve(x, weight, tails, recurrent.bounds, recurrent.places)

    def delta_rule(self, inputs: Inputs, states: Tensor, recurrent: Recurrent) -> Tensor:
        return native.delta_rule(*inputs, states, recurrent.bounds, recurrent.places)
