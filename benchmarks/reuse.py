"""Prefix reuse with real models on this machine: turns of a chat, many requests on one prefix, several samples.

The dense model is the default one; the hybrid is random (12 DeltaNet and 4 attention layers). Times are medians or
whole runs of this process, reuse on against reuse off in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Result, Row

VOCABULARY = 49152
TURNS, TURN_TOKENS, ANSWER_TOKENS = 12, 60, 240
SHARED, PROMPTS = 369, 200


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--reuse-model", default="smollm2-135m-instruct", help="dense model (default %(default)s)")


def make_hybrid(folder: Path) -> Path:
    """A random checkpoint of the Qwen3.5 text architecture, whose greedy text is not one repeated token."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        full_attention_interval=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1234)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.normal_(0, 0.05)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def main(args: argparse.Namespace) -> Result:
    rows: list[Row] = []
    notes = [
        f"turns: {TURNS}, each of {TURN_TOKENS} new tokens and {ANSWER_TOKENS} answered; time to the first token.",
        f"shared prompts: {PROMPTS} of {SHARED + 1} tokens of which {SHARED} are shared, one output token each. "
        "A public report has 10.0x on a dense and 1.008x on a hybrid model.",
        "together: 32 requests at once on one 512-token prefix; prompt tokens computed, of the least.",
        "samples: n = 8 of 2,000 prompt tokens; peak blocks, of the least; time to first token over that of n = 1.",
    ]
    with tempfile.TemporaryDirectory(prefix="tenfold-reuse-") as folder:
        hybrid = make_hybrid(Path(folder))
        for kind, model in (("dense", args.reuse_model), ("hybrid", hybrid)):
            rows += measure(kind, model)
    return Result(rows, notes)


def measure(kind: str, model: str | Path) -> list[Row]:
    from tenfold import LLM

    def load(**options: Any) -> LLM:
        llm = LLM(model, memory="2GiB", progress=False, **options)
        run(llm, [tokens(0, 40)], 4)  # the first step of a process pays for what later ones find ready
        return llm

    rows = []
    for what, measured in (
        ("together, computed", lambda: together(load(max_batch_tokens=1024))),
        ("turn k / turn 2", lambda: turns(load())),
        ("samples, peak blocks; first token", lambda: samples(load())),
        ("shared prompts, speed-up", lambda: shared_prompts(load(), load(prefix_caching=False))),
    ):
        rows.append({"model": kind, "what": what, "measured": measured()})
        print(*rows[-1].values(), sep=": ", flush=True)
    return rows


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, VOCABULARY - 100) for _ in range(count)]


def run(llm: Any, prompts: list[list[int]], output: int, **params: Any) -> list[list[int]]:
    from tenfold import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, **params)
    return [result.outputs[0].token_ids for result in llm.generate(prompts, wanted, use_tqdm=False)]


def first_token(llm: Any, prompt: list[int], **params: Any) -> float:
    """Seconds from submission to the first token of ``prompt``; what follows is dropped."""
    from tenfold import SamplingParams

    started = time.perf_counter()
    ids = llm.engine.submit(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **params))
    while not llm.engine.step():
        pass
    seconds = time.perf_counter() - started
    for sequence in ids:
        llm.engine.finish(sequence)
    return seconds


def turns(llm: Any) -> str:
    """Each turn is what a chat sends: the history, the answer, and something new."""
    history: list[int] = []
    seconds = []
    for turn in range(TURNS):
        history += tokens(turn, TURN_TOKENS)
        started = time.perf_counter()
        history += run(llm, [history], 1)[0]
        seconds.append(time.perf_counter() - started)
        history += run(llm, [history], ANSWER_TOKENS)[0]
    ratios = [later / seconds[1] for later in seconds[2:]]
    return (
        f"median {statistics.median(ratios):.2f}, last {ratios[-1]:.2f} at {len(history):,} tokens "
        f"(turn 2: {1e3 * seconds[1]:.0f} ms)"
    )


def shared_prompts(cached: Any, plain: Any) -> str:
    shared = tokens(7, SHARED)
    prompts = [[*shared, 1000 + i] for i in range(PROMPTS)]
    seconds = {}
    for name, llm in (("plain", plain), ("cached", cached)):
        started = time.perf_counter()
        run(llm, prompts, 1)
        seconds[name] = time.perf_counter() - started
    return f"{seconds['plain'] / seconds['cached']:.1f}x ({seconds['plain']:.1f} s to {seconds['cached']:.2f} s)"


def together(llm: Any) -> str:
    prefix = tokens(8, 512)
    prompts = [[*prefix, *tokens(100 + i, 8 + i % 25)] for i in range(32)]
    before = llm.stats()["prefix_tokens"]["hit"]
    run(llm, prompts, 8)
    total = sum(map(len, prompts))
    computed = total - (llm.stats()["prefix_tokens"]["hit"] - before)
    return f"{computed:,} of {total - 31 * 512:,} (prompts of {total:,} in all)"


def samples(llm: Any) -> str:
    from tenfold import SamplingParams

    engine, prompt, output = llm.engine, tokens(9, 2000), 100
    one = statistics.median(first_token(llm, tokens(200 + i, 2000)) for i in range(3))
    eight = statistics.median(first_token(llm, tokens(300 + i, 2000), n=8) for i in range(3))
    engine.submit(prompt, SamplingParams(n=8, seed=1, max_tokens=output, ignore_eos=True))
    peak = 0
    while engine.busy:
        engine.step()
        peak = max(peak, llm.stats()["blocks"]["referenced"])
    size = engine.scheduler.spec.block_size
    full = len(prompt) // size
    least = full + 8 * -(-(len(prompt) + output - 1 - full * size) // size)
    return f"{peak} of {least}; {eight / one:.2f}x ({1e3 * eight:.0f} ms)"
