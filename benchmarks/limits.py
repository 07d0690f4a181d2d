"""What the machine can do at most, measured in the same run as what is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tenfold.runtime.kernels import native

READ_BYTES = 2**28
"""Far more than any cache holds."""
PRODUCT = 1024
"""Rows, columns and inputs of the product that the rate of arithmetic is measured by."""


def seconds(call: Callable[[], Any]) -> float:
    """Time a call takes: its own CPU time where torch has one thread, whatever else runs on the machine."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    call()
    return clock() - started


@dataclass
class Limits:
    """Bytes and operations per second on all of torch's threads, when last measured; 0 before ``measure``.

    A shared machine changes its pace within seconds: measure right before what is held against it.
    """

    bandwidth: float = 0.0
    arithmetic: float = 0.0

    def __post_init__(self) -> None:
        self._block = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        self._factors = [torch.ones(PRODUCT, PRODUCT, dtype=torch.bfloat16) for _ in range(2)]

    def measure(self) -> None:
        """Read a large block and multiply two large bfloat16 matrices, and keep the best of three each."""
        read = (lambda: native.read(self._block)) if native.available() else self._block.sum
        self.bandwidth = self._block.nbytes / min(seconds(read) for _ in range(3))
        taken = min(seconds(lambda: self._factors[0] @ self._factors[1]) for _ in range(3))
        self.arithmetic = 2 * PRODUCT**3 / taken

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.1f} GB/s read, {self.arithmetic / 1e9:.0f} Gflop/s in bfloat16"
