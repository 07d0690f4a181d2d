"""Recorded programs on inputs of a test's choosing: everything that they may read too much of is poisoned by NaN."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tenfold.core import AttentionLayer, CacheSpec, ModelSpec, RecurrentLayer
from tenfold.runtime.kernels import native
from tenfold.runtime.memory import ArenaMemory
from tenfold.runtime.program import Activation, Program

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
SPARE_ROWS = 3
"""Rows of activations that no step needs, and that nothing may touch."""

try:
    native.compiler()
    MISSING = ""
except native.NativeError as error:
    MISSING = str(error)
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to ``dtype``."""
    return 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal numbers, rounded to ``dtype``."""
    return (scale * torch.randn(*shape)).to(dtype)


def within(found: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Every element is finite and within its own bound of what is expected."""
    assert found.shape == expected.shape and torch.isfinite(found).all()
    excess = (found.double() - expected).abs() - bound
    assert (excess <= 0).all(), f"{int((excess > 0).sum())} of {excess.numel()} exceed it, by {float(excess.max())}"


def normalised(x: Tensor, epsilon: float) -> Tensor:
    """Root mean square normalisation of the last dimension, in float64."""
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many of torch's threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def poisoned_memory(
    layers: Sequence[AttentionLayer | RecurrentLayer],
    dtype: torch.dtype,
    block_size: int = 16,
    pages: int = 1,
    slots: int = 0,
    kv_quantized: bool = False,
) -> ArenaMemory:
    """An arena of ``pages`` blocks and ``slots`` states, all bytes 0xFF."""
    if not any(isinstance(layer, AttentionLayer) for layer in layers):
        layers = (AttentionLayer(1, 16), *layers)
    model = ModelSpec("test", tuple(layers), element_bytes=dtype.itemsize, kv_quantized=kv_quantized)
    page = block_size * model.kv_bytes_per_token
    slot_pages = -(-model.state_bytes // page)
    memory = ArenaMemory(CacheSpec(block_size, pages + slots * slot_pages, slot_pages, page), model, dtype, CPU)
    memory.data.fill_(0xFF)
    return memory


@dataclass
class Part:
    """What one sequence has in a step: ``length`` tokens from position ``start`` on, its blocks and its slot."""

    start: int
    length: int
    table: Sequence[int] = ()
    slot: int = 0


def make_batch(
    parts: Sequence[Part], block_size: int = 16, token_ids: Tensor | None = None, sampled: Tensor | None = None
) -> Any:
    """The fields of a ``Batch``; tokens are counted from 0 if not given, and all but the first are sampled.

    Entries of the tables behind a sequence's last block are garbage, and rows of the table are not dense.
    """
    starts = np.array([part.start for part in parts], dtype=np.int64)
    bounds = np.cumsum([0, *(part.length for part in parts)], dtype=np.int64)
    tables = np.full((len(parts), max(len(part.table) for part in parts) + 3), 2**30, dtype=np.int32)[:, :-1]
    places = []
    for row, part in zip(tables, parts, strict=True):
        row[: len(part.table)] = part.table
        positions = np.arange(part.start, part.start + part.length)
        pages = row[positions // block_size].astype(np.int64) if len(part.table) else positions // block_size
        places.append(pages * block_size + positions % block_size)
    positions = [torch.arange(part.start, part.start + part.length) for part in parts]
    return SimpleNamespace(
        token_ids=torch.arange(int(bounds[-1])) if token_ids is None else token_ids,
        positions=torch.cat(positions),
        places=torch.from_numpy(np.concatenate(places)),
        sampled=torch.arange(1, int(bounds[-1])) if sampled is None else sampled,
        rows=np.arange(len(parts)),
        slots=np.array([part.slot for part in parts], dtype=np.int64),
        starts=starts,
        bounds=bounds,
        contexts=starts + np.diff(bounds),
        tables=tables,
    )


def tokens_only(count: int, sampled: Tensor | None = None) -> Any:
    """A batch of one sequence for operations that look at nothing but rows."""
    return make_batch([Part(0, count)], sampled=sampled)


def feed(program: Program, *inputs: Tensor) -> list[Activation]:
    """Make activations of matrices: neighbouring columns of one table, of which a token's row is its id."""
    table = torch.cat(inputs, dim=1)
    assert table.dtype == program.dtype
    return program.embed(table).split([x.shape[1] for x in inputs])


def new_program(dtype: torch.dtype, memory: ArenaMemory | None = None) -> Program:
    """A program, over nothing worth keeping if no memory is given."""
    return Program(memory or poisoned_memory((), dtype), dtype)


def memories(program: Program) -> dict[Tensor, int]:
    """The distinct memory of a bound program's buffers, and how many columns of it are used."""
    found: dict[int, tuple[Tensor, int]] = {}
    for buffer in buffers(program):
        assert buffer.memory is not None
        memory, width = found.get(buffer.memory.data_ptr(), (buffer.memory, 0))
        found[memory.data_ptr()] = memory, max(width, buffer.width)
    return dict(found.values())


def buffers(program: Program) -> set[Any]:
    """Those of all activations."""
    return {activation.buffer for operation in program._operations for activation in operation.rows.values()}


def run(program: Program, batch: Any) -> None:
    """Run on buffers full of NaN, which must stay so in spare rows and beyond the last column."""
    tokens = len(batch.token_ids)
    program._bind(tokens + SPARE_ROWS)
    for memory in (*memories(program), *program._scratch):
        memory.fill_(torch.nan if memory.is_floating_point() else -128)
    program.run(batch)
    for memory, width in memories(program).items():
        assert memory[tokens:].isnan().all() and memory[:, width:].isnan().all(), "written beyond rows or columns"


def result(program: Program, out: Activation, rows: int) -> Tensor:
    """What the last run left in ``out``, copied."""
    return program.view(out, rows).clone()


FORMS = {
    "avx2": ("avx2", ("-mavx2", "-mfma", "-mno-avx512f")),
    "avx512f": ("avx512f", ("-mavx512f", "-mfma")),
}
"""What the same source is compiled into for lesser machines, each with the feature that running it needs."""


@functools.cache
def features() -> frozenset[str]:
    """What the processor says that it can do; nothing where it cannot be asked."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


@functools.cache
def library_of(form: str, folder: Path) -> Any:
    """The library in one of FORMS, compiled into ``folder``."""
    feature, flags = FORMS[form]
    if feature not in features():
        pytest.skip(f"needs {feature}")
    with pytest.MonkeyPatch.context() as patch:
        kept = [flag for flag in native.FLAGS if flag not in ("-O3", "-march=native")]
        patch.setattr(native, "FLAGS", ("-O1", *flags, *kept))
        patch.setattr(native, "user_cache_path", lambda _: folder)
        return native.library.__wrapped__()
