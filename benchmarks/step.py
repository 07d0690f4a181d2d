"""Where the time of a step goes, with a real model on this machine.

Populations of 1, 32 and 64 sequences decode in a steady state, and then the largest decodes beside a prompt that is
always being prefilled. Each part of a step is timed from outside by functions that take the place of its calls:

    plan, commit        the scheduler
    model               the forward pass
    rest of the runner  what ``StepOutcome.seconds`` has beyond it: copies, the batch as tensors, sampling
    hand-over           what ``submit`` and ``collect`` take beyond ``StepOutcome.seconds``
    instruments         all the rest of ``Engine.step``: the metrics, and the loop itself

The model counts for what the host spends in its forward pass, which on a CPU is all of it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.report import Result, Row
from tenfold.core import StepOutcome

PROMPT, OUTPUT = 129, 2000
"""Tokens of a sequence: those it begins with, and more than it will have time to generate."""
PREFILL, CHUNK = 2000, 128
"""Tokens of a prompt that is prefilled beside the decodes, and how many of them a step takes."""
WARM_UP = 3
PARTS = ("plan", "model", "rest of the runner", "hand-over", "commit", "instruments")


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--step-model", default="smollm2-135m-instruct", help="model (default %(default)s)")
    parser.add_argument("--step-batches", type=int, nargs="+", default=[1, 32, 64], metavar="N", help="sequences")
    parser.add_argument(
        "--step-seconds", type=float, default=4.0, metavar="S", help="time for each population (default %(default)s)"
    )
    parser.add_argument("--step-threads", type=int, default=1, metavar="N", help="threads (default %(default)s)")


def main(args: argparse.Namespace) -> Result:
    import torch

    from tenfold import LLM

    most = max(args.step_batches)
    before = torch.get_num_threads()
    try:
        llm = LLM(
            args.step_model,
            memory="1GiB",
            max_batch_tokens=most + CHUNK,
            max_sequences=most + 1,
            threads=args.step_threads,
            progress=False,
        )
        stopwatch = Stopwatch(llm)
        rows: list[Row] = []
        for batch, prefill in [*((batch, False) for batch in args.step_batches), (most, True)]:
            ids = decoding(llm, batch)
            what = f"{batch} decode" + (f" + {CHUNK} prefill" if prefill else "")
            rows.append(stopwatch.measure(what, args.step_seconds, prefill))
            for sequence in ids:
                llm.engine.finish(sequence)
            while llm.engine.busy:
                llm.engine.step()
    finally:
        torch.set_num_threads(before)
    return Result(
        rows,
        [
            f"{args.step_model}, threads: {args.step_threads}, contexts from {PROMPT} tokens, greedy. Medians of each "
            "part on its own, in ms, with its share of the median step.",
            "A sum of medians is not the median of sums: shares need not add up to 100%.",
        ],
    )


def submit(llm: Any, seed: int, tokens: int, output: int) -> int:
    """Queue a random prompt and return its id."""
    from tenfold import SamplingParams

    rng = random.Random(seed)
    prompt = [rng.randrange(100, llm.engine.vocab_size) for _ in range(tokens)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    return llm.engine.submit(prompt, params)[0]


def decoding(llm: Any, batch: int) -> list[int]:
    """Start ``batch`` sequences on one prompt, which is computed once, and run them past it."""
    ids = [submit(llm, 0, PROMPT, OUTPUT) for _ in range(batch)]
    begun: set[int] = set()
    while len(begun) < batch:
        begun.update(event.sequence for event in llm.engine.step())
    return ids


class Stopwatch:
    """Seconds that the parts of a step take."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._seconds: dict[str, float] = defaultdict(float)  # of each call, in the step under way
        engine = llm.engine
        for owner, method in (
            (engine.scheduler, "plan"),
            (engine.runner, "submit"),
            (engine.runner, "collect"),
            (engine.scheduler, "commit"),
            (engine.runner.program or llm.loaded.model, "forward"),
        ):
            setattr(owner, method, self._timed(method, getattr(owner, method)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            self._seconds[name] += time.perf_counter() - began
            if isinstance(result, StepOutcome):
                self._seconds["runner"] += result.seconds
            return result

        return timed

    def step(self) -> list[float]:
        """Run a step; the seconds of all of it, then of each of ``PARTS``."""
        self._seconds.clear()
        began = time.perf_counter()
        self._llm.engine.step()
        whole = time.perf_counter() - began
        of = self._seconds
        called = of["submit"] + of["collect"]
        rest = whole - of["plan"] - called - of["commit"]
        return [
            whole,
            of["plan"],
            of["forward"],
            of["runner"] - of["forward"],
            called - of["runner"],
            of["commit"],
            rest,
        ]

    def measure(self, what: str, seconds: float, prefill: bool) -> Row:
        """Run steps for ``seconds``, with ``prefill`` beside a prompt that is always being computed."""
        taken: list[list[float]] = []
        beside = -1
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline or len(taken) <= WARM_UP:
            if prefill and beside not in self._llm.engine.scheduler.live:
                beside = submit(self._llm, 1 + len(taken), PREFILL, 1)
            taken.append(self.step())
        if prefill:
            self._llm.engine.finish(beside)
        whole, *parts = (statistics.median(times) for times in zip(*taken[WARM_UP:], strict=True))
        shares = dict(zip(PARTS, parts, strict=True))
        row = {"step": what, "steps": f"{len(taken) - WARM_UP}", "ms": f"{1e3 * whole:.1f}"}
        return row | {part: f"{1e3 * median:.2f} ({median / whole:.1%})" for part, median in shares.items()}
