"""Paged attention against dense attention in float64, over random tables in a poisoned arena."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tenfold.core import AttentionLayer, CacheSpec, Entry, ModelSpec, SamplingParams, StepPlan, Work
from tenfold.runtime.batch import Rows
from tenfold.runtime.kernels import reference
from tenfold.runtime.memory import ArenaMemory

CPU = torch.device("cpu")


def dense(query, key, value, start: int, scale: float):
    """[t, heads, dim] over [s, kv_heads, dim] in float64, one query head at a time."""
    output = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        scores = query[:, head].double() @ key[:, head // group].double().T * scale
        for t in range(len(query)):
            scores[t, start + t + 1 :] = -torch.inf
        output[:, head] = scores.softmax(-1) @ value[:, head // group].double()
    return output


@pytest.mark.parametrize("seed", range(12))
def test_mixed_rows_follow_their_tables(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    size, kv_heads, group, dim = rng.choice([1, 3, 16]), rng.choice([1, 2, 4]), rng.choice([1, 3]), rng.choice([8, 64])
    layers = (AttentionLayer(kv_heads, dim),) * 2
    model = ModelSpec("test", layers, element_bytes=4)
    spec = CacheSpec(size, 300, 0, size * model.kv_bytes_per_token)
    memory = ArenaMemory(spec, model, torch.float32, CPU)
    memory.data.fill_(0xFF)
    rows = Rows(spec, 4, 128, CPU)
    shapes = [(rng.randint(0, 60), rng.choice([1, 1, rng.randint(2, 40)])) for _ in range(4)]
    pages = rng.sample(range(spec.num_pages), spec.num_pages)
    work, sequences = [], []
    for row, (start, length) in enumerate(shapes):
        count = spec.blocks_for(start + length)
        table, pages = pages[:count], pages[count:]
        tokens = tuple(range(length))
        work.append(Work(row, row, 0, start, length, tokens, tuple(table), -1, True))
        sequences.append(
            (torch.randn(start + length, kv_heads, dim), torch.randn(start + length, kv_heads, dim), table)
        )
    entries = tuple(Entry(row, row, 0, 1, SamplingParams(), frozenset(), ()) for row in range(4))
    batch = rows.apply(StepPlan(0, tuple(work), entries))
    layer = 1
    for (start, _), (key, value, table) in zip(shapes, sequences, strict=True):
        for position in range(start):
            memory.keys[layer][table[position // size], position % size] = key[position]
            memory.values[layer][table[position // size], position % size] = value[position]
    query = torch.randn(sum(length for _, length in shapes), kv_heads * group, dim)
    new_key = torch.cat([key[start:] for (start, _), (key, _, _) in zip(shapes, sequences, strict=True)])
    new_value = torch.cat([value[start:] for (start, _), (_, value, _) in zip(shapes, sequences, strict=True)])
    reference.store(memory.keys[layer], memory.values[layer], new_key, new_value, batch.places)
    output = reference.paged_attention(query, memory.keys[layer], memory.values[layer], batch, dim**-0.5)
    for i, ((start, _), (key, value, _)) in enumerate(zip(shapes, sequences, strict=True)):
        begin, end = batch.bounds[i], batch.bounds[i + 1]
        expected = dense(query[begin:end], key, value, start, dim**-0.5)
        torch.testing.assert_close(output[begin:end].double(), expected, rtol=1e-5, atol=1e-5)
    untouched = torch.ones(spec.num_pages, dtype=torch.bool)
    untouched[np.concatenate([table for _, _, table in sequences])] = False
    assert (memory.pages[untouched] == 0xFF).all(), "nothing is written outside the tables"


def test_copies_are_executed_in_order() -> None:
    model = ModelSpec("test", (AttentionLayer(1, 4),), element_bytes=4)
    spec = CacheSpec(2, 6, 0, 2 * model.kv_bytes_per_token)
    memory = ArenaMemory(spec, model, torch.float32, CPU)
    for page in range(6):
        memory.pages[page] = page
    memory.copy([(4, 1, 2), (1, 0, 1), (5, 4, 1)])
    assert memory.pages[:, 0].tolist() == [4, 4, 5, 3, 5, 5]
