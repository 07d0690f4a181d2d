"""Blocks that samples and beams of one prompt have in common, and prompts that are computed once for many requests.

The table follows the PagedAttention paper: blocks saved by sharing over the blocks that there would be without it, both
summed over all steps. Everything runs on the real scheduler and its arena; there is no model, so lengths are drawn
around the paper's means, or taken from chats that are given, and beams choose among candidates that are drawn too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Result, Row
from tenfold.core import CacheSpec, Request, SamplingParams, Scheduler, StepOutcome, StepPlan
from tenfold.core.plan import TokenLogprobs

TOKEN = 5
BLOCK_SIZE = 16
WIDTHS = (2, 4, 6)
AT_ONCE = 32
LONGEST = 2048
"""Tokens of prompt and answer at most, as in the paper's model."""
PAPER = {
    ("Alpaca", "samples"): ("6.1%", "8.5%", "9.8%"),
    ("Alpaca", "beams"): ("37.6%", "53.1%", "55.2%"),
    ("ShareGPT", "samples"): ("16.2%", "", "30.5%"),
    ("ShareGPT", "beams"): ("44.3%", "", "66.3%"),
}
MEANS = {"Alpaca": (19.31, 58.45), "ShareGPT": (161.31, 337.99)}
SHAPES = (1, 2)
BEAM_REQUESTS = 48
"""Requests of each row that are served with beams, which take far longer than samples."""
HYBRID_SLOT_PAGES = 147
PREFIX, OWN, ANSWER = 512, 100, 32
SAMPLES, SAMPLED_PROMPT, SAMPLED_ANSWER = 8, 2000, 200


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--sharegpt-chats", type=Path, metavar="JSONL", help="chats with input_toks and output_toks")
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="drawn requests (default %(default)s)")


def draw_lengths(name: str, shape: int, requests: int) -> list[Lengths]:
    """Prompts from a gamma distribution of this shape around the paper's mean, answers from an exponential one."""
    rng, (prompt, output) = random.Random(name), MEANS[name]
    drawn = [
        (round(rng.gammavariate(shape, prompt / shape)), round(rng.expovariate(1 / output))) for _ in range(requests)
    ]
    return [bounded(*lengths) for lengths in drawn]


def bounded(prompt: int, output: int) -> Lengths:
    prompt = min(max(1, prompt), LONGEST - 1)
    return Lengths(prompt, min(max(1, output), LONGEST - prompt))


def read_lengths(path: Path) -> list[Lengths]:
    with path.open(encoding="utf-8") as file:
        chats = [json.loads(line) for line in file]
    return [bounded(chat["input_toks"], chat["output_toks"]) for chat in chats]


def candidates(rng: random.Random, count: int) -> TokenLogprobs:
    """The most likely tokens of a made-up distribution: each takes two thirds of what is left on average."""
    left, shares = 1.0, []
    for _ in range(count):
        share = left * rng.random() ** 0.5
        left -= share
        shares.append(max(share, 1e-30))
    shares.sort(reverse=True)
    logprobs = [math.log(share) for share in shares]
    return TokenLogprobs(logprobs[0], tuple(enumerate(logprobs)))


def answer(plan: StepPlan, rng: random.Random, width: int) -> StepOutcome:
    """One token for every sample, and for beams (``width`` above 0) their candidates."""
    samples = sum(work.sample for work in plan.work) + sum(entry.source >= 0 for entry in plan.entries)
    logprobs = tuple(candidates(rng, 2 * width) for _ in range(samples)) if width else None
    return StepOutcome(plan.step, [TOKEN] * samples, logprobs)


def submit(scheduler: Scheduler, first: int, lengths: Lengths, width: int, beams: bool) -> None:
    params = SamplingParams(max_tokens=lengths.output)
    if beams:
        params = replace(params, use_beam_search=True, beam_width=width)
    prompt = (first + TOKEN,) * lengths.prompt
    scheduler.submit(*(Request(first + i, prompt, lengths.output, params) for i in range(width)))


def saved_share(requests: list[Lengths], width: int, beams: bool) -> float:
    """Serve the requests, ``AT_ONCE`` of them at a time, and compare tables with pages in every step."""
    longest = CacheSpec(BLOCK_SIZE, 1).blocks_for(LONGEST)
    spec = CacheSpec(BLOCK_SIZE, AT_ONCE * width * longest)
    scheduler = Scheduler(spec, AT_ONCE * width * LONGEST, AT_ONCE * width, prefix_caching=False)
    rng, ahead = random.Random(width), list(enumerate(requests))[::-1]
    alone = shared = 0
    while ahead or scheduler.live:
        while ahead and len(scheduler.live) <= (AT_ONCE - 1) * width:
            number, lengths = ahead.pop()
            submit(scheduler, number * width, lengths, width, beams)
        plan = scheduler.plan()
        assert plan is not None
        alone += sum(len(seq.table) for seq in scheduler.running.values())
        shared += spec.num_pages - scheduler.cache.arena.free
        scheduler.commit(answer(plan, rng, width if beams else 0))
    return 1 - shared / alone


