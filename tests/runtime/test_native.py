"""Every operation of the compiled programs against float64, in poisoned memory, in all forms that the source takes."""

from __future__ import annotations

import itertools
import math
import random as python_random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support import recurrence
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
    tokens_only,
    unit,
    within,
)
from tenfold.core import RecurrentLayer
from tenfold.models.quantise import GROUP, Format, Quantised, dequantise, quantise
from tenfold.runtime.kernels import ACTIVATIONS, native
from tenfold.runtime.memory import ArenaMemory
from tenfold.runtime.program import Activation, Program

pytestmark = [needs_compiler, pytest.mark.usefixtures("form")]

QUANTISED = (Format.INT8, Format.INT8_GROUPS, Format.INT4_GROUPS)


# Rows: embedding, selection, norms and gates


WIDTHS = [1, 7, 16, 33, 576, 1500]


@pytest.mark.parametrize("width", WIDTHS)
def test_embed_and_select(width: int, dtype: torch.dtype) -> None:
    """Rows come as they are, any of them, in any order, and again."""
    table = random(50, width, dtype=dtype)
    ids = torch.randint(0, 50, (70,))
    sampled = torch.tensor([69, 3, 3, 0])
    program = new_program(dtype)
    (x,) = feed(program, table)
    batch = make_batch([Part(0, 70)], token_ids=ids, sampled=sampled)
    run(program, batch)
    assert torch.equal(result(program, x, 70), table[ids])
    chosen = program.select_sampled(x)
    run(program, batch)
    assert torch.equal(result(program, chosen, 4), table[ids[sampled]])


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(width: int, rounded: bool, dtype: torch.dtype) -> None:
    """Of all rows, and of those that are sampled; the weight meets a value that was rounded before, or not."""
    torch.manual_seed(width)
    x, other = random(37, width, dtype=dtype, scale=3), random(37, 3, dtype=dtype)
    weight, epsilon = random(width), 1e-5
    expected = normalised(x, epsilon) * weight
    bound = (2 * unit(dtype) + 2e-6) * expected.abs()
    program = new_program(dtype)
    _, given = feed(program, other, x)
    out = program.norm(given, weight, epsilon, rounded=rounded)
    run(program, tokens_only(37))
    within(result(program, out, 37), expected, bound)
    out = program.norm(program.select_sampled(given), weight, epsilon, rounded=rounded)
    sampled = torch.tensor([36, 0, 5])
    run(program, tokens_only(37, sampled))
    within(result(program, out, 3), expected[sampled], bound[sampled])


def test_where_a_norm_rounds() -> None:
    """``rounded`` is seen: the weight's product is one of bfloat16 numbers."""
    torch.manual_seed(0)
    x, weight = random(20, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16).float()
    program = new_program(torch.bfloat16)
    (given,) = feed(program, x)
    found = []
    for rounded in (True, False):
        out = program.norm(given, weight, 1e-6, rounded=rounded)
        run(program, tokens_only(20))
        found.append(result(program, out, 20))
    exact = normalised(x, 1e-6)
    assert (found[0] == (exact.bfloat16().double() * weight).bfloat16()).double().mean() > 0.99
    assert (found[1] == (exact * weight).bfloat16()).double().mean() > 0.99
    assert not torch.equal(*found)


def test_gated_norm(rng: python_random.Random, dtype: torch.dtype) -> None:
    heads, dim, rows = rng.randint(1, 5), rng.choice([8, 20, 32, 128]), rng.randint(1, 40)
    x, other, gate = random(rows, heads * dim, dtype=dtype), random(rows, 5, dtype=dtype), random(rows, heads * dim)
    gate = (gate * rng.choice([1, 30])).to(dtype)
    weight = random(dim)
    program = new_program(dtype)
    given, _, gates = feed(program, x, other, gate)
    out = program.gated_norm(given, gates, weight, 1e-6)
    run(program, tokens_only(rows))
    expected = normalised(x.view(rows, heads, dim), 1e-6) * weight
    expected = expected.flatten(1) * functional.silu(gate.double())
    within(result(program, out, rows), expected, (2 * unit(dtype) + 4e-6) * expected.abs() + 1e-30)


