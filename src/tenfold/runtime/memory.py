"""The arena as one allocation, and the strided views of it that kernels read and write.

    page:  | layer 0 keys | layer 0 values | layer 1 keys | ... |      one block of tokens, all full-attention layers
           | ... | layer 0 scales of keys | layer 0 scales of values | ... |   behind them where they are quantised
    slot:  | layer 0 state | layer 1 state | ... | layer 0 tail | layer 1 tail | ... |       one sequence, several pages

A view has the page, or the slot, as its outermost stride, so following a block table is an index and nothing is ever
copied to be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from tenfold.core import CacheSpec, Copy, ModelSpec
from tenfold.core.spec import FLOAT32_BYTES
from tenfold.errors import ModelError


class ArenaMemory:
    """``num_pages`` pages of ``page_bytes`` each on one device.

    Attributes:
        keys, values: per full-attention layer a view [pages, block_size, kv_heads, head_dim] in the compute dtype, or
            uint8 where they are quantised. Compiled kernels order what is in a view's page as suits them.
        key_scales, value_scales: per full-attention layer a float32 view [pages, kv_heads, block_size] where keys and
            values are quantised, else empty.
        states: per recurrent layer a float32 view [num_slots, value_heads, key_dim, value_dim].
        tails: per recurrent layer a view [num_slots, channels, width - 1] in the compute dtype, oldest input first.

    Strides are never negative in torch, so ``states`` and ``tails`` are indexed by ``places`` of slots.
    """

    def __init__(self, spec: CacheSpec, model: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        if dtype.itemsize != model.element_bytes:
            raise ValueError(f"{dtype} does not have {model.element_bytes} bytes")
        self.spec = spec
        try:
            self.data = torch.empty(spec.num_pages * spec.page_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise ModelError(
                f"cannot allocate an arena of {spec.num_pages * spec.page_bytes:,} bytes on {device}: lower the memory"
            ) from error
        self.pages = self.data.view(spec.num_pages, spec.page_bytes)
        kind = torch.uint8 if model.kv_quantized else dtype
        elements = self.data.view(kind)
        stride = spec.page_bytes // kind.itemsize
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.key_scales: list[Tensor] = []
        self.value_scales: list[Tensor] = []
        offset = 0
        for layer in model.attention:
            shape = (spec.num_pages, spec.block_size, layer.kv_heads, layer.head_dim)
            strides = (stride, layer.kv_heads * layer.head_dim, layer.head_dim, 1)
            size = spec.block_size * layer.kv_heads * layer.head_dim
            self.keys.append(elements.as_strided(shape, strides, offset))
            self.values.append(elements.as_strided(shape, strides, offset + size))
            offset += 2 * size
        if model.kv_quantized:
            scales, at = self.data.view(torch.float32), offset // FLOAT32_BYTES
            for layer in model.attention:
                for views in (self.key_scales, self.value_scales):
                    of_page = (spec.num_pages, layer.kv_heads, spec.block_size)
                    places = (spec.page_bytes // FLOAT32_BYTES, spec.block_size, 1)
                    views.append(scales.as_strided(of_page, places, at))
                    at += layer.kv_heads * spec.block_size
        self.states: list[Tensor] = []
        self.tails: list[Tensor] = []
        first = (spec.num_pages - spec.num_slots * spec.slot_pages) * spec.page_bytes
        slot_bytes = spec.slot_pages * spec.page_bytes

        def view(kind: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
            strides = [slot_bytes // kind.itemsize, *(math.prod(shape[i + 1 :]) for i in range(len(shape)))]
            return self.data.view(kind).as_strided((spec.num_slots, *shape), strides, offset // kind.itemsize)

        for recurrent in model.recurrent:
            matrix = (recurrent.value_heads, recurrent.key_dim, recurrent.value_dim)
            self.states.append(view(torch.float32, matrix, first))
            first += FLOAT32_BYTES * recurrent.state_elements
        for recurrent in model.recurrent:
            # Channels innermost, as they come out of the projection.
            tail = (recurrent.convolution_width - 1, recurrent.convolution_channels)
            self.tails.append(view(dtype, tail, first).mT)
            first += dtype.itemsize * recurrent.convolution_elements

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Where ``states`` and ``tails`` have the slots, which the core counts from the top of the arena."""
        places: np.ndarray = self.spec.num_slots - 1 - slots
        return places

    def clear(self, slots: Iterable[int]) -> None:
        """Set the states and tails in ``slots`` to zero, whatever they hold."""
        for slot in slots:
            first = self.spec.slot_page(slot)
            self.pages[first : first + self.spec.slot_pages] = 0

    def copy(self, copies: Iterable[Copy]) -> None:
        """Execute page copies one after the other; source and target of one copy do not overlap."""
        for source, target, pages in copies:
            self.pages[target : target + pages].copy_(self.pages[source : source + pages])
