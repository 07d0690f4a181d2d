"""Everything a client can get wrong is a 4xx that says what to change, and the server goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from support.byte_tokenizer import ByteTokenizer
from support.serving import MODEL, Live, serving
from tenfold.server import ServerSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "say [[x]]"}]


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "Traceback" not in response.text
    return error


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"functions": [{}]}, "functions"),
        (CHAT, {"parallel_tool_calls": True}, "parallel_tool_calls"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"audio": {}}, "audio"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"prediction": {}}, "prediction"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"service_tier": "flex"}, "service_tier"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"store": 0}, "store"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 3, "stream": True}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of"),
        (COMPLETIONS, {"best_of": 129}, "best_of"),
        (CHAT, {"best_of": 2}, "best_of"),
        (CHAT, {"cache_salt": 7}, "cache_salt"),
        (COMPLETIONS, {"messages": []}, "messages"),
        (CHAT, {"prompt": "x"}, "prompt"),
        (CHAT, {"no_such_thing": None}, "no_such_thing"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"x": True}}, "stream_options.x"),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        (CHAT, {"model": None}, "model"),
        (CHAT, {"model": 7}, "model"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["hello"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        (CHAT, user(7), "messages[0].content"),
        (CHAT, user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
        (CHAT, user([{"type": "input_audio"}]), "messages[0].content[0]"),
        (CHAT, user([{"type": "file"}]), "messages[0].content[0]"),
        (CHAT, user([{"type": "text"}]), "messages[0].content[0].text"),
        (CHAT, user(["x"]), "messages[0].content[0]"),
        (CHAT, user([{"type": "text", "text": "x", "size": 1}]), "messages[0].content[0].size"),
        (
            CHAT,
            user([{"type": "text", "text": "x", "cache_control": {"type": "lasting"}}]),
            "messages[0].content[0].cache_control.type",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
            "messages[0].cache_control.ttl",
        ),
        (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": True}, "temperature"),
        (CHAT, {"temperature": 10**400}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"min_p": 2}, "min_p"),
        (CHAT, {"top_k": -2}, "top_k"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 1000}, "n"),
        (CHAT, {"n": 1.5}, "n"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens"),
        (CHAT, {"max_tokens": "5"}, "max_tokens"),
        (CHAT, {"min_tokens": 9, "max_completion_tokens": 3}, "min_tokens"),
        (CHAT, {"presence_penalty": 3}, "presence_penalty"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"seed": 2**70}, "seed"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"stop": ["a"] * 17}, "stop"),
        (CHAT, {"stop": [7]}, "stop[0]"),
        (CHAT, {"stop": {}}, "stop"),
        (CHAT, {"stop_token_ids": [999]}, "stop_token_ids"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT, {"logit_bias": {"999": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": None}}, "logit_bias.1"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (CHAT, user("x" * 3000), "messages"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": 7}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [258]}, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 3000}, "prompt"),
        (COMPLETIONS, {"max_tokens": 3000}, "max_tokens"),
        ("/v1/tokenize", {}, "prompt"),
        ("/v1/tokenize", {"prompt": 7}, "prompt"),
        ("/v1/detokenize", {"tokens": [-1]}, "tokens"),
        ("/v1/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/v1/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_by_name(post, path: str, changes: dict[str, Any], param: str) -> None:
    base = {CHAT: {"model": MODEL, "messages": MESSAGES}, COMPLETIONS: {"model": MODEL, "prompt": "x"}}.get(path, {})
    error = error_of(post(path, base | changes), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    name = param.partition("[")[0].partition(".")[0]
    assert name in error["message"] or "prompt has" in error["message"] or "token id" in error["message"], error
    assert len(error["message"]) < 400


def test_a_template_may_refuse(post) -> None:
    body = {"model": MODEL, "messages": [{"role": "tool", "content": "x"}]}
    assert "tools have no place" in error_of(post(CHAT, body), 400)["message"]


def test_the_client_raises_what_it_should(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[{"type": "function", "function": {}}])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-6", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and MODEL in str(missing.value)


def test_a_context_that_is_too_long_says_so(post) -> None:
    error = error_of(post(COMPLETIONS, {"model": MODEL, "prompt": [1] * 3000}), 400)
    assert error["code"] == "context_length_exceeded" and "2048" in error["message"]


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "word"),
    [
        (b"{", JSON, 400, "JSON"),
        (b"", JSON, 400, "JSON"),
        (b"[]", JSON, 400, "object"),
        (b'"x"', JSON, 400, "object"),
        (b'{"a": NaN}', JSON, 400, "NaN"),
        (b'{"a": -Infinity}', JSON, 400, "Infinity"),
        (b'{"model": "\xff"}', JSON, 400, "UTF-8"),
        ('{"model": "x"}'.encode("utf-16"), JSON, 400, "UTF-8"),
        (b'{"model": "\\ud800"}', JSON, 400, "surrogate"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON, 400, "deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", JSON, 400, "JSON"),
        (b'{"model": "scripted", "messages": [], "temperature": 1e999}', JSON, 400, "temperature"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
        (b"{}", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "application/json"),
        (b"{}", {}, 415, "application/json"),
    ],
)
def test_bodies(live: Live, body: bytes, headers: dict[str, str], status: int, word: str) -> None:
    error = error_of(httpx.post(live.url + CHAT, content=body, headers=headers), status)
    assert word in error["message"]


@pytest.mark.parametrize("temperature", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none(live: Live, temperature: str) -> None:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], "temperature": {temperature}}}'
    error_of(httpx.post(live.url + CHAT, content=body.encode(), headers=JSON), 400)


def test_paths_and_methods(live: Live) -> None:
    error_of(httpx.get(live.url + "/v1/nothing"), 404)
    response = httpx.get(live.url + CHAT)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(httpx.delete(live.url + "/v1/models"), 405)


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    with serving(ServerSettings(max_body_bytes=1000, max_prompts=2)) as server:
        yield server


def test_a_body_over_the_limit(small: Live) -> None:
    exact = b'{"prompt": "' + b"x" * 986 + b'"}'
    assert len(exact) == 1000
    assert httpx.post(small.url + "/v1/tokenize", content=exact, headers=JSON).status_code == 200
    error = error_of(httpx.post(small.url + "/v1/tokenize", content=exact + b" ", headers=JSON), 413)
    assert "1,000 bytes" in error["message"]
    error_of(httpx.post(small.url + "/v1/tokenize", content=b"x" * 5_000_000, headers=JSON), 413)


def test_a_chunked_body_over_the_limit(small: Live) -> None:
    pieces = (b"x" * 600 for _ in range(1000))
    error_of(httpx.post(small.url + "/v1/tokenize", content=pieces, headers=JSON), 413)


def test_an_endless_body_is_not_read_for_ever(small: Live) -> None:
    host, port = small.url.removeprefix("http://").split(":")
    head = b"POST /v1/tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99999\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head + b"{")
        assert b" 413 " in connection.recv(4096)


def test_fewer_prompts(small: Live) -> None:
    body = {"model": MODEL, "prompt": ["a", "b", "c"]}
    assert "at most 2" in error_of(httpx.post(small.url + COMPLETIONS, json=body), 400)["message"]


def test_a_model_without_a_template() -> None:
    with serving(tokenizer=ByteTokenizer(chat_template=None)) as live:
        body = {"model": MODEL, "messages": MESSAGES}
        assert "template" in error_of(httpx.post(live.url + CHAT, json=body), 400)["message"]
        answer = httpx.post(live.url + COMPLETIONS, json={"model": MODEL, "prompt": "[[yes]]"}).json()
        assert answer["choices"][0]["text"] == "yes"


class BrokenTokenizer(ByteTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "break" in text:
            raise RuntimeError("secret internals")
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        if ord("!") in token_ids:
            raise RuntimeError("secret internals")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_bug_is_not_shown_to_clients() -> None:
    with serving(tokenizer=BrokenTokenizer()) as live:
        for text in ("break", "[[ab!]]"):
            body = {"model": MODEL, "prompt": text}
            error = error_of(httpx.post(live.url + COMPLETIONS, json=body), 500)
            assert error["type"] == "server_error" and "secret" not in error["message"]
        # The exclamation mark comes after enough tokens not to be in the prompt's last ones.
        body = {"model": MODEL, "prompt": "[[0123456789!]] and on", "stream": True}
        text = httpx.post(live.url + COMPLETIONS, json=body).text
        assert "internal error" in text and "secret" not in text and "[DONE]" not in text


def test_the_server_went_on(client: openai.OpenAI, live: Live) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "x"
    assert live.stats["blocks"]["referenced"] == 0
