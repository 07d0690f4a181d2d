"""Greedy tokens of the whole engine against transformers, however the work is cut up."""

from __future__ import annotations

import random

import pytest

from support.checkpoints import CONFIGS, greedy, load_reference, make_checkpoint
from tenfold import LLM, SamplingParams

TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def case(request, tmp_path_factory):
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    rng = random.Random(request.param)
    prompts = [[rng.randrange(3, 211) for _ in range(length)] for length in (1, 2, 15, 16, 17, 60, 130)]
    model = load_reference(folder)
    return folder, prompts, [greedy(model, prompt, TOKENS) for prompt in prompts]


def texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_alone(case) -> None:
    folder, prompts, expected = case
    llm = LLM(folder, memory="16MiB", progress=False)
    assert [texts(llm, [prompt])[0] for prompt in prompts] == expected


@pytest.mark.parametrize("budget", [1, 7, 16, 512])
@pytest.mark.parametrize("depth", [1, 3])
def test_together_in_chunks(case, budget: int, depth: int) -> None:
    folder, prompts, expected = case
    llm = LLM(folder, memory="16MiB", max_batch_tokens=budget, depth=depth, progress=False)
    assert texts(llm, prompts) == expected


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_other_block_sizes(case, block_size: int) -> None:
    folder, prompts, expected = case
    llm = LLM(folder, memory="16MiB", block_size=block_size, progress=False)
    assert texts(llm, prompts) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted(case, depth: int) -> None:
    folder, prompts, expected = case
    probe = LLM(folder, memory="1MiB", progress=False)
    pages = 14  # the longest needs 12 blocks: 130 prompt tokens and 47 more
    memory = pages * probe.stats()["page_bytes"]
    llm = LLM(folder, memory=memory, depth=depth, progress=False)
    poison(llm)
    assert texts(llm, prompts) == expected
    stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["blocks"]["referenced"] == 0


def poison(llm: LLM) -> None:
    """Fill the arena with NaN: whatever is read before it was written shows."""
    llm.engine.runner.memory.data.fill_(0xFF)
