"""Beam search of the whole engine against transformers: texts and scores, on dense and hybrid models."""

from __future__ import annotations

import random

import pytest
import torch

from support.checkpoints import load_reference, make_checkpoint
from tenfold import LLM, SamplingParams
from tenfold.errors import RequestError

KINDS = ["llama", "qwen3-tied", "hybrid-2x-tied"]
EOS = 7


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    rng = random.Random(request.param)
    prompts = [[rng.randrange(8, 150) for _ in range(length)] for length in (1, 15, 16, 33)]
    return LLM(folder, memory="32MiB", progress=False), load_reference(folder), prompts


def expected(model, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], float]]:
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=params.max_tokens,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            eos_token_id=list(params.stop_token_ids),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    texts = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        text = row[len(prompt) :]
        ends = [i for i, token in enumerate(text) if token in params.stop_token_ids]
        texts.append((text[: ends[0] + 1] if ends else text, score))
    return texts


@pytest.mark.parametrize(
    ("width", "n", "length_penalty", "early_stopping"),
    [
        (2, 2, 1.0, True),
        (3, 1, 0.0, "never"),
        (4, 4, 1.0, False),
        (6, 3, 1.6, "never"),
        (4, 2, 0.6, True),
    ],
)
def test_texts_and_scores_equal_transformers(case, width, n, length_penalty, early_stopping) -> None:
    llm, model, prompts = case
    likely = stops(llm, prompts[2])
    for prompt in prompts:
        params = SamplingParams(
            use_beam_search=True,
            beam_width=width,
            n=n,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_tokens=20,
            ignore_eos=True,
            stop_token_ids=likely,
        )
        outputs = llm.generate([prompt], params, use_tqdm=False)[0].outputs
        want = expected(model, prompt, params)
        assert [output.token_ids for output in outputs] == [text for text, _ in want]
        assert [output.score for output in outputs] == pytest.approx([score for _, score in want], abs=1e-4)


def stops(llm: LLM, prompt: list[int]) -> list[int]:
    """Tokens that appear in likely texts, so that hypotheses do end."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    text = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids
    return sorted({text[5], text[9]})


def test_beams_share_and_give_everything_back(case) -> None:
    llm, _, prompts = case
    params = SamplingParams(use_beam_search=True, beam_width=4, max_tokens=24, ignore_eos=True)
    plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    together = llm.generate([prompts[3], prompts[2], prompts[3]], [params, plain, params], use_tqdm=False)
    first, third = together[0].outputs[0], together[2].outputs[0]
    assert first.token_ids == third.token_ids and first.score == pytest.approx(third.score, abs=1e-5)
    assert together[1].outputs == llm.generate([prompts[2]], plain, use_tqdm=False)[0].outputs
    assert llm.stats()["blocks"]["referenced"] == 0 and llm.stats()["state_slots"]["taken"] == 0
    assert not llm.engine._requests


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 500}, "beam_width"),
        ({"n": 5}, "n"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": ["x"]}, "stop"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(changes, param) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(use_beam_search=True, **changes)
    assert caught.value.param == param