EXTREMES = [-1e30, -200.0, -89.0, -88.5, -0.0, 0.0, 1e-30, 1.0, 88.5, 89.0, 1e30]


def test_sigmoid_gate(rng: python_random.Random, dtype: torch.dtype) -> None:
    """Gates lie with gaps between their heads."""
    heads, dim, rows = rng.randint(1, 5), rng.choice([8, 20, 32, 128]), rng.randint(1, 40)
    x, other = random(rows, heads * dim, dtype=dtype), random(rows, 5, dtype=dtype)
    gate = random(rows, heads, dim + 3, dtype=dtype, scale=rng.choice([1, 30]))
    gate[0, 0, : min(dim, len(EXTREMES))] = torch.tensor(EXTREMES[:dim]).to(dtype)
    program = new_program(dtype)
    given, _, gates = feed(program, x, other, gate.flatten(1))
    out = program.sigmoid_gate(given, gates, dim, dim + 3)
    run(program, tokens_only(rows))
    expected = x * gate[..., :dim].flatten(1).double().sigmoid()
    within(result(program, out, rows), expected, (2 * unit(dtype) + 4e-6) * expected.abs() + 1e-30)


def test_gates_at_the_ends(dtype: torch.dtype) -> None:
    """Nothing overflows, and NaN stays NaN and stays where it is."""
    gate = torch.tensor([[*EXTREMES, torch.nan, 3.0, -3.0, 20.0, torch.nan]]).to(dtype)
    operations: list[tuple[Callable[[Program, Activation, Activation], Activation], Callable[[Tensor], Tensor]]] = [
        (lambda program, x, g: program.sigmoid_gate(x, g, 16, 16), torch.sigmoid),
        (lambda program, x, g: program.gated_norm(x, g, torch.ones(16), 0.0), functional.silu),
    ]
    for record, formula in operations:
        program = new_program(dtype)
        x, gates = feed(program, torch.ones_like(gate), gate)
        out = record(program, x, gates)
        run(program, tokens_only(1))
        found, expected = result(program, out, 1), formula(gate.double()).to(dtype)
        torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-30, rtol=2 * unit(dtype) + 1e-5)


# Products


def accumulated(x: Tensor, weight: Tensor) -> Tensor:
    """What float32 sums of products may be off by."""
    return (x.shape[1] + 3) * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)


ROWS = [*range(1, 26), 95, 96, 97, 107, 192, 200]
"""Every height of a tile, alone and after full ones, and chunks that end anywhere."""


def test_linear(rng: python_random.Random, dtype: torch.dtype, form: str) -> None:
    """With and without bias, into a new activation and added to one, for any number of rows and outputs."""
    outputs = rng.choice([1, 15, 17, 33, 64, 100])
    inputs = rng.choice([2, 6, 62, 128] if dtype == torch.bfloat16 else [1, 3, 62, 129])
    rows = ROWS[-1]
    x, residual, other = (random(rows, n, dtype=dtype) for n in (inputs, outputs, 3))
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype)
    given_bias = rng.choice([None, bias])
    program = new_program(dtype)
    _, given, target = feed(program, other, x, residual)
    packed = native.pack(weight, given_bias)
    assert packed.nbytes == packed.data.nbytes >= weight.nbytes
    added = program.linear(given, packed, add_to=target)
    product = x.double() @ weight.double().T + (0 if given_bias is None else bias.double())
    error = accumulated(x, weight) + 2.0**-22 * product.abs()
    rounded = error + unit(dtype) * (product.abs() + error)
    total = product + residual.double()
    for count in ROWS if form == "native" else ROWS[::5]:
        run(program, tokens_only(count))
        within(result(program, added, count), total[:count], (rounded + unit(dtype) * (total.abs() + rounded))[:count])
    program = new_program(dtype)
    _, given = feed(program, other, x)
    fresh = program.linear(given, packed)
    for count in ROWS[::4]:
        run(program, tokens_only(count))
        within(result(program, fresh, count), product[:count], rounded[:count])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_linear(activation: str, rng: python_random.Random, dtype: torch.dtype) -> None:
    formula = {"silu": functional.silu, "relu": functional.relu,
               "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh")}[activation]  # fmt: skip
    outputs, inputs, rows = rng.choice([1, 16, 17, 50]), rng.choice([2, 62, 128]), rng.choice([1, 13, 100])
    x, weight = random(rows, inputs, dtype=dtype), random(2 * outputs, inputs, dtype=dtype)
    bias = random(2 * outputs, dtype=dtype) if rng.random() < 0.5 else None
    program = new_program(dtype)
    (given,) = feed(program, x)
    out = program.linear(given, native.pack(weight, bias, gated=True), activation=activation)
    run(program, tokens_only(rows))
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    error = accumulated(x, weight) + 2.0**-22 * product.abs() + unit(dtype) * product.abs()
    (gate, up), (gate_error, up_error) = product.chunk(2, dim=1), error.chunk(2, dim=1)
    opened = formula(gate)
    # No activation is steeper than 1.13; their float32 forms lose a few units of their argument's magnitude.
    opened_error = 1.13 * gate_error + unit(dtype) * opened.abs() + 1e-6 * gate.abs()
    expected = opened * up
    bound = opened_error * (up.abs() + up_error) + up_error * opened.abs()
    within(result(program, out, rows), expected, 1.01 * bound + unit(dtype) * expected.abs())


