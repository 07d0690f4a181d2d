"""One model, one pool of memory, ten sessions, served twice: with the maximum context reserved for each, and paged.

    python -m benchmarks.demo [--sessions N] [--prompt TOKENS] [--output TOKENS]

The model is a small random hybrid, made on the spot, in the proportions of a 27B hybrid on an 80 GB device: the pool is
1.44 times what one session of the longest context takes. Reservation is emulated by the same engine, which then admits
only as many sessions as fit when each holds memory for the longest context. All counts and times are what the run
measures.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tenfold import LLM, SamplingParams
from tenfold.core import ModelSpec
from tenfold.planner import Capacity, describe, draw, plan_capacity
from tenfold.planner.picture import LETTERS
from tenfold.units import format_bytes

NATIVE_CONTEXT = 4096
POOL_RATIO = 23_859 / (16_384 + 147)
"""Pages of the pool over those of one session of the native context, for the 27B hybrid on an 80 GB device."""
VOCABULARY = 4096
PICTURE_WIDTH, PICTURE_ROWS = 75, 6
SECONDS_BETWEEN_FRAMES = 0.1


@dataclass
class Run:
    """What one way of serving measured: seconds, the most sessions at once and the arena at that moment."""

    seconds: float
    first_token: float
    peak: int
    picture: str
    texts: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


def make_model(folder: Path) -> int:
    """Save a random hybrid of Gated DeltaNet and full attention layers; returns its number of parameters."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
    from transformers.utils import logging

    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        full_attention_interval=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=NATIVE_CONTEXT,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def planned(folder: Path, context: int) -> Capacity:
    """The pool in the proportions of the large model, and what fits in it."""
    model = ModelSpec.from_config(describe(str(folder)).config, element_bytes=4, name="a random hybrid")
    native = plan_capacity(model, 2**40, NATIVE_CONTEXT)
    pages = int(POOL_RATIO * native.session_pages)
    return plan_capacity(model, pages * native.cache.page_bytes, context)


class Serving:
    """One engine that serves all prompts, at most ``at_once`` of them in memory at a time, and is watched meanwhile.

    ``reserved`` blocks are drawn for each session, whether it fills them or not.
    """

    def __init__(self, folder: Path, capacity: Capacity, at_once: int, reserved: int = 0) -> None:
        options: dict[str, Any] = {"dtype": "float32", "prefix_caching": False, "progress": False}
        self.llm = LLM(folder, memory=capacity.pool_bytes, max_sequences=at_once, **options)
        self.engine = self.llm.engine
        self.reserved = reserved
        self.screen = Screen(sys.stdout.isatty())
        # Threads start and memory appears before the clock does.
        self.llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)

    def run(self, prompts: list[list[int]], output: int) -> Run:
        """Submit all prompts at once and step until the last has its answer."""
        engine, cache = self.engine, self.engine.scheduler.cache
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        started = time.perf_counter()
        texts: dict[int, list[int]] = {engine.submit(prompt, params)[0]: [] for prompt in prompts}
        letters = {session: LETTERS[place % len(LETTERS)] for place, session in enumerate(texts)}
        first: dict[int, float] = {}
        peak, fullest, picture = 0, 0, ""
        while engine.busy:
            for event in engine.step():
                texts[event.sequence].append(event.token)
                first.setdefault(event.sequence, time.perf_counter() - started)
            now = time.perf_counter() - started
            running, held = len(engine.scheduler.running), cache.spec.num_pages - cache.arena.free
            peak = max(peak, running)
            if held > fullest:
                fullest, picture = held, self._draw(letters)
            if self.screen.due():
                ended = sum(len(text) == output for text in texts.values())
                status = f"{running} at once, {ended} of {len(texts)} served, {now:.1f} s"
                self.screen.show(f"{self._draw(letters)}\n  {status}")
        seconds = time.perf_counter() - started
        self.screen.show("")
        return Run(seconds, sum(first.values()) / len(first), peak, picture, list(texts.values()))

    def _draw(self, letters: dict[int, str]) -> str:
        cache, colour = self.engine.scheduler.cache, sys.stdout.isatty()
        return indented(draw(cache, PICTURE_WIDTH, PICTURE_ROWS, colour, letters, self.reserved))


