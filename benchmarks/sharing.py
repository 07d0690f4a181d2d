"""Blocks that samples and beams of one prompt have in common, and prompts that are computed once for many requests.

The table follows the PagedAttention paper: blocks saved by sharing over the blocks that there would be without it, both
summed over all steps. The paper gives only the means of its lengths. What samples save also depends on how much the
answers vary, because the prompt is all that they share: with prompts of P and answers of A tokens on average, and
answers that vary by v (standard deviation over mean), n samples save about P / (P + A (1 + v^2) / 2) times (n - 1) / n.
So the variation is an assumption, made once for each set of lengths and never for one width:

- ShareGPT's answers vary by 0.8, as in recorded chats: 0.81 in 1,500 requests of the LMSYS chatbot arena (the trace of
  the VTC paper) and 0.77 in 19,366 conversations of Azure's trace of 2023.
- Alpaca's answers are taken to be exponential (1.0), between words and paragraphs. No record stands behind that.
- Prompts vary by 0.7, so that few have hardly a token. That counts for Alpaca, whose prompts are about one block long:
  only whole blocks stay shared.

Other rows say how far the result moves with other variations. Samples run on the real scheduler and its arena without a
model, which has no say in what they share. Beams are those of a real model that continues real text.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Result, Row
from tenfold.core import CacheSpec, Request, SamplingParams, Scheduler, StepOutcome, StepPlan

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
DRAWS = 100
"""Drawn lengths of which each request gets the mean."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Strides of this part of a list spread evenly over it, however many there are."""
BEAM_REQUESTS = {"Alpaca": 89, "ShareGPT": 13}
"""Requests that a model serves with beams: few, because that takes minutes. Of Fibonacci numbers, lengths pair best."""
HYBRID_SLOT_PAGES = 147
PREFIX, OWN, ANSWER = 512, 100, 32
SAMPLES, SAMPLED_PROMPT, SAMPLED_ANSWER = 8, 2000, 200


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


class Variation(NamedTuple):
    """Standard deviation over mean, of prompts and of answers."""

    prompt: float
    output: float


ASSUMED = {"Alpaca": Variation(0.7, 1.0), "ShareGPT": Variation(0.7, 0.8)}
OTHERS = {
    "Alpaca": (Variation(1.0, 1.0), Variation(0.7, 0.8)),
    "ShareGPT": (Variation(1.0, 0.8), Variation(0.7, 1.0)),
}
"""Variations that show how much depends on what is assumed."""


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--sharegpt-chats", type=Path, metavar="JSONL", help="chats with input_toks and output_toks")
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="requests (default %(default)s)")
    parser.add_argument(
        "--beam-model",
        default="smollm2-135m-instruct",
        metavar="NAME",
        help="dense model whose beams are measured (default %(default)s)",
    )


def draw_lengths(name: str, variation: Variation, requests: int) -> list[Lengths]:
    """Lengths around the paper's means, whose prompts say nothing about their answers.

    Both go in equal steps through their distributions, and no answers of similar lengths meet similar prompts. So even
    a few requests stand for the whole, where chance would move what they share by several percent.
    """
    rng = random.Random(name)
    prompts, outputs = (
        evenly(rng, mean, varies, requests) for mean, varies in zip(MEANS[name], variation, strict=True)
    )
    stride = next(step for step in range(round(GOLDEN * requests), requests + 2) if math.gcd(step, requests) == 1)
    return [bounded(prompts[number * stride % requests], outputs[number]) for number in range(requests)]


def evenly(rng: random.Random, mean: float, variation: float, count: int) -> list[int]:
    """A gamma distribution in ``count`` equally likely parts: the mean of each, in rising order."""
    shape = variation**-2
    drawn = sorted(rng.gammavariate(shape, mean / shape) for _ in range(DRAWS * count))
    return [round(sum(drawn[at : at + DRAWS]) / DRAWS) for at in range(0, DRAWS * count, DRAWS)]


def bounded(prompt: int, output: int) -> Lengths:
    prompt = min(max(1, prompt), LONGEST - 1)
    return Lengths(prompt, min(max(1, output), LONGEST - prompt))


def read_lengths(path: Path) -> list[Lengths]:
    with path.open(encoding="utf-8") as file:
        chats = [json.loads(line) for line in file]
    return [bounded(chat["input_toks"], chat["output_toks"]) for chat in chats]


def one_token_each(plan: StepPlan) -> StepOutcome:
    """What a model would return that always says the same."""
    samples = sum(work.sample for work in plan.work) + sum(entry.source >= 0 for entry in plan.entries)
    return StepOutcome(plan.step, [TOKEN] * samples)


