"""What clients see of reused prefixes, who shares them with whom, and the best of several samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from support.serving import MODEL, Live, serving
from tenfold.server import ServerSettings

LONG = "a document of some length, which nobody wants to compute twice. "


def chat(text: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": LONG * 3}, {"role": "user", "content": text}]


@contextmanager
def client_of(live: Live, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0) as made:
        yield made


@pytest.fixture
def fresh() -> Iterator[Live]:
    with serving() as server:
        yield server


def cached(client: openai.OpenAI, **options: Any) -> int:
    answer = client.chat.completions.create(model=MODEL, messages=chat("[[yes]]"), **options)
    assert answer.choices[0].message.content == "yes"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_the_second_chat_is_cached(fresh: Live) -> None:
    with client_of(fresh) as client:
        assert cached(client) == 0
        prompt = client.chat.completions.create(model=MODEL, messages=chat("[[yes]]")).usage
        assert prompt is not None and prompt.prompt_tokens_details is not None
        assert prompt.prompt_tokens_details.cached_tokens == (prompt.prompt_tokens - 1) // 16 * 16
        again = client.chat.completions.create(model=MODEL, messages=chat("[[no]]"), n=3, seed=1).usage
        assert again is not None and again.prompt_tokens_details is not None
        assert 0 < (again.prompt_tokens_details.cached_tokens or 0) < again.prompt_tokens, "samples count it once"


def test_cached_tokens_of_streams_and_completions(fresh: Live) -> None:
    with client_of(fresh) as client:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        found = []
        for _ in range(2):
            *_, last = client.chat.completions.create(model=MODEL, messages=chat("[[yes]]"), **options)
            found.append(last.usage.prompt_tokens_details.cached_tokens)
        assert found[0] == 0 < found[1]
        prompts = [[65] * 40, [66] * 40]
        for expected in (0, 64):
            answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=1, n=2)
            assert answer.usage.prompt_tokens_details.cached_tokens == expected, "the sum over prompts, samples once"


def test_a_salt_shares_with_itself_only(fresh: Live) -> None:
    with client_of(fresh) as client:
        for salt in ("one", "two", None):
            extra = {"cache_salt": salt} if salt else {}
            assert cached(client, extra_body=extra) == 0
            assert cached(client, extra_body=extra) > 0
        body = {"model": MODEL, "prompt": [65] * 40, "max_tokens": 1}
        for salt, expected in (("a", 0), ("b", 0), ("a", 32)):
            usage = httpx.post(fresh.url + "/v1/completions", json=body | {"cache_salt": salt}).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected


def test_keys_share_nothing() -> None:
    settings = ServerSettings(api_keys=("first", "second"))
    with serving(settings) as live, client_of(live, "first") as first, client_of(live, "second") as second:
        assert cached(first) == 0 < cached(first)
        for salt in ("", "0", "0:", ":"):
            assert cached(second, extra_body={"cache_salt": salt}) == 0, "no salt reaches another key's prefixes"
        assert cached(second) > 0


def test_breakpoints_reach_the_scheduler(fresh: Live) -> None:
    seen = []
    submit = fresh.engine.scheduler.submit
    fresh.engine.scheduler.submit = lambda *requests: seen.extend(requests) or submit(*requests)  # type: ignore
    marked = [{"type": "text", "text": "read: ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "x"}]
    body = {"model": MODEL, "messages": chat(marked), "max_tokens": 1, "cache_salt": "s"}
    assert httpx.post(fresh.url + "/v1/chat/completions", json=body).status_code == 200
    (request,) = seen
    texts = [bytes(request.prompt[:place]).decode() for place in request.breakpoints]
    assert [text.rpartition("\n")[2] for text in texts] == ["user: ", "user: read: ", ""]
    assert request.cache_salt == "s"


def test_best_of(fresh: Live) -> None:
    fresh.runner.likelihoods = [-3.0, -1.0, -2.0, -5.0, -4.0]
    body: dict[str, Any] = {"model": MODEL, "prompt": ["[[one]]", "[[two]]"], "n": 2, "best_of": 5, "logprobs": 0}
    answer = httpx.post(fresh.url + "/v1/completions", json=body).json()
    choices = answer["choices"]
    assert [choice["text"] for choice in choices] == ["one", "one", "two", "two"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in choices] == [-1.0, -2.0] * 2, "the best come first"
    assert answer["usage"]["completion_tokens"] == 10 * 4, "all candidates were generated"
    assert answer["usage"]["prompt_tokens"] == 2 * 8
    del body["logprobs"]
    plain = httpx.post(fresh.url + "/v1/completions", json=body).json()
    assert {json.dumps(choice["logprobs"]) for choice in plain["choices"]} == {"null"}, "ranked by, but not asked for"
    with client_of(fresh) as client:
        made = client.completions.create(model=MODEL, prompt="[[x]]", best_of=1, stream=True)
        assert "".join(chunk.choices[0].text for chunk in made) == "x", "best_of that equals n asks for nothing"


def test_best_of_counts_in_the_queue() -> None:
    with serving(max_queue=4) as live:
        body = {"model": MODEL, "prompt": "[[x]]", "best_of": 5}
        error = httpx.post(live.url + "/v1/completions", json=body).json()["error"]
        assert error["param"] == "best_of" and "bound of 4" in error["message"]


def test_beam_search_over_http(fresh: Live) -> None:
    with client_of(fresh) as client:
        beams = {"use_beam_search": True, "beam_width": 3, "length_penalty": 0.5, "early_stopping": "never"}
        answer = client.chat.completions.create(model=MODEL, messages=chat("[[yes]]"), extra_body=beams, max_tokens=9)
        assert answer.choices[0].message.content == "yes"
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 3}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 0}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 1000}, "beam_width"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": True, "top_k": 3}, "top_k"),
    ],
)
def test_beam_search_is_refused_by_name(fresh: Live, fields: dict[str, Any], param: str) -> None:
    with client_of(fresh) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=chat("x"), extra_body=fields)
    assert caught.value.param == param
