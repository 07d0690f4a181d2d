"""Texts with prefix reuse equal texts without it, on dense and hybrid models, through evictions and branches."""

from __future__ import annotations

import random

import pytest

from support.checkpoints import make_checkpoint
from tenfold import LLM, SamplingParams

KINDS = ["llama", "qwen3-tied", "hybrid-2x-tied"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def conversation_rounds(rng: random.Random, texts: dict[int, list[int]]) -> list[list[int]]:
    """Prompts of one round: shared preambles, resumed, edited and branching turns."""
    preamble = [5 + i % 150 for i in range(70)]
    prompts = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        fresh = [rng.randrange(5, 150) for _ in range(rng.randint(1, 40))]
        if kind < 0.4 or not texts:
            prompts.append(preamble + fresh)
        elif kind < 0.7:
            prompts.append(rng.choice(list(texts.values())) + fresh)
        elif kind < 0.85:
            history = rng.choice(list(texts.values()))
            prompts.append(history[: rng.randint(1, len(history))] + fresh)
        else:
            prompts.append(list(rng.choice(list(texts.values()))))
    return [prompt[:300] for prompt in prompts]


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    return [[o.token_ids for o in result.outputs] for result in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("pages", [40, 400])
def test_cached_equals_uncached(folder, pages: int) -> None:
    page = LLM(folder, memory="8MiB", progress=False).stats()["page_bytes"]
    options = {"memory": pages * page, "max_batch_tokens": 64, "progress": False}
    plain = LLM(folder, prefix_caching=False, **options)
    cached = LLM(folder, **options)
    if cached.engine.max_context < 330:
        pytest.skip("this model's state leaves too little of so small an arena")
    cached.engine.runner.memory.data.fill_(0xFF)
    rng = random.Random(pages)
    texts: dict[int, list[int]] = {}
    for _ in range(12):
        prompts = conversation_rounds(rng, texts)
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]), seed=7, max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 3])
            )
            for _ in prompts
        ]
        expected = generate(plain, prompts, params)
        assert generate(cached, prompts, params) == expected
        for prompt, outputs in zip(prompts, expected, strict=True):
            texts[len(texts)] = prompt + outputs[0]
    stats = cached.stats()
    assert stats["prefix_tokens"]["hit"] > (300 if pages == 40 else 500)
    assert pages > 100 or stats["evictions"]["blocks"] + stats["evictions"]["checkpoints"] > 0


def test_the_second_sighting_of_a_preamble_hits(folder) -> None:
    """A mark where the preamble ends is enough: the second chat computes only what follows it."""
    llm = LLM(folder, memory="32MiB", progress=False)
    preamble = [5 + i % 150 for i in range(203)]
    engine = llm.engine
    engine.submit([*preamble, 7, 8, 9], SamplingParams(max_tokens=3), breakpoints=(len(preamble),))
    while engine.busy:
        engine.step()
    before = llm.stats()["prefix_tokens"]["hit"]
    llm.generate([[*preamble, 11, 12]], SamplingParams(max_tokens=3), use_tqdm=False)
    hit = llm.stats()["prefix_tokens"]["hit"] - before
    assert hit >= len(preamble) // 16 * 16
    if llm.engine.scheduler.spec.slot_pages:
        assert hit == len(preamble)


def test_requests_that_arrive_together_compute_their_prefix_once(folder) -> None:
    llm = LLM(folder, memory="64MiB", max_batch_tokens=2048, progress=False)
    prefix = [5 + i % 150 for i in range(160)]
    prompts = [[*prefix, 20 + i, 30 + i] for i in range(16)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    tokens = llm.stats()["prefix_tokens"]
    assert tokens["hit"] == 15 * 160


def test_tenants_do_not_share(folder) -> None:
    llm = LLM(folder, memory="32MiB", progress=False)
    for salt in ("one", "two"):
        llm.engine.submit([5] * 100, SamplingParams(max_tokens=2), cache_salt=salt)
        while llm.engine.busy:
            llm.engine.step()
    assert llm.stats()["prefix_tokens"]["hit"] == 0


def test_samples_share_the_prompt(folder) -> None:
    llm = LLM(folder, memory="64MiB", max_batch_tokens=2048, progress=False)
    engine, spec = llm.engine, llm.engine.scheduler.spec
    prompt = [5 + i % 150 for i in range(330)]
    engine.submit(prompt, SamplingParams(n=8, seed=1, max_tokens=12, ignore_eos=True))
    peak = 0
    engine.step()
    assert len(engine.scheduler.running) == 8
    assert llm.stats()["blocks"]["referenced"] == spec.blocks_for(330), "nothing is copied before anybody writes"
    while engine.busy:
        engine.step()
        peak = max(peak, llm.stats()["blocks"]["referenced"])
    assert peak <= 330 // 16 + 8 * spec.blocks_for(330 % 16 + 12)
    assert llm.stats()["tokens"]["prompt"] == 330
