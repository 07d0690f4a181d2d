"""One decode step of the scheduler: what the host pays per step whatever the model.

Each population decodes in a steady state: every sequence gets one token a step and none ends. Prompts have nothing in
common, and their lengths differ by up to one block, so that in every step a sixteenth of the sequences need a new
block, as in a real batch, instead of all of them in the same step. ``plan`` and ``commit`` are timed and nothing else;
then the same population goes on through ``Engine.step`` with its metrics, which gives what the engine adds. The garbage
collector is on, and set as ``tenfold serve`` sets it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Result, Row
from tenfold.core import CacheSpec, Request, SamplingParams, Scheduler, StepOutcome, StepPlan
from tenfold.engine.engine import COLLECTOR, Engine

BLOCK_SIZE = 16
TOKEN = 5
WARM_UP = 20
REFERENCE_CONTEXT = 2000
REFERENCE = {256: 2.09, 1024: 8.6}
"""Median milliseconds a step of vLLM 0.32's own scheduler, at a context of 2,000 tokens on a Zen 5 machine."""
GROWTH = 1.25
"""How much longer a step may take at the longest context than at the shortest before it counts as growing."""


class TokenRunner:
    """Answers every sample with the same token, at once."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepOutcome:
        plan = self._plans.popleft()
        return StepOutcome(plan.step, [TOKEN] * len(plan.work))

    def reset(self) -> None:
        self._plans.clear()


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1024, 4096], metavar="N")
    parser.add_argument("--contexts", type=int, nargs="+", default=[500, 2000, 8000], metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each population (default 200)")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="a Python that has vllm: also run it here")
    parser.add_argument("--vllm-script", type=Path, metavar="PATH", help="the script that times vLLM's scheduler")
    parser.add_argument("--vllm-model", metavar="DIR", help="the model directory that the script is given")


def population(sequences: int, context: int, steps: int) -> Engine:
    """An engine whose sequences are all past their prompts; each has room for ``steps`` more tokens."""
    length = context + steps
    spec = CacheSpec(BLOCK_SIZE, sequences * -(-length // BLOCK_SIZE))
    scheduler = Scheduler(spec, sequences * context, sequences)
    engine = Engine(scheduler, TokenRunner(), vocab_size=TOKEN + 1, max_context=length)
    rests = [(TOKEN,) * (context - 1 - i) for i in range(min(BLOCK_SIZE, context))]
    params = SamplingParams(temperature=0.0, max_tokens=steps)
    for i in range(sequences):
        request = Request(i, (i, *rests[i % len(rests)]), steps, params)  # none shares a block with another
        scheduler.submit(request)
        engine.metrics.submitted(request, 0.0)
    while scheduler.waiting:
        engine.step()
    return engine


def median_and_p99(times: list[float]) -> tuple[float, float]:
    """Both in milliseconds."""
    ordered = sorted(times)
    return 1e3 * statistics.median(ordered), 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def time_scheduler(scheduler: Scheduler, sequences: int, steps: int) -> list[float]:
    times = []
    outcome_tokens = [TOKEN] * sequences
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None and len(plan.work) == sequences
        outcome = StepOutcome(plan.step, outcome_tokens)
        committing = time.perf_counter()
        scheduler.commit(outcome)
        times.append(time.perf_counter() - committing + planned - begin)
    return times[WARM_UP:]


def time_calls(call: Callable[[], object], steps: int) -> list[float]:
    times = []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times[WARM_UP:]


def main(args: argparse.Namespace) -> Result:
    rows: list[Row] = []
    notes: list[str] = []
    thresholds = gc.get_threshold()
    gc.set_threshold(*COLLECTOR)
    for sequences in args.sequences:
        medians = {}
        for context in args.contexts:
            engine = population(sequences, context, 2 * (WARM_UP + args.steps) + 8)
            median, p99 = median_and_p99(time_scheduler(engine.scheduler, sequences, args.steps))
            whole, _ = median_and_p99(time_calls(engine.step, args.steps))
            medians[context] = median
            reference = REFERENCE.get(sequences) if context == REFERENCE_CONTEXT else None
            rows.append(
                {
                    "sequences": f"{sequences:,}",
                    "context": f"{context:,}",
                    "median ms": f"{median:.3f}",
                    "p99 ms": f"{p99:.3f}",
                    "with engine ms": f"{whole:.3f}",
                    "vLLM 0.32 median ms": f"{reference:g}" if reference else "",
                }
            )
        if len(medians) > 1:
            notes.append(growth(sequences, medians))
    gc.set_threshold(*thresholds)
    notes.append("The p99 includes Python's garbage collector, which is set as tenfold serve sets it.")
    notes.append(
        "vLLM 0.32's figures are of its real scheduler, schedule() and update_from_output(), on a Zen 5 machine: "
        "another machine than this one unless it says so above."
    )
    notes += run_vllm(args)
    return Result(rows, notes)


def growth(sequences: int, medians: dict[int, float]) -> str:
    short, long = min(medians), max(medians)
    ratio = medians[long] / medians[short]
    verdict = "grows" if ratio > GROWTH else "does not grow"
    return (
        f"{sequences:,} sequences: a step {verdict} with context: {long:,} tokens take {ratio:.2f} times "
        f"as long as {short:,}."
    )


def run_vllm(args: argparse.Namespace) -> list[str]:
    """The lines that vLLM's script prints on this machine, or one that says why there are none."""
    given = {"--vllm-python": args.vllm_python, "--vllm-script": args.vllm_script, "--vllm-model": args.vllm_model}
    missing = [option for option, path in given.items() if path is None or not Path(path).exists()]
    if missing:
        return [f"vLLM's scheduler was not run on this machine: {', '.join(missing)} not given or not there."]
    populations = [str(sequences) for sequences in args.sequences]
    command = [str(args.vllm_python), str(args.vllm_script), str(args.vllm_model), *populations]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("vllm scheduler")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return [f"vLLM's scheduler was run on this machine and failed ({done.returncode}): {last}"]
    return [f"On this machine: {line}" for line in lines]
