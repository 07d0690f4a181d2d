"""Every compiled kernel against its reference, on views of a poisoned arena, and how the library comes to be."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support import recurrence
from tenfold.core import AttentionLayer, CacheSpec, ModelSpec, RecurrentLayer
from tenfold.errors import ModelError
from tenfold.models.layers import RMSNorm, rotate
from tenfold.runtime import kernels
from tenfold.runtime.kernels import native, reference
from tenfold.runtime.memory import ArenaMemory

try:
    native.compiler()
    MISSING = ""
except native.NativeError as error:
    MISSING = str(error)
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=MISSING)

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Case:
    """Sequences of a step, whose keys and values are all in the arena."""

    query: Tensor
    keys: Tensor
    values: Tensor
    batch: Any
    scale: float


def random_case(rng: random.Random, cache: torch.dtype, query: torch.dtype, longest: int) -> Case:
    """Random shapes and tables; everything else in the arena is NaN."""
    dim = rng.choice([7, 16, 24, 32, 64, 80, 96, 128, 160, 256])
    kv_heads, group, size = rng.randint(1, 4), rng.randint(1, 8), rng.choice([1, 3, 5, 16, 64])
    lengths = [rng.choice([1, 1, rng.randint(2, 5), rng.randint(1, 150)]) for _ in range(rng.randint(1, 6))]
    starts = np.array([rng.choice([0, rng.randint(0, 40), rng.randint(0, longest)]) for _ in lengths], dtype=np.int64)
    contexts, bounds = starts + lengths, np.cumsum([0, *lengths], dtype=np.int64)
    counts = -(-contexts // size)
    pages = int(counts.sum()) + 4
    arena = torch.full((pages, 2, 2, size, kv_heads, dim), float("nan"), dtype=cache)
    keys, values = arena[:, 1, 0], arena[:, 1, 1]
    free = rng.sample(range(pages), pages)
    # Entries behind a sequence's last block are not its own: they may name any page, or none.
    tables = np.full((len(lengths), counts.max() + 2), 2**30, dtype=np.int32)[:, : counts.max() + 1]
    for b, count in enumerate(counts):
        tables[b, :count], free = free[:count], free[count:]
        position = torch.arange(int(contexts[b]))
        page = torch.from_numpy(tables[b, :count].astype(np.int64))[position // size]
        for view in (keys, values):
            view[page, position % size] = torch.randn(len(position), kv_heads, dim).to(cache)
    positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, contexts, strict=True)])
    # Queries lie among other things, as they come out of a projection.
    row = kv_heads * group * dim
    mixed = torch.randn(int(bounds[-1]), row + rng.randint(0, 9)).to(query)
    batch = SimpleNamespace(contexts=contexts, starts=starts, bounds=bounds, tables=tables, positions=positions)
    return Case(mixed[:, :row].view(-1, kv_heads * group, dim), keys, values, batch, rng.choice([1.0, 2.0]) / dim**0.5)


@needs_compiler
@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("query", DTYPES)
@pytest.mark.parametrize("seed", range(16))
def test_attention(seed: int, query: torch.dtype, cache: torch.dtype) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    case = random_case(rng, cache, query, longest=rng.choice([100, 2900]))
    found = attend(case)
    expected = reference.paged_attention(case.query.float(), case.keys, case.values, case.batch, case.scale)
    assert found.dtype == query
    # Sums of at most 3,000 weighted values of magnitude one; in bfloat16 the result is rounded once.
    tolerance = {"rtol": 1e-2, "atol": 1e-4} if query == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.float(), expected, **tolerance)


def attend(case: Case) -> Tensor:
    batch = case.batch
    return native.paged_attention(
        case.query, case.keys, case.values, batch.tables, batch.starts, batch.bounds, case.scale
    )


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads: int) -> None:
    torch.manual_seed(0)
    case = random_case(random.Random(5), torch.float32, torch.float32, longest=2900)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = attend(case)
    finally:
        torch.set_num_threads(before)
    expected = reference.paged_attention(case.query, case.keys, case.values, case.batch, case.scale)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_large_scores_do_not_overflow() -> None:
    torch.manual_seed(0)
    case = random_case(random.Random(3), torch.float32, torch.float32, longest=300)
    case.query *= 1e4
    expected = reference.paged_attention(case.query, case.keys, case.values, case.batch, case.scale)
    torch.testing.assert_close(attend(case), expected, rtol=1e-3, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 700])
def test_store(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    size, kv_heads, dim = 5, 3, 24
    arenas = [torch.zeros(200, 2, 2, size, kv_heads, dim, dtype=dtype) for _ in range(2)]
    places = torch.randperm(200 * size)[:tokens]
    mixed = torch.randn(tokens, 3 * kv_heads * dim).to(dtype)
    key, value = (part.view(tokens, kv_heads, dim) for part in mixed.split(kv_heads * dim, dim=1)[1:])
    native.store(arenas[0][:, 1, 0], arenas[0][:, 1, 1], key, value, places)
    reference.store(arenas[1][:, 1, 0], arenas[1][:, 1, 1], key, value, places)
    assert torch.equal(arenas[0], arenas[1])


SLOTS = 7


def poisoned_memory(layer: RecurrentLayer, dtype: torch.dtype) -> ArenaMemory:
    model = ModelSpec("test", (AttentionLayer(1, 8), layer, layer), element_bytes=dtype.itemsize)
    page = 16 * model.kv_bytes_per_token
    slot_pages = -(-model.state_bytes // page)
    memory = ArenaMemory(CacheSpec(16, SLOTS * slot_pages + 3, slot_pages, page), model, dtype, CPU)
    memory.data.fill_(0xFF)
    return memory


def random_layer(rng: random.Random) -> RecurrentLayer:
    heads = rng.choice([1, 2, 3])
    dims = rng.choice([8, 24, 32, 96, 128, 256]), rng.choice([8, 20, 48, 128, 144, 256])
    return RecurrentLayer(heads, heads * rng.choice([1, 2, 3]), *dims, convolution_width=rng.choice([2, 3, 4, 5]))


def random_lengths(rng: random.Random, longest: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = [rng.choice([1, 1, 2, rng.randint(1, longest)]) for _ in range(rng.randint(1, SLOTS))]
    return np.cumsum([0, *lengths], dtype=np.int64), np.array(rng.sample(range(SLOTS), len(lengths)))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(16))
def test_delta_rule(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layer = random_layer(rng)
    memory = poisoned_memory(layer, dtype)
    states = memory.states[1]
    bounds, places = random_lengths(rng, 40)
    before = torch.randn(len(places), *states.shape[1:])
    states[torch.from_numpy(places)] = before
    tokens, keys, values = int(bounds[-1]), layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim
    mixed = torch.randn(tokens, 2 * keys + values + layer.value_heads) * rng.choice([0.01, 1, 30])
    parts = mixed.to(dtype).split([keys, keys, values, layer.value_heads], dim=1)
    query, key = (part.view(tokens, layer.key_heads, -1) for part in parts[:2])
    value, beta = parts[2].view(tokens, layer.value_heads, -1), parts[3].sigmoid()
    decay = -torch.exp(torch.empty(tokens, layer.value_heads).uniform_(-14, 3.5))
    found = native.delta_rule(query, key, value, decay, beta, states, bounds, places)
    assert found.dtype == dtype
    for i, place in enumerate(places):
        part = slice(*bounds[i : i + 2])
        expected, after = recurrence.delta_rule(query[part], key[part], value[part], decay[part], beta[part], before[i])
        close(states[place], after, 1e-5)
        close(found[part], expected, 1e-5 if dtype == torch.float32 else 5e-3)
    untouched = sorted(set(range(SLOTS)) - set(places.tolist()))
    assert states[untouched].isnan().all() and memory.states[0].isnan().all() and memory.tails[1].isnan().all()


def close(found: Tensor, expected: Tensor, share: float) -> None:
    """Within a share of the largest magnitude: what sums of many terms lose by rounding."""
    assert torch.isfinite(found).all()
    assert float((found.double() - expected).abs().max()) <= share * max(1.0, float(expected.abs().max()))


@needs_compiler
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_convolution(seed: int, dtype: torch.dtype, silu: bool) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layer = random_layer(rng)
    memory = poisoned_memory(layer, dtype)
    tails, width = memory.tails[1], layer.convolution_width
    bounds, places = random_lengths(rng, 50)
    before = torch.randn(len(places), *tails.shape[1:]).to(dtype)
    tails[torch.from_numpy(places)] = before
    channels = layer.convolution_channels
    x = torch.randn(int(bounds[-1]), channels + 5).to(dtype)[:, :channels]
    weight = torch.randn(channels, width).to(dtype)
    found = native.convolve(x, weight, tails, bounds, places, silu=silu)
    assert found.dtype == dtype
    for i, place in enumerate(places):
        part = slice(*bounds[i : i + 2])
        expected, after = recurrence.convolution(x[part], weight, before[i])
        expected = functional.silu(expected) if silu else expected
        torch.testing.assert_close(found[part], expected.to(dtype), rtol=2e-2 if dtype.itemsize == 2 else 1e-5,
                                   atol=1e-5 if dtype.itemsize == 4 else 2e-3)  # fmt: skip
        assert torch.equal(tails[place], after.to(dtype))
    untouched = sorted(set(range(SLOTS)) - set(places.tolist()))
    assert tails[untouched].isnan().all() and memory.tails[0].isnan().all() and memory.states[1].isnan().all()


ELEMENTWISE = [(1, 64), (3, 7), (5, 576), (70, 1536)]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), ELEMENTWISE)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, other = torch.randn(2, rows, width + 3).to(dtype)[..., :width]
    weight = torch.randn(width).to(dtype)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-5), RMSNorm(weight, 1e-5)(x))
    total, normed = native.add_rms_norm(x, other, weight, 1e-5)
    assert torch.equal(total, x + other)
    torch.testing.assert_close(normed, RMSNorm(weight, 1e-5)(x + other))
    zero_centred = (RMSNorm(1 + weight.float(), 1e-6)(x.float())).to(dtype)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-6, 1.0), zero_centred)
    torch.testing.assert_close(native.rms_norm(x, 1 + weight.float(), 1e-6), zero_centred)
    heads = x.contiguous().view(rows, 1, width).expand(rows, 2, width)
    torch.testing.assert_close(native.rms_norm(heads, weight, 1e-5), RMSNorm(weight, 1e-5)(heads))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (24, 10), (256, 64)])
@pytest.mark.parametrize("tokens", [1, 90])
def test_rotation(tokens: int, dim: int, rotary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    x = torch.randn(tokens, 5 * dim + 1).to(dtype)[:, : 4 * dim].view(tokens, 4, dim)
    angle = torch.randn(tokens, 1, rotary // 2).repeat(1, 1, 2)
    angles = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = rotate(x.double(), (angles[0].double(), angles[1].double())).to(dtype)
    torch.testing.assert_close(native.rotate(x, angles), expected)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), ELEMENTWISE)
def test_silu_gate(rows: int, inner: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = 20 * torch.randn(rows, 2 * inner).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(native.silu_gate(x), functional.silu(gate) * up)


@needs_compiler
def test_silu_gate_at_the_ends() -> None:
    gate = torch.tensor([-1e30, -200.0, -89.0, 0.0, 89.0, 1e30, float("nan"), -0.0])
    found = native.silu_gate(torch.cat((gate, torch.ones(8)))[None])[0]
    torch.testing.assert_close(found, functional.silu(gate), equal_nan=True, atol=1e-30, rtol=1e-5)


@needs_compiler
def test_wrong_arguments_are_refused() -> None:
    case = random_case(random.Random(0), torch.float32, torch.float32, longest=10)
    with pytest.raises(ValueError, match=r"no kernel for torch\.float64"):
        native.silu_gate(torch.zeros(2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="query and arena disagree"):
        case.query = case.query[..., :-1]
        attend(case)
    with pytest.raises(ValueError, match="int64"):
        native.store(case.keys, case.values, case.keys[0], case.keys[0], torch.zeros(len(case.keys[0])))


@needs_compiler
def test_one_openmp_runtime() -> None:
    native.library()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line.rpartition("/")[2]}
    assert len(runtimes) == 1, runtimes


@needs_compiler
def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch)
    path = native.build(tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) in ([".lock", ".so"], [".so"])
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native.build(tmp_path) == path
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O2"))
    monkeypatch.setattr(native, "_compile", lambda command, target: target.touch())
    assert native.build(tmp_path) != path, "other flags are another library"


def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without optimisation."""
    monkeypatch.setattr(native, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in native.FLAGS))


