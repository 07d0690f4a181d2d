"""What fewer bits cost in accuracy, and what they bring: perplexity of real text, decoding speed and memory.

The text is cut into windows, each of which the model sees alone, and every token of a window but the first is predicted
from those before it. All choices see the same windows, so that their ratio is far surer than either perplexity.
"""

from __future__ import annotations

import argparse
import dataclasses
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels import BLOCK, batch
from benchmarks.limits import seconds
from benchmarks.report import Result, Row
from tenfold import LLM, SamplingParams
from tenfold.models.hub import DEFAULT_MODEL, resolve
from tenfold.runtime.kernels import KEEP, QUANTISATIONS, native

BASE = "bfloat16"
CHARACTERS = 40_000
"""How much of Python's reference is read where no text is given."""
PROMPT, DECODED = 64, 128
"""Tokens of the sequence whose decoding is timed: those it begins with, and those that are timed."""
SOFTMAX_ROWS = 64
"""Positions whose logits are in float64 at once."""


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--accuracy-model", default=DEFAULT_MODEL, help="model (default %(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to predict (default: Python's own reference)")
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a window (default %(default)s)")
    parser.add_argument("--decode-rounds", type=int, default=3, metavar="N", help="timings (default %(default)s)")
    parser.add_argument(
        "--accuracy-threads",
        type=int,
        default=1,
        metavar="N",
        help="threads; one is timed by its CPU time, whatever else runs (default %(default)s)",
    )


@dataclasses.dataclass
class Measured:
    """One choice: what each predicted token costs in nats, float64 [n], tokens decoded per second, bytes of weights."""

    nats: np.ndarray
    speed: float
    nbytes: int


def reference_text() -> str:
    """The beginning of Python's language reference, as ``help()`` prints it."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]


def negative_log_likelihood(llm: LLM, tokens: list[int]) -> np.ndarray:
    """What each token but the first costs after those before it, in nats, float64 [len(tokens) - 1].

    The arena must be idle, and nothing in it is worth keeping.
    """
    runner: Any = llm.engine.runner
    blocks = np.arange(-(-len(tokens) // BLOCK), dtype=np.int32)[None]
    step = dataclasses.replace(batch([len(tokens)], [0], blocks), token_ids=torch.tensor(tokens))
    logits = runner.program.forward(step)[:-1]
    following = step.token_ids[1:, None]
    costs = []
    for rows, correct in zip(logits.split(SOFTMAX_ROWS), following.split(SOFTMAX_ROWS), strict=True):
        wide = rows.double()
        costs.append(wide.logsumexp(-1) - wide.gather(1, correct)[:, 0])
    return torch.cat(costs).numpy()


def decoding_speed(llm: LLM, prompt: list[int], rounds: int) -> float:
    """Tokens per second of one sequence, greedy, sampling and scheduling included; the best of some rounds."""
    engine, best = llm.engine, 0.0
    for _ in range(rounds):
        params = SamplingParams(temperature=0, max_tokens=DECODED + 1, ignore_eos=True)
        engine.submit(prompt, params)
        engine.step()  # the prompt, and the first token
        best = max(best, DECODED / seconds(lambda: [engine.step() for _ in range(DECODED)]))
        while engine.busy:
            engine.step()
    return best


@torch.inference_mode()
def measure(args: argparse.Namespace, quantize: str | None, text: str) -> Measured:
    """Load the model with a choice of ``quantize``, and measure it."""
    llm = LLM(
        args.accuracy_model,
        dtype=BASE,
        quantize=quantize,
        kernels="native",
        memory="256MiB",
        block_size=BLOCK,
        prefix_caching=False,
        threads=args.accuracy_threads,
        progress=False,
    )
    tokens = llm.tokenizer.encode(text)
    windows = [tokens[i : i + args.window] for i in range(0, max(1, len(tokens) - args.window + 1), args.window)]
    speed = decoding_speed(llm, tokens[:PROMPT], args.decode_rounds)
    runner: Any = llm.engine.runner
    nats = np.concatenate([negative_log_likelihood(llm, window) for window in windows])
    return Measured(nats, speed, runner.program.weight_bytes)


def row(name: str, found: Measured, base: Measured) -> Row:
    """A line of the table. The error of the ratio of perplexities is that of the mean of the tokens' differences."""
    more = found.nats - base.nats
    ratio, error = np.exp(more.mean()), more.std() / len(more) ** 0.5
    return {
        "weights": name,
        "perplexity": f"{np.exp(found.nats.mean()):.3f}",
        f"to {BASE}": "1" if found is base else f"{ratio:.4f} ± {error:.4f}",
        "tokens/s": f"{found.speed:.1f}",
        "speed": f"{found.speed / base.speed:.2f}",
        "MB": f"{found.nbytes / 1e6:.1f}",
        "memory": f"{found.nbytes / base.nbytes:.2f}",
    }


def main(args: argparse.Namespace) -> Result:
    if not native.available():
        return Result([], ["Not measured: the native kernels cannot be compiled here."])
    text = args.text.read_text(encoding="utf-8") if args.text else reference_text()
    source = (
        args.text.name if args.text else f"the reference of Python {sys.version_info.major}.{sys.version_info.minor}"
    )
    before = torch.get_num_threads()
    try:
        base = measure(args, None, text)
        rows = [row(BASE, base, base)]
        for quantize in (*QUANTISATIONS, KEEP):
            if quantize == KEEP and not resolve(args.accuracy_model).is_file():
                continue  # a folder of safetensors has nothing to keep
            rows.append(row(quantize, measure(args, quantize, text), base))
    finally:
        torch.set_num_threads(before)
    return Result(
        rows,
        [
            f"{args.accuracy_model}; {len(base.nats):,} tokens of {source}, in windows of {args.window}. Less "
            "perplexity is better, and ± is the standard error of the ratio.",
            f"One sequence, {DECODED} tokens after {PROMPT}, greedy, threads: {args.accuracy_threads}, best of "
            f"{args.decode_rounds}. MB are those of all weights, with the embedding's table in {BASE}.",
        ],
    )
