"""Requests served in this process, against what the machine's arithmetic and memory would allow at most.

Three workloads: many mixed requests at once (``w1``), one stream alone (``w2``), and many requests on one prefix
(``w3``). They are made up here, or read from files as other engines' benchmarks take them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.limits import Limits
from benchmarks.report import Result, Row

WORKLOADS = {"w1": "64 mixed requests at once", "w2": "one stream", "w3": "32 requests on one prefix of 512 tokens"}
VOCABULARY = 32_000
"""Made-up prompts have token ids below it."""


class Sent(NamedTuple):
    prompt: list[int]
    output: int


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--serving-model", default="smollm2-135m-instruct", help="model (default %(default)s)")
    parser.add_argument("--serving-workloads", type=Path, metavar="DIR", help="files w1.v0.json and so on to serve")
    parser.add_argument("--serving-passes", type=int, default=3, metavar="N", help="measured passes of each")
    parser.add_argument("--serving-memory", default="1GiB", help="size of the arena (default %(default)s)")
    parser.add_argument("--serving-quantize", default=None, help="as for `tenfold serve --quantize`")


def made_up(name: str, variant: int) -> list[Sent]:
    """Lengths depend on the workload alone, texts on the variant too: no pass finds another's prefixes."""
    lengths, texts = random.Random(name), random.Random(f"{name} {variant}")

    def prompt(tokens: int) -> list[int]:
        return [texts.randrange(100, VOCABULARY) for _ in range(tokens)]

    if name == "w1":
        sizes = [(round(math.exp(lengths.uniform(math.log(32), math.log(1024)))), lengths.randint(16, 256))
                 for _ in range(64)]  # fmt: skip
        return [Sent(prompt(tokens), output) for tokens, output in sizes]
    if name == "w2":
        return [Sent(prompt(128), 128)]
    prefix = prompt(512)
    return [Sent(prefix + prompt(lengths.randint(8, 32)), 64) for _ in range(32)]


def read(folder: Path, name: str, variant: int) -> list[Sent]:
    path = folder / f"{name}.v{variant}.json"
    with path.open(encoding="utf-8") as file:
        return [Sent(each["prompt_token_ids"], each["output_len"]) for each in json.load(file)["requests"]]


@dataclass
class Pass:
    """What happened to the requests of one pass; times are in seconds from its start."""

    seconds: float = 0.0
    times: list[list[float]] = field(default_factory=list)
    """When each request's tokens came."""
    computed: int = 0
    """Tokens that went through the model."""
    attended: int = 0
    """Keys that they were scored with."""
    steps: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.times))

    @property
    def rate(self) -> float:
        """Output tokens per second; of a single request, those after the first."""
        if len(self.times) > 1:
            return self.tokens / self.seconds
        (times,) = self.times
        return (len(times) - 1) / (times[-1] - times[0])

    def first_tokens(self) -> list[float]:
        return [times[0] for times in self.times]

    def gaps(self) -> list[float]:
        return [b - a for times in self.times for a, b in itertools.pairwise(times)]


def serve(engine: Any, requests: list[Sent]) -> Pass:
    """Submit all requests at once and step until all of them have ended."""
    from tenfold import SamplingParams

    result = Pass(times=[[] for _ in requests])
    plan = engine.scheduler.plan

    def counting() -> Any:
        made = plan()
        if made is not None:
            result.steps += 1
            for work in made.work:
                result.computed += work.length
                result.attended += work.length * work.start + work.length * (work.length + 1) // 2
        return made

    engine.scheduler.plan = counting
    try:
        began = time.perf_counter()
        numbers: dict[int, int] = {}
        for number, (prompt, output) in enumerate(requests):
            params = SamplingParams(temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True)
            numbers[engine.submit(prompt, params)[0]] = number
        while engine.busy:
            events = engine.step()
            now = time.perf_counter() - began
            for event in events:
                result.times[numbers[event.sequence]].append(now)
        result.seconds = time.perf_counter() - began
    finally:
        engine.scheduler.plan = plan
    return result


def main(args: argparse.Namespace) -> Result:
    from tenfold import LLM

    llm = LLM(
        args.serving_model, memory=args.serving_memory, quantize=args.serving_quantize, kernels="native", progress=False
    )
    limits = Limits()
    rows: list[Row] = []
    for name, title in WORKLOADS.items():
        passes = []
        for requests in variants(args, name):
            limits.measure()
            served = serve(llm.engine, requests)
            passes.append((served, served.tokens / least_seconds(served, llm, limits)))
        rows.append(row(title, passes[1:]))
    _, _, nbytes = llm.engine.runner.program.products()  # type: ignore[attr-defined]
    return Result(
        rows,
        [
            f"{args.serving_model}, {llm.loaded.dtype}, quantised as {args.serving_quantize}, "
            f"{nbytes / 1e6:.0f} MB of weights. Machine, measured before each pass, in the end: {limits}.",
            "The limit is the larger of operations (products and attention) over arithmetic and bytes (weights once a "
            "step, keys and values) over bandwidth. Medians of passes with the same lengths and other texts; of one "
            "stream, tokens per second after the first.",
        ],
    )


def variants(args: argparse.Namespace, name: str) -> Iterator[list[Sent]]:
    """A warm-up and the measured passes."""
    order = [3, 0, 1, 2, 4, 5][: args.serving_passes + 1]
    for variant in order:
        folder = args.serving_workloads
        yield read(folder, name, variant) if folder is not None else made_up(name, variant)


def row(title: str, measured: list[tuple[Pass, float]]) -> Row:
    """``measured`` has passes, and what the limits that were measured before each would have allowed."""
    passes = [each for each, _ in measured]
    rate = statistics.median(each.rate for each in passes)
    first = statistics.median(statistics.median(each.first_tokens()) for each in passes)
    gaps = [statistics.quantiles(each.gaps(), n=100) for each in passes]
    return {
        "workload": title,
        "output tokens/s": f"{rate:,.0f}",
        "limit": f"{statistics.median(most for _, most in measured):,.0f}",
        "of the limit": f"{statistics.median(each.rate / most for each, most in measured):.0%}",
        "TTFT p50": f"{1e3 * first:,.0f} ms",
        "ITL p50": f"{1e3 * statistics.median(each[49] for each in gaps):.1f} ms",
        "ITL p99": f"{1e3 * statistics.median(each[98] for each in gaps):.1f} ms",
    }


def least_seconds(each: Pass, llm: Any, limits: Limits) -> float:
    """What the pass would take at the machine's limits."""
    program, spec = llm.engine.runner.program, llm.engine.runner.model_spec
    of_token, of_sample, nbytes = program.products()
    elements = sum(layer.kv_heads * layer.head_dim for layer in spec.attention)
    heads = llm.loaded.config.num_attention_heads / llm.loaded.config.num_key_value_heads
    states = sum(layer.state_elements for layer in spec.recurrent)
    products = each.computed * of_token + each.tokens * of_sample
    operations = products + 8 * each.computed * states + 4 * each.attended * elements * heads
    # Keys and values are read once for all tokens of a sequence in a step; all but prefills have one.
    read_bytes = each.steps * nbytes + each.tokens * (each.attended / each.computed) * 2 * spec.element_bytes * elements
    return max(operations / limits.arithmetic, read_bytes / limits.bandwidth)