@pytest.mark.parametrize("format", [None, *QUANTISED])
def test_logits_are_float32(format: Format | None, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight = random(9, 64, dtype=dtype), random(70, 64, dtype=dtype)
    program = new_program(dtype)
    (given,) = feed(program, x)
    packed = native.pack(weight) if format is None else native.pack_quantised(quantise(weight, format))
    out = program.logits(program.select_sampled(given), packed)
    batch = tokens_only(9, torch.tensor([8, 0, 4]))
    run(program, batch)
    found = result(program, out, 3)
    assert found.dtype == torch.float32 and found.shape == (3, 70)
    exact = x[batch.sampled].double() @ weight.double().T
    within(found, exact, 1e-5 if format is None else {Format.INT4_GROUPS: 3.0}.get(format, 0.5))
    assert torch.equal(program.forward(batch), found)


def steps(x: Tensor) -> Tensor:
    """The distance of neighbouring values that quantised rows may have, for each of their numbers."""
    groups = functional.pad(x.double().abs(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    return (groups.amax(-1, keepdim=True) / 127).expand_as(groups).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("format", QUANTISED)
def test_quantised_linear(format: Format, gated: bool, rng: python_random.Random, dtype: torch.dtype) -> None:
    """Each input is rounded by half a step at most; all else is float32."""
    outputs, inputs, rows = rng.choice([1, 17, 50, 64]), GROUP * rng.choice([1, 3, 8]), rng.choice([1, 5, 13, 100])
    x = random(rows, inputs, dtype=dtype) * torch.randint(0, 3, (rows, inputs // GROUP)).repeat_interleave(GROUP, 1)
    if format is Format.INT8 and rng.random() < 0.5:
        inputs -= 12  # the last group of a row is shorter
    x = x.to(dtype)[:, :inputs]
    weight = quantise(random(outputs * (2 if gated else 1), inputs), format)
    bias = random(len(weight.values), dtype=dtype) if rng.random() < 0.5 else None
    packed = native.pack_quantised(weight, bias, gated=gated)
    assert packed.nbytes < 1.4 * 64 * 2 * inputs + packed.data.nbytes
    exact = dequantise(weight).double()
    product = x.double() @ exact.T + (0 if bias is None else bias.double())
    # Sums are taken of bytes before what they stand for is subtracted: they may be larger than the result.
    groups = weight.scales.shape[1]
    largest = weight.scales[..., None] * weight.values.view(len(exact), groups, -1)
    offset = 128 * weight.scales if weight.least is None else weight.least.abs()
    summed = (largest + offset[..., None]).double().view(exact.shape)
    error = 0.501 * steps(x) @ exact.abs().T + (inputs // GROUP + 5) * 2.0**-23 * (x.double().abs() @ summed.T)
    program = new_program(dtype)
    (given,) = feed(program, x)
    out = program.linear(given, packed, activation="relu")
    run(program, tokens_only(rows))
    found = result(program, out, rows)
    error = error + (unit(dtype) + 2.0**-22) * (product.abs() + error)
    if not gated:
        within(found, product, error)
        return
    (gate, up), (gate_error, up_error) = product.chunk(2, dim=1), error.chunk(2, dim=1)
    expected = gate.relu() * up
    bound = (gate_error * (1 + unit(dtype)) + unit(dtype) * gate.relu()) * (
        up.abs() + up_error
    ) + up_error * gate.relu()
    within(found, expected, 1.02 * bound + unit(dtype) * expected.abs())


@pytest.mark.parametrize("format", QUANTISED)
def test_quantised_products_of_small_integers_are_exact(format: Format, dtype: torch.dtype) -> None:
    """Rows whose largest magnitude is 127 have a step of one; bytes of all values, 0 and 255 too."""
    torch.manual_seed(1)
    outputs, inputs, rows = 45, 4 * GROUP, 13
    groups = 1 if format is Format.INT8 else inputs // GROUP
    x = torch.randint(-127, 128, (rows, inputs)).float()
    x[:, ::GROUP] = 127 * torch.randint(0, 2, (rows, inputs // GROUP)).mul(2).sub(1).float()
    values = torch.randint(0, 16 if format is Format.INT4_GROUPS else 256, (outputs, inputs), dtype=torch.uint8)
    values[0], values[1] = 0, values.max()
    least = torch.randint(-5, 6, (outputs, groups)).float() if format is Format.INT4_GROUPS else None
    weight = Quantised(format, values, torch.randint(1, 3, (outputs, groups)).float(), least)
    program = new_program(dtype)
    (given,) = feed(program, x.to(dtype))
    out = program.logits(program.select_sampled(given), native.pack_quantised(weight))
    run(program, tokens_only(rows))
    assert torch.equal(result(program, out, rows - 1).double(), x[1:].double() @ dequantise(weight).double().T)


def test_quantised_rows_of_zeros(dtype: torch.dtype) -> None:
    program = new_program(dtype)
    (given,) = feed(program, torch.zeros(3, 64, dtype=dtype))
    out = program.linear(given, native.pack_quantised(quantise(random(20, 64), Format.INT8), torch.ones(20)))
    run(program, tokens_only(3))
    assert torch.equal(result(program, out, 3), torch.ones(3, 20, dtype=dtype))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("format", [None, *QUANTISED])
def test_products_on_any_number_of_threads(format: Format | None, count: int, dtype: torch.dtype) -> None:
    """Each number comes about the same way whoever computes it: bit for bit."""
    torch.manual_seed(2)
    x, weight = random(130, 96, dtype=dtype), random(300, 96, dtype=dtype)
    packed = native.pack(weight) if format is None else native.pack_quantised(quantise(weight, format))
    with threads(count):
        again = native.pack(weight) if format is None else native.pack_quantised(quantise(weight, format))
    assert torch.equal(packed.data, again.data)
    program = new_program(dtype)
    (given,) = feed(program, x)
    out = program.linear(program.norm(given, torch.ones(96), 1e-6), packed)
    for rows in (1, 130):
        found = []
        for number in (1, count):
            with threads(number):
                run(program, tokens_only(rows))
            found.append(result(program, out, rows))
        assert torch.equal(*found)


# Recurrence


SLOTS = 6


def random_layer(rng: python_random.Random) -> RecurrentLayer:
    heads = rng.choice([1, 2, 3])
    dims = rng.choice([8, 20, 28, 32, 128, 256]), rng.choice([4, 20, 36, 48, 128, 140])
    return RecurrentLayer(heads, heads * rng.choice([1, 2, 3]), *dims, convolution_width=rng.choice([2, 3, 4, 5]))


def random_steps(rng: python_random.Random, longest: int) -> list[list[Part]]:
    """Some steps of a few sequences that begin or go on in their slots; at least one slot is never used."""
    slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS - 1))
    return [
        [
            Part(rng.choice([0, 7, 7]), rng.choice([1, 1, 2, rng.randint(1, longest)]), slot=slot)
            for slot in slots
            if rng.random() < 0.8
        ]
        or [Part(7, 3, slot=slots[0])]
        for _ in range(3)
    ]


def begin(parts: list[Part], memory: ArenaMemory, held: Tensor, kept: dict[int, Tensor]) -> None:
    """Poison what is ``held`` in the slots of sequences that begin, for which zeros are to be expected."""
    for part in parts:
        if part.start == 0:
            place = place_of(memory, part)
            held[place] = math.nan
            kept[place] = torch.zeros_like(kept[place])


def place_of(memory: ArenaMemory, part: Part) -> int:
    """Where views of states and tails have a sequence's slot."""
    return int(memory.places(np.array([part.slot]))[0])


def tokens_of(parts: list[Part], first: int) -> list[tuple[Part, slice, slice]]:
    """Each part with its rows of the step and those of the whole input, of which the step begins at ``first``."""
    ends = list(itertools.accumulate((part.length for part in parts), initial=0))
    return [
        (part, slice(a, b), slice(first + a, first + b))
        for part, (a, b) in zip(parts, itertools.pairwise(ends), strict=True)
    ]


def steady(x: Tensor) -> Tensor:
    """Numbers whose sigmoid is not so near to a tie that float32 and float64 may round it differently."""
    sharp = x.double().sigmoid()
    return torch.where((sharp * (1 - 1e-5)).to(x.dtype) == (sharp * (1 + 1e-5)).to(x.dtype), x, 0)


def random_recurrence(
    rng: python_random.Random, layer: RecurrentLayer, tokens: int, dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys, values, sharpnesses and step sizes side by side: from vanishing decay to none at all."""
    keys, values, heads = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim, layer.value_heads
    scale = rng.choice([0.01, 1, 30])
    inputs = [random(tokens, width, dtype=dtype, scale=scale) for width in (keys, keys, values)]
    step_size = torch.empty(tokens, heads).uniform_(-14, 25).to(dtype)
    return [*inputs, steady(random(tokens, heads, dtype=dtype, scale=4)), step_size]


def test_delta_rule(rng: python_random.Random, dtype: torch.dtype) -> None:
    layer = random_layer(rng)
    memory = poisoned_memory((layer, layer), dtype, slots=SLOTS)
    states, plan = memory.states[1], random_steps(rng, 30)
    used = sorted({place_of(memory, part) for parts in plan for part in parts})
    states[used] = random(len(used), *states.shape[1:])
    kept = {place: states[place].clone() for place in used}
    inputs = random_recurrence(rng, layer, sum(part.length for parts in plan for part in parts), dtype)
    rate, step_bias = torch.empty(layer.value_heads).uniform_(0, 2), random(layer.value_heads)
    program = new_program(dtype, memory)
    out = program.delta_rule(1, *feed(program, *inputs), rate, step_bias)
    query, key, value, beta, step_size = (x.unflatten(1, (n, -1)) for x, n in zip(
        inputs, (layer.key_heads, layer.key_heads, *[layer.value_heads] * 3), strict=True))  # fmt: skip
    decay = -rate.double() * functional.softplus(step_size.squeeze(2).double() + step_bias)
    sharp = beta.squeeze(2).double().sigmoid().to(dtype)
    first = 0
    for parts in plan:
        begin(parts, memory, states, kept)
        batch = make_batch(parts)
        batch.token_ids += first
        run(program, batch)
        found = result(program, out, len(batch.token_ids))
        for part, own, whole in tokens_of(parts, first):
            place = place_of(memory, part)
            expected, kept[place] = recurrence.delta_rule(
                query[whole], key[whole], value[whole], decay[whole], sharp[whole], kept[place]
            )
            near(states[place], kept[place], 1e-5)
            near(found[own], expected.flatten(1), 1e-5 if dtype == torch.float32 else 5e-3)
        first += len(batch.token_ids)
    untouched = sorted(set(range(len(states))) - set(used))
    assert states[untouched].isnan().all() and memory.states[0].isnan().all() and memory.tails[1].isnan().all()


def near(found: Tensor, expected: Tensor, share: float) -> None:
    """Within a share of the largest magnitude: what sums of many terms lose by rounding."""
    within(found, expected, share * max(1.0, float(expected.abs().max())))


def test_convolution(rng: python_random.Random, dtype: torch.dtype) -> None:
    layer = random_layer(rng)
    memory = poisoned_memory((layer, layer), dtype, slots=SLOTS)
    tails, plan = memory.tails[1], random_steps(rng, 50)
    used = sorted({place_of(memory, part) for parts in plan for part in parts})
    tails[used] = random(len(used), *tails.shape[1:], dtype=dtype)
    kept = {place: tails[place].clone() for place in used}
    channels, width = layer.convolution_channels, layer.convolution_width
    tokens = sum(part.length for parts in plan for part in parts)
    x, weight = random(tokens, channels, dtype=dtype), random(channels, width, dtype=dtype)
    program = new_program(dtype, memory)
    _, given = feed(program, random(tokens, 5, dtype=dtype), x)
    out = program.convolve(1, given, weight)
    first = 0
    for parts in plan:
        begin(parts, memory, tails, kept)
        batch = make_batch(parts)
        batch.token_ids += first
        run(program, batch)
        found = result(program, out, len(batch.token_ids))
        for part, own, whole in tokens_of(parts, first):
            place = place_of(memory, part)
            total, after = recurrence.convolution(x[whole], weight, kept[place])
            magnitude, _ = recurrence.convolution(x[whole].abs(), weight.abs(), kept[place].abs())
            kept[place] = after.to(dtype)
            assert torch.equal(tails[place], kept[place])
            bound = 1.1 * (unit(dtype) * total.abs() + 1e-6 * magnitude)
            expected = functional.silu(total)
            within(found[own], expected, bound + (unit(dtype) + 4e-6) * expected.abs())
        first += len(batch.token_ids)
    untouched = sorted(set(range(len(tails))) - set(used))
    assert tails[untouched].isnan().all() and memory.tails[0].isnan().all() and memory.states[1].isnan().all()


# The largest of a row


@pytest.mark.parametrize("columns", [1, 7, 16, 17, 300, 4096, 4097, 100_000])
@pytest.mark.parametrize("rows", [1, 5])
def test_argmax(rows: int, columns: int) -> None:
    """Of rows that lie apart, with ties, of which the first counts."""
    torch.manual_seed(columns)
    x = torch.randn(rows, columns + 3)[:, :columns]
    for count in (1, 2, 5):
        with threads(count):
            assert torch.equal(native.argmax(x), x.argmax(1))
    places = torch.randint(0, columns, (rows, 3))
    x.scatter_(1, places, 99.0)
    assert torch.equal(native.argmax(x), places.amin(1))


def test_argmax_of_what_is_not_a_number() -> None:
    """NaN never is the largest; where there is nothing else, the answer is a column all the same."""
    x = torch.randn(4, 9000)
    x[:, ::7] = torch.nan
    x[:, 0] = torch.nan
    assert torch.equal(native.argmax(x), x.nan_to_num(nan=-torch.inf).argmax(1))
    x[0], x[1] = torch.nan, -torch.inf
    x[2, :8999], x[3] = -torch.inf, torch.inf
    found = native.argmax(x)
    assert found.tolist() == [0, 0, 8999, 0]


def test_what_kernels_refuse(form: str) -> None:
    for weight in (torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="no kernel multiplies"):
            native.pack(weight)
    with pytest.raises(ValueError, match="even number of rows"):
        native.pack(torch.zeros(5, 4), gated=True)
    for format, inputs in ((Format.INT8, 6), (Format.INT8_GROUPS, 36), (Format.INT4_GROUPS, 36)):
        values = torch.zeros(4, inputs, dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"{format.name} weights cannot have {inputs} inputs"):
            native.pack_quantised(Quantised(format, values, torch.ones(4, 1)))
    for x in (torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(3, 8)[:, ::2]):
        with pytest.raises(ValueError, match="x must be float32"):
            native.argmax(x)


def test_what_benchmarks_measure_by() -> None:
    assert native.read(torch.arange(1000)) == 499_500
    with pytest.raises(ValueError, match="int64"):
        native.read(torch.zeros(4))
    assert all(native.multiply(format, 100) > 100 for format in Format)