def submit(scheduler: Scheduler, first: int, lengths: Lengths, width: int) -> None:
    params = SamplingParams(max_tokens=lengths.output)
    prompt = (first + TOKEN,) * lengths.prompt
    scheduler.submit(*(Request(first + i, prompt, lengths.output, params) for i in range(width)))


def saved_share(
    scheduler: Scheduler,
    submissions: list[Callable[[], object]],
    width: int,
    execute: Callable[[StepPlan], StepOutcome],
    *counts: Callable[[Scheduler], int],
) -> list[float]:
    """Serve requests of ``width`` sequences, and compare tables with what each of ``counts`` finds in every step.

    A request is submitted when there are rows for all of its sequences. The scheduler keeps rows for samples, but not
    for beams: in a longer queue, without prefix caching, the first beams of other searches would take theirs.
    """
    ahead = submissions[::-1]
    alone, found = 0, [0] * len(counts)
    while ahead or scheduler.live:
        while ahead and len(scheduler.live) + width <= scheduler.max_sequences:
            ahead.pop()()
        plan = scheduler.plan()
        assert plan is not None
        alone += sum(len(seq.table) for seq in scheduler.running.values())
        found = [before + count(scheduler) for before, count in zip(found, counts, strict=True)]
        scheduler.commit(execute(plan))
    return [1 - shared / alone for shared in found]


def pages_in_use(scheduler: Scheduler) -> int:
    return scheduler.spec.num_pages - scheduler.cache.arena.free


def fewest_pages(scheduler: Scheduler) -> int:
    """Blocks that differ, or follow others that do: no table of blocks can serve beams of these texts with fewer."""
    blocks = set()
    for seq in scheduler.running.values():
        text = seq.tokens[: seq.issued].tobytes()
        size = BLOCK_SIZE * seq.tokens.itemsize
        blocks.update((id(seq.search), text[: begin + size]) for begin in range(0, len(text), size))
    return len(blocks)


def saved_by_samples(requests: list[Lengths], width: int) -> float:
    """Serve the requests, ``AT_ONCE`` of them at a time, on a scheduler without a model."""
    longest = CacheSpec(BLOCK_SIZE, 1).blocks_for(LONGEST)
    spec = CacheSpec(BLOCK_SIZE, AT_ONCE * width * longest)
    scheduler = Scheduler(spec, AT_ONCE * width * LONGEST, AT_ONCE * width, prefix_caching=False)
    submissions: list[Callable[[], object]] = [
        partial(submit, scheduler, number * width, lengths, width) for number, lengths in enumerate(requests)
    ]
    return saved_share(scheduler, submissions, width, one_token_each, pages_in_use)[0]


def load_beam_model(name: str) -> Any:
    """A model with room for all requests at once, whose prompts are computed in one step."""
    from tenfold import LLM

    return LLM(
        name,
        memory="2GiB",
        block_size=BLOCK_SIZE,
        max_batch_tokens=4 * LONGEST,
        max_sequences=max(BEAM_REQUESTS.values()) * max(WIDTHS),
        prefix_caching=False,
        progress=False,
    )


def pieces_of_text(llm: Any, requests: list[Lengths]) -> list[list[int]]:
    """A prompt for each request: tokens from somewhere in Python's manual, far from those of the others."""
    from pydoc_data.topics import topics

    tokens = llm.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    apart = len(tokens) // len(requests)
    return [tokens[at * apart : at * apart + lengths.prompt] for at, lengths in enumerate(requests)]


def saved_by_beams(llm: Any, requests: list[Lengths], width: int) -> list[float]:
    """Serve the requests with the model's own beams, which all go on to the request's length.

    Returns what they save, and the most that they could.
    """
    engine = llm.engine
    submissions: list[Callable[[], object]] = []
    for prompt, lengths in zip(pieces_of_text(llm, requests), requests, strict=True):
        params = SamplingParams(use_beam_search=True, beam_width=width, max_tokens=lengths.output, ignore_eos=True)
        submissions.append(partial(engine.submit, prompt, params))

    def execute(plan: StepPlan) -> StepOutcome:
        engine.runner.submit(plan)
        outcome: StepOutcome = engine.runner.collect()
        return outcome

    return saved_share(engine.scheduler, submissions, width, execute, pages_in_use, fewest_pages)


def run(scheduler: Scheduler, watch: Callable[[StepPlan], None]) -> None:
    while scheduler.live:
        plan = scheduler.plan()
        assert plan is not None
        watch(plan)
        scheduler.commit(one_token_each(plan))


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
    submit(scheduler, 0, Lengths(SAMPLED_PROMPT, SAMPLED_ANSWER), SAMPLES)
    peak = 0

    def watch(plan: StepPlan) -> None:
        nonlocal peak
        peak = max(peak, len({page for seq in scheduler.running.values() for page in seq.table}))

    run(scheduler, watch)
    return peak


