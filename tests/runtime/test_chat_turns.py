"""A long chat computes each turn's new tokens and next to nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from support.checkpoints import make_checkpoint
from tenfold import LLM, SamplingParams
from tenfold.engine.chat import render_chat
from tenfold.models.hub import DEFAULT_MODEL, resolve
from tenfold.models.tokenizer import load_tokenizer

TURNS = 12
TWO_BLOCKS = 32
SPECIAL = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"]
WORDS = [*SPECIAL, "\n", "system", "user", "assistant", "?", *(f"w{i}" for i in range(200))]
CHATML = """{{ '<|im_start|>system\n' }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\
{% else %}{{ 'w0 w1 w2' }}{% endif %}{{ '<|im_end|>\n' }}{% for message in messages %}\
{% if message['role'] != 'system' %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}\
{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
REASONING = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{{ message['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"""
NO_SPECIAL = dict.fromkeys(range(len(SPECIAL) + 1), -100.0)
"""Keeps the random model from writing what the tokenizer would not give back as the same tokens."""


def add_tokenizer(folder: Path, template: str) -> None:
    """A token is a word, and text is words with single spaces between them."""
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, "?"))
    tokenizer.pre_tokenizer = Split(Regex(" "), "removed")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=[*SPECIAL, "\n"]
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)


def make(folder: Path, kind: str, template: str) -> LLM:
    make_checkpoint(kind, folder)
    add_tokenizer(folder, template)
    return LLM(folder, memory="64MiB", progress=False)


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(200)}" for _ in range(count))


def computed(llm: LLM) -> int:
    return sum(count for outcome, count in llm.stats()["prefix_tokens"].items() if outcome != "hit")


@pytest.mark.parametrize("kind", ["qwen3", "hybrid-2x-tied", "hybrid-3x"])
def test_a_turn_computes_what_is_new(kind: str, tmp_path: Path) -> None:
    llm, rng = make(tmp_path, kind, CHATML), random.Random(1)
    messages = [{"role": "system", "content": words(rng, 40)}]
    known = 0  # tokens of the conversation so far
    for turn in range(TURNS):
        messages.append({"role": "user", "content": words(rng, rng.randint(1, 40))})
        before = computed(llm)
        params = SamplingParams(seed=turn, max_tokens=rng.randint(1, 20), logit_bias=NO_SPECIAL)
        (result,) = llm.chat(messages, params, use_tqdm=False)
        new = len(result.prompt_token_ids) - known
        assert 0 < new < 80 and computed(llm) - before <= new + TWO_BLOCKS, f"turn {turn}"
        messages.append({"role": "assistant", "content": result.outputs[0].text})
        assert llm.tokenizer.encode(result.outputs[0].text) == result.outputs[0].token_ids
        known = len(result.prompt_token_ids) + len(result.outputs[0].token_ids)
    assert llm.stats()["prefix_tokens"]["hit"] > 8 * known / 2


@pytest.mark.parametrize("kind", ["qwen3", "hybrid-2x-tied"])
def test_a_turn_after_reasoning_goes_on_from_the_users_message(kind: str, tmp_path: Path) -> None:
    """What the assistant thought is not in the next prompt: its answer is computed again, and nothing before it."""
    llm, rng = make(tmp_path, kind, REASONING), random.Random(2)
    messages, shared = [], 0
    for turn in range(TURNS):
        messages.append({"role": "user", "content": words(rng, 30)})
        before = computed(llm)
        (result,) = llm.chat(messages, SamplingParams(seed=turn, max_tokens=1, logit_bias=NO_SPECIAL), use_tqdm=False)
        new = len(result.prompt_token_ids) - shared
        assert 0 < new < 90 and computed(llm) - before <= new + TWO_BLOCKS, f"turn {turn}"
        shared = render_chat(llm.tokenizer, messages).breakpoints[-1]
        messages.append({"role": "assistant", "content": f"{words(rng, 20)}</think>{words(rng, 10)}"})


def test_asking_again_and_another_chat(tmp_path: Path) -> None:
    llm, rng = make(tmp_path, "hybrid-3x", CHATML), random.Random(3)
    system = {"role": "system", "content": words(rng, 50)}
    params = SamplingParams(seed=1, max_tokens=8, logit_bias=NO_SPECIAL)
    first = [system, {"role": "user", "content": words(rng, 60)}]
    llm.chat(first, params, use_tqdm=False)
    before = computed(llm)
    llm.chat(first, params, use_tqdm=False)
    assert computed(llm) - before == 3, "only what follows the user's message"
    before = computed(llm)
    second = [system, {"role": "user", "content": words(rng, 60)}]
    llm.chat(second, params, use_tqdm=False)
    prompt = render_chat(llm.tokenizer, second)
    assert computed(llm) - before == len(prompt.tokens) - prompt.breakpoints[0] < 70, "all but the preamble"


def test_best_of(tmp_path: Path) -> None:
    llm = make(tmp_path, "qwen3", CHATML)
    many = SamplingParams(seed=5, max_tokens=12, n=6, logprobs=0)
    (all_of_them,) = llm.generate([[20, 21, 22]], many, use_tqdm=False)
    (chosen,) = llm.generate([[20, 21, 22]], SamplingParams(seed=5, max_tokens=12, n=2, best_of=6), use_tqdm=False)

    def likelihood(output) -> float:
        return sum(each.logprob for each in output.logprobs) / len(output.token_ids)

    ranked = sorted(all_of_them.outputs, key=likelihood, reverse=True)
    assert [output.token_ids for output in chosen.outputs] == [output.token_ids for output in ranked[:2]]
    assert [(output.index, output.logprobs) for output in chosen.outputs] == [(0, None), (1, None)]


def test_breakpoints_of_the_default_model() -> None:
    """Looking only at the ends of texts finds what comparing all their tokens does."""
    tokenizer, rng = load_tokenizer(resolve(DEFAULT_MODEL)), random.Random(4)
    text = (Path(__file__).parents[2] / "README.md").read_text() + "  naïve 東京 🙂\n\n\n    indented\t\t\n"

    def tokens(conversation: list[dict[str, str]]) -> list[int]:
        return tokenizer.encode(tokenizer.apply_chat_template(conversation, tokenize=False))

    for _ in range(40):
        messages = []
        for place in range(rng.randint(1, 9)):
            start = rng.randrange(len(text))
            messages.append(
                {"role": ("user", "assistant")[place % 2], "content": text[start : start + rng.randrange(2500)]}
            )
        prompt = render_chat(tokenizer, messages)
        end = max(place for place, message in enumerate(messages) if message["role"] == "user") + 1
        shorter = tokens(messages[:end])
        shared = next(
            (i for i, pair in enumerate(zip(shorter, prompt.tokens, strict=False)) if pair[0] != pair[1]), len(shorter)
        )
        assert shared in prompt.breakpoints and prompt.tokens[:shared] == shorter[:shared]
