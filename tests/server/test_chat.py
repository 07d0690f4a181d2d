"""Chat completions through the real client."""

from __future__ import annotations

import json
import time

import httpx
import openai
import pytest

from support.serving import MODEL


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say [[{text}]]"}]


ENDLESS = [{"role": "user", "content": "go on"}]


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say("Hello wörld 🌍"))
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello wörld 🌍")
    prompt = "user: say [[Hello wörld 🌍]]\nassistant: "
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt.encode())
    assert answer.usage.completion_tokens == len("Hello wörld 🌍".encode()) + 1, "the token that ended it counts"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=say("grüße 🌍!"), stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant" and choices[0].delta.content == ""
    assert all(choice.delta.role is None for choice in choices[1:])
    assert "".join(choice.delta.content or "" for choice in choices) == "grüße 🌍!"
    assert all(choice.finish_reason is None for choice in choices[:-1])
    assert choices[-1].finish_reason == "stop" and choices[-1].delta.content is None
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_on_the_wire(post) -> None:
    body = {"model": MODEL, "messages": say("hi"), "stream": True, "stream_options": {"include_usage": True}}
    response = post("/v1/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_the_bound_has_two_names(client: openai.OpenAI) -> None:
    for bound in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = client.chat.completions.create(model=MODEL, messages=ENDLESS, **bound)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abcde", "length")
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.chat.completions.create(model=MODEL, messages=ENDLESS, max_tokens=5, max_completion_tokens=5)


def test_without_a_bound_the_context_is(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ENDLESS)
    assert answer.usage is not None and answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say("same"), n=3, seed=7)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(i, "same") for i in range(3)]
    assert answer.usage is not None and answer.usage.completion_tokens == 15
    texts = [""] * 3
    for chunk in client.chat.completions.create(model=MODEL, messages=say("same"), n=3, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
    assert texts == ["same"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, stream: bool) -> None:
    def text(**options) -> tuple[str, str | None]:
        made = client.chat.completions.create(model=MODEL, messages=ENDLESS, stream=stream, **options)
        if not stream:
            return made.choices[0].message.content, made.choices[0].finish_reason
        choices = [chunk.choices[0] for chunk in made]
        return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason

    assert text(stop="hij") == ("abcdefg", "stop")
    assert text(stop=["xyz", "kl", "lm"]) == ("abcdefghij", "stop")
    assert text(stop="hij", extra_body={"include_stop_str_in_output": True}) == ("abcdefghij", "stop")
    assert text(stop="hix", max_tokens=8) == ("abcdefgh", "length"), "what only began like a stop string comes out"
    assert text(stop="hij", extra_body={"min_tokens": 20}, max_tokens=60)[0].endswith("zabcdefg")
    assert text(extra_body={"stop_token_ids": [ord("e")]}) == ("abcd", "stop")


def test_parameters_of_this_server(client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "skip_special_tokens": False}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=say("ab"),
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"65": 5},
        seed=3,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        tool_choice="none",
        response_format={"type": "text"},
        extra_body=extra,
    )
    assert answer.choices[0].message.content == "ab<end><end>", "ignored ends are tokens like others"


def test_null_is_the_default(post) -> None:
    body = {"model": MODEL, "messages": say("x"), "tools": None, "n": None, "stop": None, "seed": None, "stream": None}
    assert post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "x"


def test_messages(client: openai.OpenAI, post) -> None:
    first = client.chat.completions.create(model=MODEL, messages=say("one"))
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "say "}, {"type": "text", "text": "[[one]]"}]},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "and [[two]]", "name": "me"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == "two"
    tokens = post("/v1/tokenize", {"messages": messages}).json()["tokens"]
    text = post("/v1/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "system: be brief\nuser: say [[one]]\nassistant: one\nuser: and [[two]]\nassistant: "


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say("hé"), logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[ord("h")], [0xC3], [0xA9]], "bytes, where a token is half a letter"
    assert content[0].token == "h" and content[0].logprob == -0.5
    assert [other.logprob for other in content[0].top_logprobs] == [-0.5, -9999.0], "no infinity in JSON"
    bare = client.chat.completions.create(model=MODEL, messages=say("hé"), logprobs=True)
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_stay_with_their_text(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": say("aé bcd stop"), "logprobs": True, "stop": ["st", "cx"]}
    whole = client.chat.completions.create(**options).choices[0]
    assert bytes(byte for entry in whole.logprobs.content for byte in entry.bytes).decode() == whole.message.content
    data, text = b"", ""
    for chunk in client.chat.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        data += bytes(byte for entry in (choice.logprobs.content if choice.logprobs else ()) for byte in entry.bytes)
        text += choice.delta.content or ""
        assert data.decode() == text, "a token comes with the chunk that shows its text"
    assert text == whole.message.content == "aé bcd "


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "tenfold")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_tokenize_and_back(live, post) -> None:
    made = post("/v1/tokenize", {"model": MODEL, "prompt": "hé"}).json()
    assert made == {"count": 4, "max_model_len": 2048, "tokens": [257, *"hé".encode()]}
    assert post("/v1/tokenize", {"prompt": "h", "add_special_tokens": False}).json()["tokens"] == [ord("h")]
    assert post("/v1/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": "<start>hé"}
    assert httpx.get(live.url + "/health").json() == {"status": "ok"}
