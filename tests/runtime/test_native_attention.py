"""Compiled attention against dense float64 over whole sequences, however their tokens are spread over steps."""

from __future__ import annotations

import itertools
import random as python_random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from support.programs import (
    Part,
    feed,
    make_batch,
    needs_compiler,
    new_program,
    normalised,
    poisoned_memory,
    random,
    result,
    run,
    threads,
    unit,
    within,
)
from tenfold.core import AttentionLayer
from tenfold.models.base import HeadNorm
from tenfold.runtime.memory import ArenaMemory
from tenfold.runtime.program import Activation, Program

pytestmark = [needs_compiler, pytest.mark.usefixtures("form")]

LAYER = 1
"""The layer of the arena that is used; the one before it must stay as it is."""


@dataclass
class Heads:
    """The shape of an attention layer, and what happens to its heads before they meet."""

    kv_heads: int
    group: int
    dim: int
    gap: int = 0
    """Columns between the heads of queries."""
    frequencies: Tensor = field(default_factory=lambda: torch.zeros(1))
    """Zeros rotate nothing."""
    scaling: float = 1.0
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    scale: float = 0.0

    def __post_init__(self) -> None:
        self.scale = self.scale or self.dim**-0.5

    @classmethod
    def drawn(cls, rng: python_random.Random, dim: int) -> Heads:
        half = rng.choice([1, dim // 4, dim // 2])

        def norm(rounded: bool) -> HeadNorm:
            return HeadNorm(random(dim), 1e-6, rounded)

        rounded = rng.random() < 0.5
        norms = rng.choice([(None, None), (norm(rounded), norm(rounded)), (None, norm(rounded)), (norm(rounded), None)])
        frequencies = 10_000.0 ** -(torch.arange(half) / half)
        gap = rng.choice([0, 0, dim, 6])
        return cls(rng.randint(1, 3), rng.randint(1, 8), dim, gap, frequencies, rng.choice([1.0, 1.2]), *norms)

    def inputs(self, tokens: int, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
        """Random queries with what lies between them, keys and values, of one row for each token."""
        queries = random(tokens, self.kv_heads * self.group * (self.dim + self.gap), dtype=dtype, scale=scale)
        return [queries, *(random(tokens, self.kv_heads * self.dim, dtype=dtype) for _ in range(2))]

    def record(self, program: Program, query: Activation, key: Activation, value: Activation) -> Activation:
        program.rotary(self.frequencies, self.scaling)
        return program.attention(
            LAYER,
            query,
            key,
            value,
            head_dim=self.dim,
            scale=self.scale,
            query_head_stride=self.dim + self.gap if self.gap else None,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
        )

    def queries(self, x: Tensor) -> Tensor:
        """The heads of queries [T, heads, dim], without what lies between them."""
        return x.unflatten(1, (-1, self.dim + self.gap))[..., : self.dim]

    def prepared(self, x: Tensor, norm: HeadNorm | None, positions: Tensor) -> Tensor:
        """[T, heads, dim] normalised and rotated in float64, and rounded where the dtype of ``x`` makes it so."""
        dtype, x = x.dtype, x.double()
        if norm is not None:
            x = normalised(x, norm.epsilon)
            x = ((x.to(dtype).double() if norm.rounded else x) * norm.weight).to(dtype).double()
        # Angles are float32, as transformers has them.
        angle = (positions[:, None, None].float() * self.frequencies).double()
        cosines, sines = angle.cos() * self.scaling, angle.sin() * self.scaling
        half = len(self.frequencies)
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines, x[..., 2 * half :]), -1).to(dtype).double()


@dataclass
class Sequence:
    """The inputs of one sequence, as rows of a table, and the blocks that it will need."""

    first: int
    length: int
    table: list[int]


@dataclass
class Case:
    """Some sequences over a poisoned arena."""

    heads: Heads
    memory: ArenaMemory
    sequences: list[Sequence]
    inputs: list[Tensor]
    free: list[int]
    shift: int = 0
    """What is added to all positions that rotate."""

    @classmethod
    def drawn(
        cls,
        rng: python_random.Random,
        heads: Heads,
        lengths: list[int],
        block_size: int,
        dtype: torch.dtype,
        kv_quantized: bool = False,
        **options: float,
    ) -> Case:
        counts = [-(-length // block_size) for length in lengths]
        pages = sum(counts) + 5
        layers = (AttentionLayer(heads.kv_heads, heads.dim),) * 3
        memory = poisoned_memory(layers, dtype, block_size, pages, kv_quantized=kv_quantized)
        free, sequences, first = rng.sample(range(pages), pages), [], 0
        for length, count in zip(lengths, counts, strict=True):
            sequences.append(Sequence(first, length, free[:count]))
            free, first = free[count:], first + length
        return cls(heads, memory, sequences, heads.inputs(first, dtype, **options), free)

    def program(self) -> tuple[Program, Activation, Activation]:
        """A program of nothing but attention, its queries and its result."""
        program = new_program(self.inputs[0].dtype, self.memory)
        query, key, value = feed(program, *self.inputs)
        return program, query, self.heads.record(program, query, key, value)

    def batch(self, parts: list[tuple[int, int, int]]) -> Any:
        """A step of (sequence, start, length), each of which has blocks for what it has reached and no more."""
        size, given, ids = self.memory.spec.block_size, [], []
        for number, start, length in parts:
            sequence = self.sequences[number]
            given.append(Part(start, length, sequence.table[: -(-(start + length) // size)]))
            ids.append(torch.arange(start, start + length) + sequence.first)
        batch = make_batch(given, size, token_ids=torch.cat(ids))
        batch.positions += self.shift
        return batch

    def expected(self, number: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What attention makes of some rows of a sequence, and the same of the magnitudes of values."""
        heads, sequence = self.heads, self.sequences[number]
        own = slice(sequence.first, sequence.first + sequence.length)
        query, key, value = (x[own] for x in self.inputs)
        positions = torch.arange(sequence.length)
        query = heads.prepared(heads.queries(query)[rows], heads.query_norm, rows + self.shift)
        key = heads.prepared(key.unflatten(1, (heads.kv_heads, -1)), heads.key_norm, positions + self.shift)
        value = value.double().unflatten(1, (heads.kv_heads, -1))
        key, value = (x.repeat_interleave(heads.group, 1) for x in (key, value))
        scores = torch.einsum("thd,shd->hts", query, key) * heads.scale
        weights = scores.masked_fill(positions > rows[:, None], -torch.inf).softmax(-1)
        return tuple(torch.einsum("hts,shd->thd", weights, x).flatten(1) for x in (value, value.abs()))

    def check(self, found: Tensor, parts: list[tuple[int, int, int]], tolerance: float, most: int = 10**9) -> None:
        """Compare a step's result, or the ``most`` last rows of each part."""
        begin = 0
        for number, start, length in parts:
            rows = torch.arange(max(0, length - most), length)
            expected, magnitude = self.expected(number, start + rows)
            within(found[begin + rows], expected, tolerance * magnitude)
            begin += length

    def check_arena(self, tokens: int) -> None:
        """So many tokens have their keys and values in the layer, and everything else is as it was."""
        heads, memory = self.heads, self.memory
        for view in (memory.keys[LAYER], memory.values[LAYER]):
            assert int((~view.isnan()).sum()) == tokens * heads.kv_heads * heads.dim
        for layer in (LAYER - 1, LAYER + 1):
            assert memory.keys[layer].isnan().all() and memory.values[layer].isnan().all()
        assert (memory.pages[self.free] == 0xFF).all()


def tolerance_of(dtype: torch.dtype) -> float:
    """As a share of the weighted magnitudes of values: in bfloat16 keys, weights and results are all rounded."""
    return 4 * unit(dtype) if dtype == torch.bfloat16 else 5e-5


def random_plan(rng: python_random.Random, lengths: list[int], longest: int) -> list[list[tuple[int, int, int]]]:
    """Steps of (sequence, start, length) that bring every sequence to its length, in any order, decodes among them."""
    done, steps = [0] * len(lengths), []
    while any(left := [length - reached for length, reached in zip(lengths, done, strict=True)]):
        step = []
        for number in rng.sample(range(len(lengths)), len(lengths)):
            if left[number] and rng.random() < 0.8:
                length = min(left[number], rng.choice([1, rng.randint(1, longest)]))
                step.append((number, done[number], length))
                done[number] += length
        if step:
            steps.append(step)
    return steps


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128, 256])
def test_sequences_in_steps(dim: int, rng: python_random.Random, dtype: torch.dtype) -> None:
    heads = Heads.drawn(rng, dim)
    lengths = [rng.choice([1, rng.randint(2, 20), rng.randint(20, 170)]) for _ in range(rng.randint(1, 4))]
    case = Case.drawn(rng, heads, lengths, rng.choice([16, 32, 64]), dtype)
    case.shift = rng.choice([0, 99_000])
    program, _, out = case.program()
    for step in random_plan(rng, lengths, 90):
        batch = case.batch(step)
        run(program, batch)
        case.check(result(program, out, len(batch.token_ids)), step, tolerance_of(dtype))
    case.check_arena(sum(lengths))


@pytest.mark.parametrize("dim", [16, 64, 80, 256])
def test_quantised_keys_and_values(dim: int, rng: python_random.Random, dtype: torch.dtype) -> None:
    """Bytes with a scale for every token and head: an error of about a hundredth in scores, weights and values each."""
    heads = Heads.drawn(rng, dim)
    lengths = [rng.choice([1, rng.randint(2, 20), rng.randint(20, 400)]) for _ in range(rng.randint(1, 4))]
    case = Case.drawn(rng, heads, lengths, rng.choice([16, 32, 64]), dtype, kv_quantized=True)
    program, _, out = case.program()
    for step in random_plan(rng, lengths, 90):
        batch = case.batch(step)
        run(program, batch)
        found, begin = result(program, out, len(batch.token_ids)), 0
        for number, start, length in step:
            rows = torch.arange(length)
            expected, magnitude = case.expected(number, start + rows)
            within(found[begin + rows], expected, 0.08 * magnitude + 0.02)
            error = (found[begin + rows].double() - expected).pow(2).mean().sqrt()
            assert float(error) <= 0.02 * float(magnitude.pow(2).mean().sqrt()) + 1e-3
            begin += length
    memory = case.memory
    for scales in (memory.key_scales, memory.value_scales):
        assert int((~scales[LAYER].isnan()).sum()) == sum(lengths) * heads.kv_heads
        assert scales[LAYER - 1].isnan().all() and scales[LAYER + 1].isnan().all()
    assert (memory.pages[case.free] == 0xFF).all()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_grouped_heads(group: int, dtype: torch.dtype) -> None:
    """Tiles of query rows hold any part of a group, and of several tokens' groups."""
    torch.manual_seed(group)
    rng = python_random.Random(group)
    case = Case.drawn(rng, Heads(2, group, 32), [101, 7], 16, dtype)
    program, _, out = case.program()
    for step in ([(0, 0, 100)], [(0, 100, 1), (1, 0, 7)]):
        run(program, batch := case.batch(step))
        case.check(result(program, out, len(batch.token_ids)), step, tolerance_of(dtype))
    case.check_arena(108)


LONG = [3000, 1600, 6]


@pytest.mark.parametrize(("dim", "group", "block_size"), [(32, 4, 16), (80, 1, 64)])
def test_long_contexts_are_split_and_merged(dim: int, group: int, block_size: int, dtype: torch.dtype) -> None:
    """Pieces of a context are weighed up, whatever the number of threads that it is split for."""
    torch.manual_seed(dim)
    case = Case.drawn(python_random.Random(dim), Heads(2, group, dim), LONG, block_size, dtype)
    program, _, out = case.program()
    first, last = [(0, 0, 2999), (1, 0, 1550)], [(0, 2999, 1), (1, 1550, 50), (2, 0, 6)]
    alone = [(0, 2999, 1)]
    with threads(2):
        run(program, batch := case.batch(first))
    case.check(result(program, out, len(batch.token_ids)), first, tolerance_of(dtype), most=60)
    for step, count in itertools.product((last, alone), (1, 2, 5)):
        with threads(count):
            run(program, batch := case.batch(step))
        case.check(result(program, out, len(batch.token_ids)), step, tolerance_of(dtype))
    case.check_arena(sum(LONG))


@pytest.mark.parametrize("size", [1e4, 1e6])
def test_large_scores_do_not_overflow(size: float, dtype: torch.dtype) -> None:
    """Keys are not rotated, so that they are the same numbers here and there."""
    torch.manual_seed(0)
    case = Case.drawn(python_random.Random(0), Heads(2, 3, 64), [700, 90], 16, dtype, scale=size)
    program, _, out = case.program()
    steps = [[(0, 0, 600), (1, 0, 89)], [(0, 600, 100), (1, 89, 1)]]
    for step, count in zip(steps, (1, 5), strict=True):
        with threads(count):
            run(program, batch := case.batch(step))
        found = result(program, out, len(batch.token_ids))
        assert torch.isfinite(found).all()
        # Scores this large are off by more than the least of their distances: most rows are not decided by that.
        begin = 0
        for number, start, length in step:
            expected, magnitude = case.expected(number, torch.arange(start, start + length))
            excess = (found[begin : begin + length] - expected).abs() > 0.02 * magnitude
            assert excess.double().mean() < 1e-5 * size
            begin += length


@pytest.mark.parametrize("norms", ["none", "rounded", "exact", "queries"])
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (80, 40), (256, 32)])
def test_heads_as_they_are_prepared(dim: int, half: int, norms: str, dtype: torch.dtype) -> None:
    """Queries are normalised and rotated where they are, at any position; what lies between them stays."""
    torch.manual_seed(dim)
    norm = HeadNorm(random(dim), 1e-6, norms == "rounded") if norms != "none" else None
    key_norm = None if norms == "queries" else norm
    heads = Heads(2, 2, dim, 8, 10_000.0 ** -(torch.arange(half) / half), 1.1, norm, key_norm)
    case = Case.drawn(python_random.Random(0), heads, [40], 16, dtype)
    program, query, _ = case.program()
    batch = case.batch([(0, 0, 40)])
    batch.positions = torch.randint(0, 100_001, (40,))
    batch.positions[0] = 100_000
    run(program, batch)
    found = result(program, query, 40)
    expected = heads.prepared(heads.queries(case.inputs[0]), norm, batch.positions)
    # A value that is rounded to its other neighbour changes what it is mixed with.
    bound = 2 * unit(dtype) * heads.scaling * expected.abs().amax(-1, keepdim=True) + 1e-5
    within(heads.queries(found), expected, bound)
    between = slice(dim, dim + heads.gap)
    kept = (x.unflatten(1, (-1, dim + heads.gap))[..., between] for x in (found, case.inputs[0]))
    assert torch.equal(*kept)


def test_attention_needs_angles_and_one_kind_of_norm(dtype: torch.dtype) -> None:
    heads = Heads(1, 1, 16, query_norm=HeadNorm(torch.ones(16), 1e-6, True))
    program = new_program(dtype, poisoned_memory((AttentionLayer(1, 16),) * 2, dtype))
    activations = feed(program, *heads.inputs(3, dtype))
    with pytest.raises(RuntimeError, match="rotary comes before attention"):
        program.attention(LAYER, *activations, head_dim=16, scale=1.0)
    for other in (HeadNorm(torch.ones(16), 1e-5, True), HeadNorm(torch.ones(16), 1e-6, False)):
        heads.key_norm = other
        with pytest.raises(ValueError, match="normalised differently"):
            heads.record(program, *activations)
