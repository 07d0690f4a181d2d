"""The default model on real text, against transformers in float32."""

from __future__ import annotations

import pydoc_data.topics

import pytest

from support.checkpoints import default_model_reference, most_likely
from tenfold import LLM, SamplingParams
from tenfold.models.hub import DEFAULT_MODEL, resolve

TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEFAULT_MODEL, dtype="float32", memory="256MiB", progress=False)


@pytest.fixture(scope="module")
def prompts(llm) -> list[list[int]]:
    """Twenty beginnings of articles of Python's own reference, 5 to 195 tokens."""
    articles = sorted(pydoc_data.topics.topics.items())[:60:3]
    return [llm.tokenizer.encode(text)[: 5 + 10 * i] for i, (_, text) in enumerate(articles)]


@pytest.fixture(scope="module")
def alone(llm, prompts) -> list[list[int]]:
    return [texts(llm, [prompt])[0] for prompt in prompts]


def texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_greedy_equals_transformers(prompts, alone) -> None:
    """By induction over positions: where every token is transformers' most likely one after the same text, the whole
    text is what it generates greedily."""
    model = default_model_reference(resolve(DEFAULT_MODEL))
    for prompt, text in zip(prompts, alone, strict=True):
        assert most_likely(model, prompt, text) == text


def test_greedy_in_one_batch(llm, prompts, alone) -> None:
    assert texts(llm, prompts) == alone


@pytest.mark.parametrize("budget", [16, 512])
def test_greedy_in_chunks(prompts, alone, budget: int) -> None:
    llm = LLM(DEFAULT_MODEL, dtype="float32", memory="256MiB", max_batch_tokens=budget, progress=False)
    assert texts(llm, prompts) == alone


def test_greedy_with_preemption(prompts, alone) -> None:
    llm = LLM(DEFAULT_MODEL, dtype="float32", memory="30MiB", progress=False)
    assert texts(llm, prompts) == alone
    assert llm.stats()["preemptions"] > 0
