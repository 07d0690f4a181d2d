"""The recurrent kernels against token-by-token references in float64, on views of a poisoned arena."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from support import recurrence
from tenfold.core import AttentionLayer, CacheSpec, ModelSpec, RecurrentLayer
from tenfold.runtime.kernels import delta_rule
from tenfold.runtime.kernels.convolution import Windows, convolve
from tenfold.runtime.kernels.delta_rule import Chunks, Inputs, Piece, Split, chunked, gated_delta_rule, step
from tenfold.runtime.memory import ArenaMemory

CPU = torch.device("cpu")
SLOTS = 9


def memory_of(layer: RecurrentLayer, layers: int = 2, dtype: torch.dtype = torch.float32) -> ArenaMemory:
    """An arena full of NaN with SLOTS slots and a few pages below them."""
    model = ModelSpec("test", (AttentionLayer(1, 8), *(layer,) * layers), element_bytes=dtype.itemsize)
    page = 16 * model.kv_bytes_per_token
    slot_pages = -(-model.state_bytes // page)
    memory = ArenaMemory(CacheSpec(16, SLOTS * slot_pages + 3, slot_pages, page), model, dtype, CPU)
    memory.data.fill_(0xFF)
    return memory


def random_layer(rng: random.Random) -> RecurrentLayer:
    key_heads = rng.choice([1, 2])
    return RecurrentLayer(
        key_heads=key_heads,
        value_heads=key_heads * rng.choice([1, 2, 3]),
        key_dim=rng.choice([32, 64, 96, 256]),
        value_dim=rng.choice([32, 48, 128, 256]),
        convolution_width=rng.choice([2, 3, 4, 5]),
    )


def random_inputs(layer: RecurrentLayer, tokens: int, rng: random.Random) -> Inputs:
    """Query, key, value, decay and beta, with decays and betas from one end of their range to the other."""
    decay = -torch.exp(
        torch.empty(tokens, layer.value_heads).uniform_(*rng.choice([(-14, -13), (3.2, 3.5), (-14, 3.5)]))
    )
    beta = torch.empty(tokens, layer.value_heads).uniform_(*rng.choice([(0, 1e-3), (0.999, 1), (0, 1)]))
    return Inputs(
        torch.randn(tokens, layer.key_heads, layer.key_dim) * rng.choice([0.01, 1, 30]),
        torch.randn(tokens, layer.key_heads, layer.key_dim) * rng.choice([0.01, 1, 30]),
        torch.randn(tokens, layer.value_heads, layer.value_dim),
        decay,
        beta,
    )


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within float32 rounding of the largest magnitude: sums of many terms lose no more than that."""
    assert torch.isfinite(found).all()
    assert float((found.double() - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("seed", range(40))
def test_steps_of_mixed_lengths(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layer = random_layer(rng)
    memory = memory_of(layer)
    states = memory.states[1]
    longest = rng.choice([1, 3, 70, 200])
    lengths = [rng.choice([1, rng.randint(1, longest)]) for _ in range(rng.randint(1, 6))]
    bounds = np.cumsum([0, *lengths])
    places = np.array(rng.sample(range(SLOTS), len(lengths)))
    before = torch.randn(len(lengths), *states.shape[1:])
    states[torch.from_numpy(places)] = before
    inputs = random_inputs(layer, int(bounds[-1]), rng)
    output = gated_delta_rule(inputs, states, Split.of(bounds, places, states))
    for i, place in enumerate(places):
        begin, end = bounds[i : i + 2]
        expected, after = recurrence.delta_rule(*(x[begin:end] for x in inputs), before[i])
        close(output[begin:end], expected)
        close(states[place], after)
    untouched = sorted(set(range(SLOTS)) - set(places.tolist()))
    assert states[untouched].isnan().all() and memory.states[0].isnan().all() and memory.tails[0].isnan().all()


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_many_steps_are_one_chunked_call(group: int, scattered: bool, monkeypatch) -> None:
    torch.manual_seed(group)
    layer = RecurrentLayer(2, 2 * group, 32, 64, 4)
    memory = memory_of(layer)
    lengths = np.array([150, 150, 150])
    inputs = random_inputs(layer, int(lengths.sum()), random.Random(group))
    chunk_places, step_places = (np.array([0, 4, 7]), np.array([1, 3, 8] if scattered else [1, 2, 3]))
    memory.states[0][:] = torch.randn(memory.states[0].shape[1:])
    by_chunks = chunked(inputs, memory.states[0], Chunks.of(lengths, chunk_places, CPU))
    monkeypatch.setattr(delta_rule, "PIECE_BYTES", 2 * memory.states[0][0].nbytes)
    pieces = Piece.cut(step_places, memory.states[0])
    assert [type(piece.places) for piece in pieces] == ([torch.Tensor, slice] if scattered else [slice, slice])
    by_steps = torch.stack(
        [step(inputs.at(torch.tensor([t, 150 + t, 300 + t])), memory.states[0], pieces) for t in range(150)], dim=1
    )
    torch.testing.assert_close(by_steps.flatten(0, 1), by_chunks, rtol=1e-4, atol=1e-5)
    for chunk_place, step_place in zip(chunk_places, step_places, strict=True):
        torch.testing.assert_close(memory.states[0][step_place], memory.states[0][chunk_place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_chunks_equal_transformers(length: int) -> None:
    torch.manual_seed(length)
    layer = RecurrentLayer(2, 6, 32, 48, 4)
    states = memory_of(layer).states[0]
    inputs = random_inputs(layer, length, random.Random(length))
    inputs = inputs._replace(decay=-torch.rand_like(inputs.decay))
    states[5] = before = torch.randn(states.shape[1:])
    output = chunked(inputs, states, Chunks.of(np.array([length]), np.array([5]), CPU))
    query, key, value, decay, beta = (x[None] for x in inputs)
    expected, after = torch_chunk_gated_delta_rule(
        query, key, value, decay, beta, 64, before[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(output, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[5], after[0], rtol=1e-4, atol=1e-5)


def test_weak_decay_after_a_strong_one_is_exact() -> None:
    """Differences of sums that start at the chunk's beginning would round the small decays away."""
    torch.manual_seed(0)
    layer = RecurrentLayer(1, 1, 32, 32, 4)
    inputs = random_inputs(layer, 64, random.Random(0))
    inputs.decay[:] = -1e-3
    inputs.decay[:20] = -3000.0
    states = memory_of(layer).states[0]
    states[0] = 0
    output = chunked(inputs, states, Chunks.of(np.array([64]), np.array([0]), CPU))
    expected, after = recurrence.delta_rule(*inputs, torch.zeros(1, 32, 32))
    close(output, expected)
    close(states[0], after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_convolution(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layer = random_layer(rng)
    memory = memory_of(layer, dtype=dtype)
    tails, width = memory.tails[1], layer.convolution_width
    lengths = [rng.choice([1, 1, 2, rng.randint(1, 200)]) for _ in range(rng.randint(1, 6))]
    bounds = np.cumsum([0, *lengths])
    places = np.array(rng.sample(range(SLOTS), len(lengths)))
    before = torch.randn(len(lengths), *tails.shape[1:]).to(dtype)
    tails[torch.from_numpy(places)] = before
    x = torch.randn(int(bounds[-1]), layer.convolution_channels).to(dtype)
    weight = torch.randn(layer.convolution_channels, width).to(dtype)
    output = convolve(x, weight, tails, Windows.of(bounds, places, width, CPU))
    assert output.dtype == dtype
    for i, place in enumerate(places):
        begin, end = bounds[i : i + 2]
        expected, after = recurrence.convolution(x[begin:end], weight, before[i])
        torch.testing.assert_close(output[begin:end], expected.to(dtype), rtol=1.6e-2 if dtype.itemsize == 2 else 1e-5,
                                   atol=1e-5)  # fmt: skip
        assert torch.equal(tails[place], after.to(dtype))
    untouched = sorted(set(range(SLOTS)) - set(places.tolist()))
    assert tails[untouched].isnan().all() and memory.tails[0].isnan().all() and memory.states[0].isnan().all()


def test_narrow_inputs_keep_wide_states() -> None:
    torch.manual_seed(0)
    layer = RecurrentLayer(1, 2, 32, 32, 4)
    states = memory_of(layer, dtype=torch.bfloat16).states[0]
    assert states.dtype == torch.float32
    states[:3] = 0
    inputs = random_inputs(layer, 71, random.Random(1))
    inputs = Inputs(*(x.bfloat16() for x in inputs))._replace(decay=inputs.decay)
    output = gated_delta_rule(inputs, states, Split.of(np.array([0, 70, 71]), np.array([2, 0]), states))
    assert output.dtype == torch.bfloat16
    for begin, end, place in ((0, 70, 2), (70, 71, 0)):
        expected, after = recurrence.delta_rule(*(x[begin:end] for x in inputs), torch.zeros(states.shape[1:]))
        torch.testing.assert_close(output[begin:end].double(), expected, rtol=1e-2, atol=1e-3)
        close(states[place], after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_lie_where_the_core_counts_them(dtype: torch.dtype) -> None:
    layer = RecurrentLayer(2, 4, 32, 48, 4)
    memory = memory_of(layer, layers=3, dtype=dtype)
    spec = memory.spec
    for slot in range(spec.num_slots):
        memory.data.fill_(0xFF)
        place = int(memory.places(np.array([slot]))[0])
        for i, view in enumerate([*memory.states, *memory.tails]):
            view[place] = i
        first = spec.slot_page(slot)
        inside = torch.zeros(spec.num_pages, dtype=torch.bool)
        inside[first : first + spec.slot_pages] = True
        assert (memory.pages[~inside] == 0xFF).all(), "nothing is written outside the slot's pages"
        found = [view[place].float().unique().tolist() for view in [*memory.states, *memory.tails]]
        assert found == [[i] for i in range(6)], "views do not overlap"
        memory.clear([slot])
        assert (memory.pages[inside] == 0).all() and (memory.pages[~inside] == 0xFF).all()
