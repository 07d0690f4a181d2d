"""The share of KV memory that holds tokens, on the request lengths of a recorded trace.

Every request is held for as many steps as it has output tokens, and the share is tokens held over places held, both
summed over all requests and steps, so that long requests count for as long as they last. Paged memory is measured on
the real scheduler and its allocator. What reservation holds follows from the lengths alone; where it is not the same
for all, a buddy allocator rounds it up to a power of two, as in the baselines of the PagedAttention paper.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Result, Row
from tenfold.core import CacheSpec, Request, SamplingParams, Scheduler, StepOutcome

MAXIMUM = 2048
TOKEN = 5
LARGEST_BATCH = 10_000_000
"""Tokens of a step: every prompt is computed in one, as the definition has it."""


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--vtc-trace", type=Path, metavar="CSV", help="trace with columns prompt_len and output_len")
    parser.add_argument("--sessions", type=int, default=256, metavar="N", help="requests at once (default %(default)s)")


def read_trace(path: Path) -> list[Lengths]:
    with path.open(newline="", encoding="utf-8") as file:
        return [Lengths(int(row["prompt_len"]), int(row["output_len"])) for row in csv.DictReader(file)]


def power_of_two(count: int) -> int:
    """The least power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()


RESERVATIONS: dict[str, tuple[Callable[[Lengths], int], float]] = {
    f"reserved at {MAXIMUM:,}": (lambda request: MAXIMUM, 18.0),
    "output rounded up to a power of two": (lambda r: power_of_two(r.prompt + power_of_two(r.output)), 28.4),
    "output known beforehand (oracle)": (lambda request: power_of_two(request.prompt + request.output), 41.5),
}
"""Places held for a request in every step, and the percentage expected on the trace of 1,500 chats."""
PAGED = {16: 98.0, 784: 42.9}
"""Block size to the percentage expected on the same trace."""


def reserved_share(requests: list[Lengths], places: Callable[[Lengths], int]) -> float:
    tokens = sum(prompt * output + output * (output + 1) // 2 for prompt, output in requests)
    return tokens / sum(places(request) * request.output for request in requests)


def paged_share(requests: list[Lengths], block_size: int, sessions: int) -> float:
    """Serve the requests in order, ``sessions`` of them at once, and look at the arena in every step."""
    longest = max(prompt + output for prompt, output in requests)
    spec = CacheSpec(block_size, sessions * -(-longest // block_size))
    scheduler = Scheduler(spec, LARGEST_BATCH, sessions, prefix_caching=False)
    for number, (prompt, output) in enumerate(requests):
        tokens = (number, *(TOKEN,) * (prompt - 1))
        scheduler.submit(Request(number, tokens, output, SamplingParams(max_tokens=output)))
    cache, tokens_held, places_held = scheduler.cache, 0, 0
    while scheduler.live:
        plan = scheduler.plan()
        assert plan is not None
        # Between plan and commit every token of the step has its place and nobody has left.
        blocks = spec.num_pages - cache.arena.free
        places_held += blocks * block_size
        tokens_held += blocks * block_size - cache.tail_waste
        scheduler.commit(StepOutcome(plan.step, [TOKEN] * sum(work.sample for work in plan.work)))
    return tokens_held / places_held


def main(args: argparse.Namespace) -> Result:
    if args.vtc_trace is None or not args.vtc_trace.is_file():
        return Result([], ["Not measured: --vtc-trace is not given or not there."])
    requests = read_trace(args.vtc_trace)
    rows = [_row(name, reserved_share(requests, places), expected) for name, (places, expected) in RESERVATIONS.items()]
    for block_size, expected in PAGED.items():
        share = paged_share(requests, block_size, args.sessions)
        rows.append(_row(f"paged, blocks of {block_size} (measured)", share, expected))
    outputs = sum(request.output for request in requests)
    return Result(
        rows,
        [
            f"{len(requests):,} requests of {args.vtc_trace.name}, {outputs:,} output tokens, each a step.",
            "Paged is measured on the scheduler's arena in every step, which never stores the last token of a text.",
            "Blocks of 784 tokens are what padding a block to the size of a state gives on a 27B hybrid.",
        ],
    )


def _row(name: str, share: float, expected: float) -> Row:
    return {"memory": name, "holds tokens": f"{share:.1%}", "expected": f"{expected:.1f}%"}
