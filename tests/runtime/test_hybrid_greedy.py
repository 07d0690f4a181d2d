"""Greedy tokens of hybrid models through the whole engine against transformers, however the work is cut up.

What transformers generates is not generated again: if the most likely token after every prefix of a text is the text's
own next one, then the text is what greedy generation gives.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from support.checkpoints import HYBRIDS, load_reference, make_checkpoint, most_likely
from tenfold import LLM, SamplingParams
from tenfold.core import CacheSpec

TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
LENGTHS = [(1, 1), (2, 40), (41, 150), (250, 500), (500, 700)]
"""Least and most tokens of each prompt, shortest first."""


class Case(NamedTuple):
    folder: Path
    spec: CacheSpec
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=sorted(HYBRIDS))
def case(request, tmp_path_factory) -> Case:
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    rng = random.Random(request.param)
    prompts = [[rng.randrange(3, 211) for _ in range(rng.randint(*lengths))] for lengths in LENGTHS]
    llm = poisoned(folder)
    expected = [texts(llm, [prompt])[0] for prompt in prompts]
    model = load_reference(folder)
    for prompt, text in zip(prompts, expected, strict=True):
        assert text == most_likely(model, prompt, text)
        assert len(set(text)) > 20, "a text that repeats itself shows little"
    return Case(folder, llm.engine.scheduler.spec, prompts, expected)


def poisoned(folder: Path, memory: str | int = "64MiB", **options) -> LLM:
    """An engine whose arena is full of NaN: whatever is read before it was written shows."""
    llm = LLM(folder, memory=memory, progress=False, **options)
    llm.engine.runner.memory.data.fill_(0xFF)
    return llm


def texts(llm: LLM, prompts: list[list[int]], params=GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_empty(llm: LLM) -> None:
    stats = llm.stats()
    assert stats["blocks"]["referenced"] == 0 and stats["state_slots"]["taken"] == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_alone(case, depth: int) -> None:
    llm = poisoned(case.folder, depth=depth)
    for prompt, text in zip(case.prompts, case.expected, strict=True):
        assert texts(llm, [prompt]) == [text]
    assert_empty(llm)


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (7, 3), (16, 1), (64, 2), (4096, 1), (4096, 3)])
def test_together_in_chunks(case, budget: int, depth: int) -> None:
    llm = poisoned(case.folder, max_batch_tokens=budget, depth=depth)
    assert texts(llm, case.prompts) == case.expected
    assert_empty(llm)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_other_block_sizes(case, block_size: int) -> None:
    llm = poisoned(case.folder, block_size=block_size, max_batch_tokens=100)
    assert texts(llm, case.prompts) == case.expected


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_and_resumed(case, depth: int) -> None:
    """All prompts start together in an arena that cannot hold all texts."""
    pages = sum(case.spec.pages_for(len(prompt) + 1) for prompt in case.prompts) + len(case.prompts)
    llm = poisoned(case.folder, pages * case.spec.page_bytes, max_batch_tokens=4096, depth=depth)
    assert texts(llm, case.prompts) == case.expected
    assert llm.stats()["preemptions"] > 0
    assert_empty(llm)


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_that_move_under_a_running_sequence(case, depth: int) -> None:
    """The longest prompt ends first; in its place come several, whose slots reach into the blocks of the second."""
    order, counts = (4, 3, 0, 1, 2), (2, TOKENS, TOKENS, TOKENS, TOKENS)
    prompts = [case.prompts[i] for i in order]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    pages = case.spec.pages_for(len(prompts[0]) + 2) + case.spec.pages_for(len(prompts[1]) + TOKENS) + 2
    llm = poisoned(case.folder, pages * case.spec.page_bytes, max_batch_tokens=4096, depth=depth)
    expected = [case.expected[i][:count] for i, count in zip(order, counts, strict=True)]
    assert texts(llm, prompts, params) == expected
    assert llm.stats()["pages_moved"] > 0
    assert_empty(llm)


@pytest.mark.parametrize("poison", [False, True])
def test_one_after_the_other_in_the_same_slot(case, poison: bool) -> None:
    llm = poisoned(case.folder, prefix_caching=False)  # else a slot stays with the checkpoint of who had it
    runner, slots = llm.engine.runner, set()
    submit = runner.submit

    def record(plan) -> None:
        slots.update(work.slot for work in plan.work)
        submit(plan)

    runner.submit = record
    for i in (2, 0, 1, 2):
        assert texts(llm, [case.prompts[i]]) == [case.expected[i]]
        if poison:
            runner.memory.data.fill_(0xFF)
    assert slots == {0}


def test_bfloat16_is_as_close_as_transformers(case) -> None:
    prompt = case.prompts[2]
    llm = poisoned(case.folder, dtype="bfloat16", max_batch_tokens=50)
    memory = llm.engine.runner.memory
    assert {view.dtype for view in memory.states} == {torch.float32}
    assert {view.dtype for view in memory.tails + memory.keys} == {torch.bfloat16}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    ours = torch.tensor([entry.logprob for entry in output.logprobs])
    model = load_reference(case.folder)
    exact = logprobs(model, prompt, output.token_ids)
    theirs = logprobs(model.bfloat16(), prompt, output.token_ids)
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


def logprobs(model, prompt: list[int], text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(-1)[range(len(text)), text]