def run(scheduler: Scheduler, watch: Callable[[StepPlan], None]) -> None:
    rng = random.Random(0)
    while scheduler.live:
        plan = scheduler.plan()
        assert plan is not None
        watch(plan)
        scheduler.commit(answer(plan, rng, 0))


def computed_prompt_tokens(slot_pages: int) -> int:
    """Prompt tokens computed for ``AT_ONCE`` requests that arrive together and share their first tokens."""
    scheduler = Scheduler(CacheSpec(BLOCK_SIZE, 20_000, slot_pages), 8192, AT_ONCE)
    params = SamplingParams(max_tokens=ANSWER)
    for i in range(AT_ONCE):
        scheduler.submit(Request(i, (TOKEN,) * PREFIX + (TOKEN + 1 + i,) * OWN, ANSWER, params))
    computed = 0

    def watch(plan: StepPlan) -> None:
        nonlocal computed
        computed += sum(min(w.start + w.length, PREFIX + OWN) - min(w.start, PREFIX + OWN) for w in plan.work)

    run(scheduler, watch)
    return computed


def peak_blocks(slot_pages: int) -> int:
    """The most blocks that samples of one long prompt ever hold together."""
    scheduler = Scheduler(CacheSpec(BLOCK_SIZE, 4_000, slot_pages), 8192, SAMPLES)
    submit(scheduler, 0, Lengths(SAMPLED_PROMPT, SAMPLED_ANSWER), SAMPLES, beams=False)
    peak = 0

    def watch(plan: StepPlan) -> None:
        nonlocal peak
        peak = max(peak, len({page for seq in scheduler.running.values() for page in seq.table}))

    run(scheduler, watch)
    return peak


def main(args: argparse.Namespace) -> Result:
    rows: list[Row] = []
    notes: list[str] = []
    for name in MEANS:
        for shape in SHAPES:
            requests = draw_lengths(name, shape, args.requests)
            rows += _rows(name, f"gamma {shape}", requests)
            notes.append(_lengths_line(f"{name}, gamma {shape}", requests))
    if args.sharegpt_chats is not None and args.sharegpt_chats.is_file():
        requests = read_lengths(args.sharegpt_chats)
        rows += _rows("given chats", "as given", requests)
        notes.append(_lengths_line("Given chats", requests))
    else:
        notes.append("Chats were not measured: --sharegpt-chats is not given or not there.")
    return Result(rows, [*notes, *_notes()])


def _rows(name: str, spread: str, requests: list[Lengths]) -> list[Row]:
    rows = []
    for kind, served in (("samples", requests), ("beams", requests[:BEAM_REQUESTS])):
        row = {"lengths": name, "prompts": spread, "of one prompt": kind}
        paper = PAPER.get((name, kind), ("",) * len(WIDTHS))
        for width, theirs in zip(WIDTHS, paper, strict=True):
            row[f"{width} save"] = f"{saved_share(served, width, kind == 'beams'):.1%}"
            row[f"{width} in the paper"] = theirs
        rows.append(row)
    return rows


def _lengths_line(name: str, requests: list[Lengths]) -> str:
    inputs, outputs = (sum(part) / len(requests) for part in zip(*requests, strict=True))
    return f"{name}: {len(requests)} requests, on average {inputs:.1f} tokens in and {outputs:.1f} out."


def _notes() -> list[str]:
    least = PREFIX + AT_ONCE * OWN
    tails = SAMPLES * -(-(SAMPLED_ANSWER - 1) // BLOCK_SIZE)
    prompt = -(-SAMPLED_PROMPT // BLOCK_SIZE)
    notes = [
        "Every sample of a request has the request's length. The paper gives only the means of the lengths: prompts "
        "are drawn from gamma distributions of two shapes, of which 1 is exponential, answers from exponential ones.",
        "For ShareGPT the paper gives a range, which is taken to run from 2 to 6 samples or beams.",
        f"Beams serve the first {BEAM_REQUESTS} requests of a row. Their candidates are made up, so what beams save "
        "shows that sharing works, and not what a real model's beams have in common.",
    ]
    for kind, slot_pages in (("dense", 0), ("hybrid", HYBRID_SLOT_PAGES)):
        computed, peak = computed_prompt_tokens(slot_pages), peak_blocks(slot_pages)
        notes += [
            f"{AT_ONCE} requests at once on a prefix of {PREFIX} tokens, {OWN} of their own each, {kind}: "
            f"{computed:,} prompt tokens computed; the least possible is {least:,}.",
            f"{SAMPLES} samples of {SAMPLED_PROMPT:,} prompt tokens, {SAMPLED_ANSWER} answer tokens each, {kind}: "
            f"{peak} blocks at the peak; prompt and {SAMPLES} tails are {prompt} + {tails} = {prompt + tails}.",
        ]
    return notes