def main(args: argparse.Namespace) -> Result:
    rows: list[Row] = []
    notes: list[str] = []
    llm = load_beam_model(args.beam_model)
    for name, assumed in ASSUMED.items():
        requests = draw_lengths(name, assumed, args.requests)
        few = draw_lengths(name, assumed, BEAM_REQUESTS[name])
        rows.append(_samples(name, assumed, requests))
        saved, possible = zip(*(saved_by_beams(llm, few, width) for width in WIDTHS), strict=True)
        rows += [_row(name, assumed, "beams", saved), _row(name, assumed, "beams, the most possible", possible)]
        rows += [_samples(name, other, draw_lengths(name, other, args.requests)) for other in OTHERS[name]]
        notes += [_lengths_line(f"{name}, samples", requests), _lengths_line(f"{name}, beams", few)]
    if args.sharegpt_chats is not None and args.sharegpt_chats.is_file():
        requests = read_lengths(args.sharegpt_chats)
        rows.append(_samples("given chats", None, requests))
        notes.append(_lengths_line("Given chats", requests))
    else:
        notes.append("Chats were not measured: --sharegpt-chats is not given or not there.")
    return Result(rows, [*_notes(args.beam_model), *notes, *_prefix_notes()])


def _samples(name: str, variation: Variation | None, requests: list[Lengths]) -> Row:
    return _row(name, variation, "samples", [saved_by_samples(requests, width) for width in WIDTHS])


def _row(name: str, variation: Variation | None, kind: str, saved: Sequence[float]) -> Row:
    prompts, answers = variation or ("as given", "as given")
    row = {"lengths": name, "prompts vary": str(prompts), "answers vary": str(answers), "of one prompt": kind}
    for width, ours, theirs in zip(WIDTHS, saved, PAPER.get((name, kind), ("",) * len(WIDTHS)), strict=True):
        row[f"{width} save"] = f"{ours:.1%}"
        row[f"{width} in the paper"] = theirs
    print(*row.values(), sep=", ", flush=True)
    return row


def _lengths_line(name: str, requests: list[Lengths]) -> str:
    inputs, outputs = (sum(part) / len(requests) for part in zip(*requests, strict=True))
    return f"{name}: {len(requests)} requests, on average {inputs:.1f} tokens in and {outputs:.1f} out."


def _notes(beam_model: str) -> list[str]:
    return [
        "The paper gives only the means of the lengths. How much they vary (standard deviation over mean, of gamma "
        "distributions, where 1.0 is exponential) is assumed here, and samples save more where answers vary less.",
        "The first row of samples of each set has what is assumed. ShareGPT's answers vary by 0.8 because those of "
        "recorded chats do: 0.81 in the LMSYS arena trace, 0.77 in Azure's conversations. No such record stands "
        "behind Alpaca's 1.0, nor behind the 0.7 of the prompts. Other rows show what other variations would give.",
        "Every sample and beam of a request has the request's length. For ShareGPT the paper gives a range, which is "
        "taken to run from 2 to 6 samples or beams.",
        f"Beams are those of {beam_model}, which continues pieces of Python's manual and does not end early. "
        "The paper's are those of OPT-13B on the prompts of the sets: model and texts differ, and with them what beams "
        "have in common. With these beams, nothing that shares blocks could save more than the most possible: what is "
        "left when no block is there twice. These are few requests: other passages of the manual moved beams by up to "
        "eight points.",
    ]


def _prefix_notes() -> list[str]:
    least = PREFIX + AT_ONCE * OWN
    tails = SAMPLES * -(-(SAMPLED_ANSWER - 1) // BLOCK_SIZE)
    prompt = -(-SAMPLED_PROMPT // BLOCK_SIZE)
    notes = []
    for kind, slot_pages in (("dense", 0), ("hybrid", HYBRID_SLOT_PAGES)):
        computed, peak = computed_prompt_tokens(slot_pages), peak_blocks(slot_pages)
        notes += [
            f"{AT_ONCE} requests at once on a prefix of {PREFIX} tokens, {OWN} of their own each, {kind}: "
            f"{computed:,} prompt tokens computed; the least possible is {least:,}.",
            f"{SAMPLES} samples of {SAMPLED_PROMPT:,} prompt tokens, {SAMPLED_ANSWER} answer tokens each, {kind}: "
            f"{peak} blocks at the peak; prompt and {SAMPLES} tails are {prompt} + {tails} = {prompt + tails}.",
        ]
    return notes
