"""Plain completions through the real client."""

from __future__ import annotations

import openai
import pytest

from support.serving import MODEL

TOKENS = list(b"[[as ids]]")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("[[one]]", ["one"]),
        (["[[one]]", "[[second]]"], ["one", "second"]),
        (TOKENS, ["as ids"]),
        ([TOKENS, list(b"[[more]]")], ["as ids", "more"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_four_forms_of_a_prompt(client: openai.OpenAI, prompt, texts: list[str], stream: bool) -> None:
    made = client.completions.create(model=MODEL, prompt=prompt, n=2, stream=stream)
    if not stream:
        assert made.object == "text_completion" and made.id.startswith("cmpl-")
        choices = made.choices
        assert made.usage.prompt_tokens == sum(map(len, prompt if isinstance(prompt[0], list) else [prompt])) or (
            isinstance(prompt, str) or isinstance(prompt[0], str)
        )
        assert made.usage.completion_tokens == sum(2 * len(text) + 2 for text in texts)
    else:
        choices = [chunk.choices[0] for chunk in made]
    expected = [text for text in texts for _ in range(2)]
    found = [""] * len(expected)
    for choice in choices:
        found[choice.index] += choice.text
    assert found == expected, "sample j of prompt i has index i * n + j"
    ends = [choice for choice in choices if choice.finish_reason is not None]
    assert sorted(choice.index for choice in ends) == list(range(len(expected)))


def test_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model=MODEL, prompt="x").choices
    assert (choice.text, choice.finish_reason) == ("abcdefghijklmnop", "length")


def test_usage_of_a_stream(client: openai.OpenAI) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(model=MODEL, prompt=[TOKENS, TOKENS], n=2, **options)
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    assert last.usage.prompt_tokens == 2 * len(TOKENS), "a prompt counts once, however many samples"
    assert last.usage.completion_tokens == 4 * 7


def test_logprobs(client: openai.OpenAI) -> None:
    prompt = "[[aé-b]]"
    (choice,) = client.completions.create(model=MODEL, prompt=prompt, logprobs=2).choices
    logprobs = choice.logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "-", "b"]
    assert logprobs.text_offset == [0, 1, 1, 2, 3]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.top_logprobs[0] == {"a": -0.5, "\x00": -9999.0}
    (choice,) = client.completions.create(model=MODEL, prompt=prompt, logprobs=0).choices
    assert choice.logprobs.top_logprobs is None and len(choice.logprobs.token_logprobs) == 5
    streamed = client.completions.create(model=MODEL, prompt=prompt, logprobs=1, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [offset for part in parts for offset in part.text_offset] == [0, 1, 1, 2, 3]