@needs_compiler
def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    wrapper = tmp_path / "counting"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nsleep 0.5\nexec {native.compiler()[0]} "$@"\n')
    wrapper.chmod(0o755)
    code = (
        "import sys, ctypes, pathlib, torch; from tenfold.runtime.kernels import native\n"
        "native.FLAGS = tuple('-O0' if flag == '-O3' else flag for flag in native.FLAGS)\n"
        "print(ctypes.CDLL(str(native.build(pathlib.Path(sys.argv[1])))).tenfold_interface())"
    )
    environment = {**os.environ, "CXX": str(wrapper)}
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == [str(native.INTERFACE)] * 2
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("--version" not in call for call in calls) == 1, "one compiled, the other waited"
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) in ([".lock", ".so"], [".so"])


@pytest.fixture
def unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that has not looked for the kernels yet, with a cache of its own."""
    monkeypatch.setattr(native, "user_cache_path", lambda _: tmp_path)
    native.library.cache_clear()
    native.available.cache_clear()
    yield tmp_path
    native.library.cache_clear()
    native.available.cache_clear()


@pytest.mark.parametrize(
    ("cxx", "reason"), [("false", "did not compile"), ("no-such-compiler", "no no-such-compiler.*was found")]
)
def test_without_a_compiler(cxx: str, reason: str, unloaded, monkeypatch, caplog) -> None:
    monkeypatch.setenv("CXX", cxx)
    with caplog.at_level(logging.WARNING):
        chosen = [kernels.select(CPU, torch.float32).name for _ in range(3)]
    assert chosen == ["reference"] * 3
    (warning,) = caplog.records
    assert "install g++" in warning.getMessage() and "CXX" in warning.getMessage()
    with pytest.raises(ModelError, match=reason):
        kernels.select(CPU, torch.float32, "native")
    assert not list(unloaded.rglob("*.so")), "nothing half-made is left behind"


def test_selection(caplog) -> None:
    assert kernels.select(CPU, torch.bfloat16, "reference").name == "reference"
    assert kernels.select(torch.device("meta"), torch.bfloat16).name == "reference"
    with pytest.raises(ModelError, match="must be one of auto, reference, native"):
        kernels.select(CPU, torch.float32, "fastest")
    with pytest.raises(ModelError, match="bfloat16 or float32"):
        kernels.select(CPU, torch.float16, "native")
    assert not caplog.records
    assert kernels.select(CPU, torch.float16).name == "reference"
    assert "no fast CPU kernels for torch.float16" in caplog.text


@needs_compiler
def test_native_is_the_default_on_a_cpu() -> None:
    assert kernels.select(CPU, torch.float32).name == "native"
