"""Paged attention, written to be read and to be trusted: the oracle of every faster kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from tenfold.runtime.batch import Batch


def store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Write one row of keys and values per token into the arena.

    ``keys`` and ``values`` are views [pages, block_size, kv_heads, head_dim]; ``key`` and ``value`` [T, kv_heads,
    head_dim]; ``places`` int64 [T].
    """
    size = keys.shape[1]
    pages, offsets = places // size, places % size
    keys[pages, offsets] = key
    values[pages, offsets] = value


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of every token over its own sequence, through the block tables, in float32.

    ``query`` is [T, heads, head_dim]; ``keys`` and ``values`` are views [pages, block_size, kv_heads, head_dim] that
    already hold the step's own tokens. Returns [T, heads, head_dim] in the dtype of ``query``.
    """
    output = torch.empty_like(query)
    size, kv_heads, head_dim = keys.shape[1:]
    for i, context in enumerate(batch.contexts.tolist()):
        begin, end = batch.bounds[i], batch.bounds[i + 1]
        table = torch.from_numpy(batch.tables[i, : -(-context // size)]).to(query.device)
        key = keys[table].reshape(-1, kv_heads, head_dim)[:context].float()
        value = values[table].reshape(-1, kv_heads, head_dim)[:context].float()
        grouped = query[begin:end].float().view(end - begin, kv_heads, -1, head_dim)
        scores = torch.einsum("tkgd,skd->kgts", grouped, key) * scale
        if end - begin > 1:
            positions = batch.positions[begin:end]
            future = torch.arange(context, device=query.device) > positions[:, None]
            scores.masked_fill_(future, float("-inf"))
        mixed = torch.einsum("kgts,skd->tkgd", scores.softmax(-1), value)
        output[begin:end] = mixed.flatten(1, 2).to(query.dtype)
    return output
