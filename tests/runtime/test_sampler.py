"""Sampling against transformers' own processors, and against the seeds' promise."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from support.checkpoints import make_checkpoint
from tenfold import LLM, SamplingParams
from tenfold.core import Entry, StepPlan, Work
from tenfold.runtime.batch import Rows
from tenfold.runtime.sampler import RowSampling, draw, uniform

CPU = torch.device("cpu")
VOCABULARY = 800


def expected_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution after transformers' temperature, top-k, top-p and min-p warpers."""
    scores = theirs.TemperatureLogitsWarper(params.temperature)(None, logits[None].double())
    if params.top_k > 0:
        scores = theirs.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = theirs.TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0:
        scores = theirs.MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)[0]


FILTERS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 400, "top_p": 0.7},
    {"top_p": 0.2},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.5},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.95, "temperature": 1.5},
    {"min_p": 0.001, "temperature": 3.0},
    {"top_p": 1e-9},
]


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_distribution_of_transformers(filters: dict, spread: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(VOCABULARY) * spread
    params = SamplingParams(**filters)
    expected = expected_distribution(logits, params)
    count = 8_000
    seeds = [SamplingParams(**filters, seed=5)] * count
    tokens = draw(logits.expand(count, -1), seeds, list(range(count)))
    seen = torch.bincount(tokens, minlength=VOCABULARY).double()
    assert seen[expected == 0].sum() == 0, "a filtered token was drawn"
    bins = expected * count >= 5
    chi_square = ((seen - expected * count)[bins] ** 2 / (expected * count)[bins]).sum()
    freedom = int(bins.sum())
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5 + 10


def test_the_draw_is_uniform_and_depends_on_seed_and_position_only() -> None:
    values = uniform([7] * 100_000, list(range(100_000)))
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.005
    assert np.histogram(values, 20, (0, 1))[0].std() < 200
    assert uniform([3, 7, 3], [9, 0, 9]).tolist() == [uniform([3], [9])[0], values[0], uniform([3], [9])[0]]
    assert len(set(uniform(list(range(1000)), [5] * 1000).tolist())) == 1000


def test_rows_draw_the_same_in_any_company() -> None:
    torch.manual_seed(2)
    rng = random.Random(2)
    logits = (torch.randn(40, VOCABULARY) * 2).round()  # many ties
    params = [SamplingParams(**rng.choice(FILTERS), seed=i) for i in range(40)]
    together = draw(logits, params, list(range(40))).tolist()
    for i in range(40):
        others = rng.sample(range(40), 5)
        chosen = [*others, i]
        again = draw(logits[chosen], [params[j] for j in chosen], chosen)
        assert again[-1] == together[i]


def test_penalties_equal_transformers() -> None:
    torch.manual_seed(3)
    logits = torch.randn(50) * 3
    prompt, output = [1, 2, 3, 3, 9], [4, 4, 4, 9]
    params = SamplingParams(repetition_penalty=1.7)
    row = RowSampling(Entry(0, 0, 0, len(prompt), params, frozenset(), ()), 50, CPU)
    row.observe(torch.tensor(prompt[:2]), 0)
    row.observe(torch.tensor(prompt[2:] + output), 2)
    ours = logits.clone()
    row.adjust(ours, 9)
    want = theirs.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits[None].clone())[0]
    torch.testing.assert_close(ours, want)

    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: -100.0, 8: 2.0})
    row = RowSampling(Entry(0, 0, 0, len(prompt), params, frozenset(), ()), 50, CPU)
    row.observe(torch.tensor(prompt + output[:1]), 0)
    row.observe(torch.tensor(output[1:]), 6)
    ours = logits.clone()
    row.adjust(ours, 9)
    want = logits.clone()
    want[4] -= 0.5 + 3 * 0.25
    want[9] -= 0.5 + 0.25
    want[7] -= 100.0
    want[8] += 2.0
    torch.testing.assert_close(ours, want)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(make_checkpoint("llama", tmp_path_factory.mktemp("llama")), memory="8MiB", progress=False)


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14]]


def run(llm: LLM, prompts, params):
    return [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


def test_a_seed_gives_the_same_tokens_whatever_else_runs(llm) -> None:
    params = [
        SamplingParams(seed=i, max_tokens=30, ignore_eos=True, top_p=0.9, presence_penalty=0.3)
        for i in range(len(PROMPTS))
    ]
    together = [outputs[0].token_ids for outputs in run(llm, PROMPTS, params)]
    alone = [run(llm, [prompt], p)[0][0].token_ids for prompt, p in zip(PROMPTS, params, strict=True)]
    assert together == alone
    assert len({tuple(text) for text in together}) == len(PROMPTS)


def test_n_samples_differ_and_the_first_is_that_of_one(llm) -> None:
    one = run(llm, [PROMPTS[0]], SamplingParams(seed=1, max_tokens=20, ignore_eos=True))[0]
    many = run(llm, [PROMPTS[0]], SamplingParams(seed=1, max_tokens=20, ignore_eos=True, n=4))[0]
    assert [output.index for output in many] == [0, 1, 2, 3]
    assert many[0].token_ids == one[0].token_ids
    assert len({tuple(output.token_ids) for output in many}) == 4


def test_min_tokens_keeps_the_end_away(llm) -> None:
    greedy = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0][0].token_ids
    stop = greedy[3]
    first = greedy.index(stop)
    ended = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop]))[0][0]
    assert ended.token_ids == greedy[: first + 1] and ended.finish_reason == "stop"
    longer = run(llm, [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=12, min_tokens=8, stop_token_ids=[stop]))[
        0
    ][0]
    assert stop not in longer.token_ids[:8]


def test_logprobs_are_those_of_the_model(llm) -> None:
    params = SamplingParams(seed=3, temperature=1.5, max_tokens=6, logprobs=5, frequency_penalty=1.0, ignore_eos=True)
    output = run(llm, [PROMPTS[1]], params)[0][0]
    from support.checkpoints import load_reference

    with torch.inference_mode():
        logits = load_reference(llm.loaded.path)(torch.tensor([PROMPTS[1] + output.token_ids])).logits[0]
    want = logits.log_softmax(-1)
    for i, entry in enumerate(output.logprobs):
        assert entry.logprob == pytest.approx(float(want[i][output.token_ids[i]]), abs=1e-4)
        values, tokens = want[i].topk(5)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_latest_samples_are_used_where_a_plan_does_not_know_them() -> None:
    from tenfold.core import CacheSpec

    rows = Rows(CacheSpec(4, 10), 3, 16, CPU)
    rows.latest[:] = [70, 71, 72]
    decode = StepPlan(0, (Work(2, 0, 0, 5, 1, (), (), -1, True), Work(0, 1, 0, 0, 1, (3,), (1,), -1, True)))
    assert rows.apply(decode).token_ids.tolist() == [72, 3]
    mixed = StepPlan(1, (Work(1, 0, 0, 5, 3, (8, 9), (), -1, True), Work(0, 1, 0, 1, 1, (), (), -1, True)))
    assert rows.apply(mixed).token_ids.tolist() == [8, 9, 71, 70]