class Screen:
    """A region of the terminal that is drawn over and over; nothing at all where output is not a terminal."""

    def __init__(self, live: bool) -> None:
        self._live = live
        self._lines = 0
        self._latest = 0.0

    def due(self) -> bool:
        return self._live and time.perf_counter() - self._latest >= SECONDS_BETWEEN_FRAMES

    def show(self, text: str) -> None:
        """Replace what was shown before."""
        if not self._live:
            return
        self._latest = time.perf_counter()
        up = f"\x1b[{self._lines}F" if self._lines else ""
        print(f"{up}\x1b[J{text}", end="\n" if text else "", flush=True)
        self._lines = len(text.splitlines())


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def sessions(count: int) -> str:
    return f"{count} session" if count == 1 else f"{count} sessions"


def report(run: Run, legend: str) -> None:
    print(f"{run.picture}\n  {legend}\n")
    rate = run.tokens / run.seconds
    print(
        f"  {sessions(run.peak)} at once; {len(run.texts)} served in {run.seconds:.1f} s, {rate:.0f} tokens a second; "
        f"mean wait for a first token {run.first_token:.1f} s"
    )


def compare(folder: Path, args: argparse.Namespace) -> None:
    """Make the model, serve the sessions both ways, and say what came out."""
    parameters = make_model(folder)
    capacity = planned(folder, args.prompt + args.output)
    cache, model = capacity.cache, capacity.model
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(args.prompt)] for _ in range(args.sessions)]
    print(
        f"  model     a random hybrid: {len(model.recurrent)} Gated DeltaNet and {len(model.attention)} attention "
        f"layers, {parameters / 1e6:.0f}M parameters\n"
        f"  memory    {format_bytes(capacity.pool_bytes)}: {cache.num_pages} pages of {cache.block_size} tokens\n"
        f"  sessions  {args.sessions} of {capacity.context:,} tokens ({args.prompt} in, {args.output} out); "
        f"the model allows {NATIVE_CONTEXT:,}\n",
        flush=True,
    )
    fitting = capacity.reserved_sessions
    print(
        f"1. Reserved: each session holds {cache.pages_for(NATIVE_CONTEXT)} pages, as many as it could ever need, "
        f"so {fitting} fits\n   (the same engine, admitting {fitting} at a time)\n"
    )
    blocks = cache.blocks_for(NATIVE_CONTEXT)
    reserved = Serving(folder, capacity, fitting, blocks).run(prompts, args.output)
    report(reserved, "a: keys and values of session a   A: its state   ░ reserved, empty   · left over")
    print(
        f"\n2. Paged: each session holds the pages it fills, {capacity.session_pages} in the end, "
        f"so {capacity.paged_sessions} fit\n"
    )
    paged = Serving(folder, capacity, args.sessions).run(prompts, args.output)
    last = LETTERS[min(paged.peak, len(LETTERS)) - 1]
    report(paged, f"a-{last}: keys and values of a session   A-{last.upper()}: its state   · free")
    same = sum(one == other for one, other in zip(reserved.texts, paged.texts, strict=True))
    print(
        f"\n{paged.peak} sessions at once where reservation fits {reserved.peak}; all served in {paged.seconds:.1f} s "
        f"instead of {reserved.seconds:.1f} s, {reserved.seconds / paged.seconds:.1f} times as fast.\n"
        f"{same} of {args.sessions} texts are the same in both."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="demo", description="Ten sessions where reservation fits one, live.")
    parser.add_argument("--sessions", type=int, default=10, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--prompt", type=int, default=256, metavar="TOKENS", help="of each session, default %(default)s"
    )
    parser.add_argument(
        "--output", type=int, default=256, metavar="TOKENS", help="of each session, default %(default)s"
    )
    args = parser.parse_args(arguments)
    if args.sessions < 1 or args.prompt < 1 or args.output < 1 or args.prompt + args.output > NATIVE_CONTEXT:
        parser.error(f"sessions are at least 1, and have at least 1 token of each kind and {NATIVE_CONTEXT:,} in all")
    torch.set_num_threads(1)  # a model this small gains little from more, and then a busy neighbour costs it little
    print("The same model, memory and sessions, served twice.\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="tenfold-demo-") as temporary:
        compare(Path(temporary), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
