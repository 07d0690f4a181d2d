"""The compiled CPU kernels against the bandwidth and the arithmetic that the same run measures."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.limits import Limits, seconds
from benchmarks.report import Result, Row
from tenfold.core import AttentionLayer, CacheSpec, ModelSpec, RecurrentLayer
from tenfold.models.quantise import Format, quantise
from tenfold.runtime.batch import Batch, Draws
from tenfold.runtime.kernels import native
from tenfold.runtime.memory import ArenaMemory
from tenfold.runtime.program import Program

BLOCK = 16
CPU = torch.device("cpu")
REPEATS = 4
"""Times an operation is repeated in a program, each time on another layer's memory or another weight."""


@dataclass
class Job:
    """Something to time: each ``run`` touches ``nbytes`` of memory and does ``operations`` of arithmetic."""

    name: str
    nbytes: float
    operations: float
    run: Callable[[], Any]


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="timings of each (default %(default)s)")
    parser.add_argument(
        "--kernel-threads",
        type=int,
        default=torch.get_num_threads(),
        metavar="N",
        help="threads of the kernels; one is timed by its CPU time, whatever else runs (default %(default)s)",
    )


def batch(lengths: list[int], starts: list[int], tables: np.ndarray) -> Batch:
    """A step of sequences that compute ``lengths`` tokens after ``starts``."""
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    begin = np.array(starts, dtype=np.int64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(bounds[-1]) - (bounds[:-1] - begin)[owner]
    places = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    tokens = torch.arange(int(bounds[-1]))
    return Batch(
        token_ids=tokens,
        positions=torch.from_numpy(positions),
        places=torch.from_numpy(places),
        sampled=tokens,
        rows=np.arange(len(lengths)),
        slots=np.arange(len(lengths)),
        starts=begin,
        contexts=begin + lengths,
        bounds=bounds,
        tables=tables,
        drawn=Draws([], [], []),
    )


def attention(batch_size: int, context: int, heads: int, kv_heads: int, dim: int, length: int = 1) -> Job:
    """``length`` new tokens of each sequence, blocks scattered over the arena, another layer every time."""
    layers = (AttentionLayer(kv_heads, dim),) * REPEATS
    model = ModelSpec("benchmark", layers, element_bytes=2)
    blocks = -(-context // BLOCK)
    memory = ArenaMemory(CacheSpec(BLOCK, batch_size * blocks, 0, BLOCK * model.kv_bytes_per_token), model,
                         torch.bfloat16, CPU)  # fmt: skip
    native.large_pages(memory.data)
    memory.data.view(torch.bfloat16).fill_(0.5)
    tables = np.random.default_rng(0).permutation(batch_size * blocks).astype(np.int32).reshape(batch_size, blocks)
    step = batch([length] * batch_size, [context - length] * batch_size, tables)
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    program = Program(memory, torch.bfloat16)
    mixed = program.embed(torch.randn(batch_size * length, sum(sizes)).bfloat16())
    program.rotary(torch.ones(dim // 2), 1.0)
    for layer in range(REPEATS):
        program.attention(layer, *mixed.split(sizes), head_dim=dim, scale=dim**-0.5)
    seen = length * (context - (length - 1) / 2)
    name = f"attention, {batch_size} x {context:,} tokens, {heads} heads on {kv_heads} of {dim}"
    return Job(
        name if length == 1 else f"{name}, {length} new",
        REPEATS * batch_size * context * 2 * kv_heads * dim * 2,
        REPEATS * batch_size * seen * heads * dim * 4,
        lambda: program.run(step),
    )


def delta_rule(batch_size: int, length: int = 1) -> Job:
    """Gated DeltaNet layers of a 27B model; a state is read and written."""
    layer = RecurrentLayer(16, 48, 128, 128, convolution_width=4)
    model = ModelSpec("benchmark", (AttentionLayer(1, 16), *(layer,) * REPEATS), element_bytes=2)
    page = BLOCK * model.kv_bytes_per_token
    slot_pages = -(-model.state_bytes // page)
    memory = ArenaMemory(CacheSpec(BLOCK, batch_size * slot_pages, slot_pages, page), model, torch.bfloat16, CPU)
    native.large_pages(memory.data)
    for state in memory.states:
        state.fill_(0.01)
    sizes = [2048, 2048, 6144, 48, 48]
    program = Program(memory, torch.bfloat16)
    mixed = program.embed(torch.randn(batch_size * length, sum(sizes)).bfloat16())
    for number in range(REPEATS):
        program.delta_rule(number, *mixed.split(sizes), rate=torch.ones(48), step_bias=torch.ones(48))
    step = batch([length] * batch_size, [1] * batch_size, np.zeros((batch_size, length), dtype=np.int32))
    elements = REPEATS * batch_size * layer.state_elements
    name = f"gated delta rule, {batch_size} x {length} tokens, 48 states of 128 x 128"
    return Job(name, 2 * 4 * elements, 8 * length * elements, lambda: program.run(step))


def linear(tokens: int, inputs: int, outputs: int, format: Format) -> Job:
    """Products with weights that no cache holds, as in a decode step, or with many rows, as in a prefill."""
    weight = torch.randn(outputs, inputs).bfloat16()
    packed = [
        native.pack(weight) if format is Format.BFLOAT16 else native.pack_quantised(quantise(weight, format))
        for _ in range(REPEATS)
    ]
    program = Program(_NOTHING, torch.bfloat16)
    x = program.embed(torch.randn(tokens, inputs).bfloat16())
    for each in packed:
        program.linear(x, each)
    step = batch([1] * tokens, [0] * tokens, np.zeros((tokens, 1), dtype=np.int32))
    return Job(
        f"product, {tokens} x {inputs:,} by {outputs:,} {format.name.lower().replace('_', ' ')}",
        sum(each.nbytes for each in packed),
        REPEATS * 2.0 * tokens * inputs * outputs,
        lambda: program.run(step),
    )


_EMPTY = ModelSpec("benchmark", (AttentionLayer(1, 16),), element_bytes=2)
_NOTHING = ArenaMemory(CacheSpec(BLOCK, 1, 0, BLOCK * _EMPTY.kv_bytes_per_token), _EMPTY, torch.bfloat16, CPU)

JOBS: list[Callable[[], Job]] = [
    lambda: attention(64, 512, 9, 3, 64),
    lambda: attention(64, 512, 24, 4, 256),
    lambda: attention(1, 32768, 9, 3, 64),
    lambda: attention(1, 32768, 24, 4, 256),
    lambda: attention(1, 4096, 9, 3, 64, length=512),
    lambda: attention(1, 4096, 24, 4, 256, length=512),
    lambda: delta_rule(1),
    lambda: delta_rule(32),
    lambda: delta_rule(1, length=128),
    *(
        lambda tokens=tokens, format=format: linear(tokens, 2048, 8192, format)
        for tokens in (1, 32, 512)
        for format in (Format.BFLOAT16, Format.INT8, Format.INT4_GROUPS)
    ),
]


def measure(job: Job, rounds: int, limits: Limits) -> Row:
    """Time the limits and the kernel in turns; each round's best is held against the limits of that round."""
    job.run()
    taken, bandwidths, arithmetics = [], [], []
    for _ in range(rounds):
        limits.measure()
        best = min(seconds(job.run) for _ in range(3))
        taken.append(best)
        bandwidths.append(job.nbytes / best / limits.bandwidth)
        arithmetics.append(job.operations / best / limits.arithmetic)
    median = statistics.median(taken)
    return {
        "kernel": job.name,
        "time": f"{1e3 * median / REPEATS:.2f} ms",
        "GB/s": f"{job.nbytes / median / 1e9:.1f}",
        "of the bandwidth": f"{statistics.median(bandwidths):.0%}",
        "Gflop/s": f"{job.operations / median / 1e9:.0f}",
        "of the arithmetic": f"{statistics.median(arithmetics):.0%}",
    }


@torch.inference_mode()
def main(args: argparse.Namespace) -> Result:
    if not native.available():
        return Result([], ["Not measured: the native kernels cannot be compiled here."])
    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(args.kernel_threads)
        limits = Limits()
        rows = [measure(make(), args.rounds, limits) for make in JOBS]
    finally:
        torch.set_num_threads(before)
    return Result(
        rows,
        [
            f"Limits on {args.kernel_threads} threads, measured before each timing, in the end {limits}: the product "
            "is torch's. Shares are medians of each timing's own.",
            f"bfloat16 keys and values in scattered blocks of {BLOCK} tokens, float32 states, which count twice, being "
            "read and written. Times are of one layer.",
        ],
    )
