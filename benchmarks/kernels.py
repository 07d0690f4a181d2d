"""The compiled CPU kernels against the memory bandwidth that the same run measures, and against the torch reference."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import Result, Row
from tenfold.runtime.kernels import native, reference
from tenfold.runtime.kernels.delta_rule import Inputs, Split, gated_delta_rule

BLOCK = 16
READ_BYTES = 2**28
"""Far more than any cache holds."""


@dataclass
class Job:
    """Something to time: ``fast`` and ``slow`` touch ``nbytes`` of the arena each time they are called."""

    name: str
    nbytes: int
    fast: Callable[[int], Any]
    slow: Callable[[int], Any]


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="timings of each (default %(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        metavar="N",
        help="threads of kernels and of torch; one is timed by its CPU time, whatever else runs (default %(default)s)",
    )


def attention(batch: int, context: int, heads: int, kv_heads: int, dim: int, layers: int) -> Job:
    """One new token of each of ``batch`` sequences, blocks scattered over the arena, a different layer every time."""
    blocks = context // BLOCK
    arena = torch.ones(batch * blocks, layers, 2, BLOCK, kv_heads, dim, dtype=torch.bfloat16)
    tables = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
    contexts = np.full(batch, context, dtype=np.int64)
    step = SimpleNamespace(contexts=contexts, bounds=np.arange(batch + 1, dtype=np.int64), tables=tables)
    query, scale = torch.randn(batch, heads, dim).bfloat16(), dim**-0.5

    def views(turn: int) -> tuple[Tensor, Tensor]:
        return arena[:, turn % layers, 0], arena[:, turn % layers, 1]

    def fast(turn: int) -> Tensor:
        return native.paged_attention(query, *views(turn), tables, contexts - 1, step.bounds, scale)

    def slow(turn: int) -> Tensor:
        return reference.paged_attention(query, *views(turn), step, scale)  # type: ignore[arg-type]

    name = f"attention, {batch} x {context:,} tokens, {heads} heads on {kv_heads} of {dim}"
    return Job(name, arena[:, 0].nbytes, fast, slow)


def delta_step(batch: int, tokens: int = 1) -> Job:
    """A Gated DeltaNet layer of a 27B model; a state is read and written."""
    key_heads, value_heads, dim = 16, 48, 128
    states = torch.full((batch, value_heads, dim, dim), 0.01)
    total = batch * tokens
    inputs = Inputs(
        *torch.randn(2, total, key_heads, dim).bfloat16(),
        torch.randn(total, value_heads, dim).bfloat16(),
        -torch.rand(total, value_heads),
        torch.rand(total, value_heads).bfloat16(),
    )
    bounds, places = np.arange(0, total + 1, tokens, dtype=np.int64), np.arange(batch, dtype=np.int64)
    split = Split.of(bounds, places, states)
    return Job(
        f"gated delta rule, {batch} x {tokens} tokens, 48 states of 128 x 128",
        2 * states.nbytes,
        lambda _: native.delta_rule(*inputs, states, bounds, places),
        lambda _: gated_delta_rule(inputs, states, split),
    )


JOBS: list[Callable[[], Job]] = [
    lambda: attention(64, 512, 9, 3, 64, layers=8),
    lambda: attention(64, 512, 24, 4, 256, layers=4),
    lambda: attention(1, 32768, 9, 3, 64, layers=8),
    lambda: attention(1, 32768, 24, 4, 256, layers=4),
    lambda: delta_step(1),
    lambda: delta_step(32),
    lambda: delta_step(1, tokens=128),
]


def seconds(call: Callable[[], Any]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    call()
    return clock() - started


def measure(job: Job, rounds: int, block: Tensor) -> Row:
    """Time reading, kernel and reference in turns, and take the best of each: what else runs only ever adds time."""
    job.fast(0)
    read, fast, slow = [], [], []
    for i in range(rounds):
        read.append(seconds(lambda: native.read(block)))
        fast += [seconds(lambda turn=turn: job.fast(turn)) for turn in range(3 * i, 3 * i + 3)]  # type: ignore[misc]
        if i < 3:
            slow.append(seconds(lambda turn=i: job.slow(turn)))  # type: ignore[misc]
    reading, rate = block.nbytes / min(read) / 1e9, job.nbytes / min(fast) / 1e9
    return {
        "kernel": job.name,
        "time": f"{1e3 * min(fast):.2f} ms",
        "GB/s": f"{rate:.1f}",
        "of the bandwidth": f"{rate / reading:.0%} of {reading:.1f}",
        "reference": f"{min(slow) / min(fast):.1f} times slower",
    }


@torch.inference_mode()
def main(args: argparse.Namespace) -> Result:
    if not native.available():
        return Result([], ["Not measured: the native kernels cannot be compiled here."])
    torch.manual_seed(0)
    block = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(args.threads)
        rows = [measure(make(), args.rounds, block) for make in JOBS]
    finally:
        torch.set_num_threads(before)
    return Result(
        rows,
        [
            f"Threads: {args.threads}; bfloat16 keys and values in scattered blocks of {BLOCK} tokens, float32 states.",
            f"The bandwidth is that of reading {READ_BYTES >> 20} MiB in order on as many threads, between timings.",
            "States count twice: they are read and written. Best times.",
        ],
    )
