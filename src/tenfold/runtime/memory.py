"""The arena as one allocation, and the strided views of it that kernels read and write.

    page:  | layer 0 keys | layer 0 values | layer 1 keys | ... |      one block of tokens, all full-attention layers

A view has the page as its outermost stride, so following a block table is an index and nothing is ever copied to be
looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tenfold.core import CacheSpec, Copy, ModelSpec
from tenfold.errors import ModelError


class ArenaMemory:
    """``num_pages`` pages of ``page_bytes`` each on one device.

    Attributes:
        keys, values: per full-attention layer a view [pages, block_size, kv_heads, head_dim] in the compute dtype.
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
        elements = self.data.view(dtype)
        stride = spec.page_bytes // dtype.itemsize
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        offset = 0
        for layer in model.attention:
            shape = (spec.num_pages, spec.block_size, layer.kv_heads, layer.head_dim)
            strides = (stride, layer.kv_heads * layer.head_dim, layer.head_dim, 1)
            size = spec.block_size * layer.kv_heads * layer.head_dim
            self.keys.append(elements.as_strided(shape, strides, offset))
            self.values.append(elements.as_strided(shape, strides, offset + size))
            offset += 2 * size

    def copy(self, copies: Iterable[Copy]) -> None:
        """Execute page copies one after the other; source and target of one copy do not overlap."""
        for source, target, pages in copies:
            self.pages[target : target + pages].copy_(self.pages[source : source + pages])
