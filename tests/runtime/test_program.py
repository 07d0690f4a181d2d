"""Models as recorded programs against the same models in torch, and how programs keep their activations."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoints import CONFIGS, HYBRIDS, make_checkpoint
from support.programs import (
    CPU,
    Part,
    buffers,
    feed,
    make_batch,
    memories,
    needs_compiler,
    new_program,
    poisoned_memory,
    result,
    run,
    tokens_only,
)
from tenfold.core import AttentionLayer, CacheSpec, ModelSpec
from tenfold.models.loader import LoadedModel, load_model
from tenfold.models.quantise import Format, dequantise, quantise
from tenfold.runtime import program as program_module
from tenfold.runtime.kernels import QUANTISATIONS, native, packing
from tenfold.runtime.memory import ArenaMemory
from tenfold.runtime.program import FIRST_ROWS, Program
from tenfold.runtime.step import ForwardStep

pytestmark = needs_compiler

BLOCK = 16
PAGES = 120
SLOTS = 4
STEPS = [
    [(0, 5)],
    [(0, 1), (1, 40)],
    [(2, 100), (0, 1), (1, 1)],
    [(1, 1), (0, 30), (2, 1)],
]
"""(sequence, tokens) of every step; each is sampled from."""


@pytest.fixture(scope="module", params=sorted(CONFIGS | HYBRIDS))
def folder(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def load(folder, dtype: str, quantize: str | None = None, choice: str = "native") -> LoadedModel:
    def choose(config: Any, chosen: torch.dtype) -> Any:
        return packing(config, chosen, CPU, BLOCK, choice=choice, quantize=quantize)

    return load_model(folder, dtype=dtype, progress=False, packing=choose)


def arena(loaded: LoadedModel) -> ArenaMemory:
    """Poisoned."""
    model = ModelSpec.from_config(loaded.config.to_dict(), element_bytes=loaded.dtype.itemsize)
    page = BLOCK * model.kv_bytes_per_token
    slot_pages = -(-model.state_bytes // page)
    spec = CacheSpec(BLOCK, PAGES + SLOTS * slot_pages, slot_pages, page)
    memory = ArenaMemory(spec, model, loaded.dtype, CPU)
    memory.data.fill_(0xFF)
    return memory


def batches(vocabulary: int) -> list[Any]:
    """STEPS on random tokens and blocks."""
    rng = random.Random(0)
    tables = [rng.sample(range(number, PAGES, 3), 8) for number in range(3)]
    reached, made = [0, 0, 0], []
    for step in STEPS:
        parts = []
        for number, length in step:
            end = reached[number] + length
            parts.append(Part(reached[number], length, tables[number][: -(-end // BLOCK)], slot=number))
            reached[number] = end
        batch = make_batch(
            parts, BLOCK, torch.tensor([rng.randrange(vocabulary) for _ in range(sum(n for _, n in step))])
        )
        batch.sampled = torch.from_numpy(batch.bounds[1:] - 1)
        made.append(batch)
    return made


def logits_of(loaded: LoadedModel) -> tuple[list[Tensor], Program | None]:
    """The logits of every step, and the program, on poisoned activations, that made them if one did."""
    memory = arena(loaded)
    steps = batches(loaded.vocab_size)
    if not loaded.packed:
        return [loaded.model.forward(ForwardStep(batch, memory)).float() for batch in steps], None
    program = Program(memory, loaded.dtype)
    loaded.model.record(program)
    found = []
    for batch in steps:
        run(program, batch)
        assert program._result is not None
        found.append(result(program, program._result, len(batch.sampled)))
    return found, program


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest one, as a share of the largest logit."""
    assert all(torch.isfinite(x).all() for x in found)
    scale = max(float(x.abs().max()) for x in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / scale


def test_float32_logits(folder) -> None:
    """Of prefills, chunks and decodes, while activations share memory."""
    expected, _ = logits_of(load(folder, "float32", choice="reference"))
    found, program = logits_of(load(folder, "float32"))
    assert difference(found, expected) < 1e-4
    assert program is not None
    assert len(memories(program)) < len(buffers(program)) / 2


def test_bfloat16_logits(folder) -> None:
    """As near to float32 as torch in bfloat16 is, or nearly."""
    exact, _ = logits_of(load(folder, "float32", choice="reference"))
    expected, _ = logits_of(load(folder, "bfloat16", choice="reference"))
    found, _ = logits_of(load(folder, "bfloat16"))
    error = difference(expected, exact)
    assert error < 0.2
    assert difference(found, exact) < 2 * error + 0.01


@pytest.mark.parametrize("quantize", sorted(QUANTISATIONS))
def test_quantised_logits(folder, quantize: str) -> None:
    """Against the same model of the weights that the quantised ones stand for: only rows are rounded besides."""
    format = QUANTISATIONS[quantize]

    def pack(weight: Tensor, bias: Tensor | None, gated: bool) -> native.PackedWeight:
        return native.pack(dequantise(quantise(weight, format)), bias, gated=gated)

    exact, _ = logits_of(load_model(folder, dtype="float32", progress=False, packing=lambda *_: pack))
    found, program = logits_of(load(folder, "float32", quantize=quantize))
    assert program is not None and program._scratch
    assert 0 < difference(found, exact) < 0.2


def test_states_after_steps_are_those_of_torch(folder) -> None:
    """The arena's slots go on from step to step, while the rows of activations grow."""
    found, expected = load(folder, "float32"), load(folder, "float32", choice="reference")
    memory, other = arena(found), arena(expected)
    program = Program(memory, torch.float32)
    found.model.record(program)
    for batch in batches(found.vocab_size):
        program.run(batch)
        expected.model.forward(ForwardStep(batch, other))
    used = len({sequence for step in STEPS for sequence, _ in step})
    places = memory.places(np.arange(used)).tolist()
    for ours, theirs in zip((*memory.states, *memory.tails), (*other.states, *other.tails), strict=True):
        torch.testing.assert_close(ours[places], theirs[places], rtol=1e-3, atol=1e-3)


# Programs


def test_buffers_that_do_not_live_at_once_share_memory() -> None:
    """A chain needs two memories of a width, however long it is; one that is read later is left alone."""
    program = new_program(torch.float32)
    x = torch.randn(5, 40)
    (first,) = feed(program, x)
    weight = torch.ones(40)
    last = first
    for _ in range(10):
        last = program.norm(last, weight, 0.0)
    run(program, tokens_only(5))
    assert len(memories(program)) == 2
    found = program.linear(last, native.pack(torch.eye(40)), add_to=first)
    run(program, tokens_only(5))
    assert len(memories(program)) == 3
    normed = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(program.view(found, 5), x + normed)


def test_other_widths_and_dtypes_do_not_share() -> None:
    program = new_program(torch.bfloat16)
    (x,) = feed(program, torch.randn(4, 32).bfloat16())
    weight = native.pack(torch.randn(32, 32).bfloat16())
    program.logits(program.select_sampled(x), weight)
    run(program, tokens_only(4))
    assert len({(m.shape, m.dtype) for m in memories(program)}) == 2


def test_rows_grow_and_stay() -> None:
    program = new_program(torch.float32)
    table = torch.randn(300, 8)
    (x,) = feed(program, table)
    rooms = []
    for rows in (1, FIRST_ROWS, FIRST_ROWS + 1, 200, 3, 300):
        program.run(tokens_only(rows))
        assert torch.equal(program.view(x, rows), table[:rows])
        rooms.append(len(next(iter(memories(program)))))
    assert rooms == [FIRST_ROWS, FIRST_ROWS, 2 * FIRST_ROWS, 200, 200, 400]


def test_columns() -> None:
    program = new_program(torch.float32)
    table = torch.randn(3, 12)
    (x,) = feed(program, table)
    a, b = x.after(2).split([4, 6])
    program.run(tokens_only(3))
    assert torch.equal(program.view(a, 3), table[:, 2:6]) and torch.equal(program.view(b, 3), table[:, 6:])
    assert torch.equal(program.view(b.after(5), 3), table[:, 11:])


@pytest.mark.parametrize("format", [None, *QUANTISATIONS.values()])
def test_a_step_that_samples_nothing(format: Format | None) -> None:
    """As prefill chunks are; the next one finds all as it was."""
    program = new_program(torch.float32)
    (x,) = feed(program, torch.randn(4, 32))
    weight = torch.randn(50, 32)
    packed = native.pack(weight) if format is None else native.pack_quantised(quantise(weight, format))
    chosen = program.norm(program.select_sampled(x), torch.ones(32), 1e-6)
    program.logits(chosen, packed)
    before = program.forward(tokens_only(4)).clone()
    assert program.forward(tokens_only(4, torch.empty(0, dtype=torch.int64))).shape == (0, 50)
    assert torch.equal(program.forward(tokens_only(4)), before)


def test_weights_count_once_and_the_arena_not() -> None:
    memory = poisoned_memory([AttentionLayer(1, 16)], torch.float32)
    program = new_program(torch.float32, memory)
    table = torch.zeros(10, 48)
    packed = native.pack(torch.ones(48, 48), torch.ones(48))
    x = program.embed(table)
    program.rotary(torch.ones(8), 1.0)
    for _ in range(2):
        mixed = program.linear(x, packed)
        program.attention(0, *mixed.split([16, 16, 16]), head_dim=16, scale=1.0)
    assert packed.bias is not None
    assert program.weight_bytes == table.nbytes + packed.nbytes + packed.bias.nbytes + 8 * 4


def test_profile() -> None:
    program = new_program(torch.float32)
    (x,) = feed(program, torch.randn(20, 64))
    program.norm(program.norm(x, torch.ones(64), 1e-6), torch.ones(64), 1e-6)
    program.run(tokens_only(20))
    assert program.profile() == {"Embed": 0.0, "Norm": 0.0}
    program.run(tokens_only(20))
    assert all(seconds > 0 for seconds in program.profile().values())


def test_what_programs_refuse() -> None:
    with pytest.raises(ValueError, match=r"no kernel computes in torch\.float16"):
        Program(new_program(torch.float32).memory, torch.float16)
    program = new_program(torch.float32)
    (x,) = feed(program, torch.randn(4, 8))
    with pytest.raises(ValueError, match="8 columns meet a weight of 6 inputs"):
        program.linear(x, native.pack(torch.randn(4, 6)))
    with pytest.raises(RuntimeError, match="nothing was run yet"):
        program.view(x, 1)
    with pytest.raises(RuntimeError, match="makes no logits"):
        program.forward(tokens_only(2))


@pytest.mark.parametrize("name", ["_LINEAR", "_Step"])
def test_a_library_with_other_structs_is_refused(name: str, monkeypatch) -> None:
    """The sizes of all structs are compared with the library's before anything is run."""
    program = new_program(torch.float32)
    feed(program, torch.randn(4, 8))
    kept = getattr(program_module, name)
    other = type(kept.__name__, (kept,), {"_fields_": [("more", program_module.ctypes.c_int64)]})
    operations = tuple(other if kind is kept else kind for kind in program_module._OPERATIONS)
    monkeypatch.setattr(program_module, "_OPERATIONS", operations)
    monkeypatch.setattr(program_module, name, other)
    with pytest.raises(RuntimeError, match=f"{kept.__name__} has another layout"):
        program.run(tokens_only(2))
