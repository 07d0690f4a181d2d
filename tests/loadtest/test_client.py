"""The client against a server that misbehaves in every way that servers do."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from support.raw_server import STREAM, answering, event, text_event, usage_event
from tenfold.errors import TenfoldError
from tenfold.loadtest.client import Target, base_url, without_password
from tenfold.loadtest.load import Load, measure
from tenfold.loadtest.measures import Record, Run, summarize
from tenfold.loadtest.workload import Endpoint, Prompt, PromptKind, Request, Span, made_up, warm_up

DONE = event("[DONE]")
Send = Callable[[bytes], None]


def asking(count: int = 1, output: int = 3) -> list[Request]:
    return [Request(Prompt(4, ((str(place), 4),)), output) for place in range(count)]


def run(url: str, requests: list[Request] | None = None, load: Load | None = None, **target: Any) -> Run:
    requests = asking() if requests is None else requests
    load = load or Load(requests, [0.0] * len(requests))
    return measure(Target(url, **({"model": "raw"} | target)), load)[1]


def answered(*parts: bytes | float, **target: Any) -> Record:
    """The record of one request that is answered with these bytes, with pauses between them."""

    def script(body: dict[str, Any], send: Send) -> None:
        for part in parts:
            if isinstance(part, float):
                time.sleep(part)
            else:
                send(part)

    with answering(script) as server:
        (record,) = run(server.url, **target).records
    return record


def failure(*parts: bytes | float, **target: Any) -> tuple[str, str]:
    found = answered(*parts, **target).failure
    assert found is not None
    return found.cause, found.message


def test_times_and_tokens_of_an_answer() -> None:
    record = answered(
        STREAM, 0.1, text_event("a"), 0.05, text_event("bc"), 0.02, text_event("", "length"), usage_event(9, 3, 5), DONE
    )
    assert record.failure is None
    assert record.ttft is not None and record.ttft >= 0.1
    assert len(record.gaps) == 1 and record.gaps[0] >= 0.05, "a chunk without content is none"
    assert record.e2e >= 0.17
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens, record.has_usage) == (9, 3, 5, True)
    assert record.tpot == pytest.approx(record.gaps[0] / 2)


def test_an_answer_without_usage() -> None:
    record = answered(STREAM, text_event("a"), text_event("b", "stop"), DONE)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens, record.has_usage) == (4, 2, None, False)


def test_an_answer_that_ends_without_done() -> None:
    assert answered(STREAM, text_event("a"), text_event("", "stop")).failure is None


def test_an_answer_without_content() -> None:
    record = answered(STREAM, text_event("", "stop"), usage_event(4, 1), DONE)
    assert (record.failure, record.ttft, record.output_tokens) == (None, None, 1)


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_chats(name: str) -> None:
    def delta(**fields: Any) -> bytes:
        return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})

    def script(body: dict[str, Any], send: Send) -> None:
        send(STREAM + delta(role="assistant", content="") + delta(**{name: "x"}) + delta(**{name: "y"}) + DONE)

    with answering(script) as server:
        (record,) = run(server.url, endpoint=Endpoint.CHAT).records
    assert record.chunks == 2
    (message,) = server.bodies[0]["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 4


def test_what_is_sent() -> None:
    def script(body: dict[str, Any], send: Send) -> None:
        send(STREAM + text_event("a", "stop") + DONE)

    with answering(script) as server:
        run(server.url, model=None, api_key="secret", vocabulary=Span(7, 7), extra={"user": "u", "temperature": 0.5})
        run(server.url, prompts=PromptKind.TEXT, ignore_eos=False)
    first, second = server.bodies
    assert first == {
        "model": "raw",
        "prompt": [7] * 4,
        "max_tokens": 3,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "user": "u",
    }
    assert isinstance(second["prompt"], str) and "ignore_eos" not in second
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "Authorization" not in server.headers[1]


def test_errors_by_cause() -> None:
    refusal = json.dumps({"error": {"message": "queue\nfull " + "x" * 500}}).encode()
    head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    cause, message = failure(head % b"429 Too Many Requests", refusal)
    assert cause == "HTTP 429" and message.startswith("queue full xxx") and len(message) < 210
    assert failure(head % b"502 Bad Gateway", b"<html>") == ("HTTP 502", "<html>")
    assert failure(head % b"500 Oops") == ("HTTP 500", "Oops")
    assert failure(head % b"404 Not Found", b'{"detail": "none"}') == ("HTTP 404", "{'detail': 'none'}")
    cause, message = failure(head % b"200 OK", b"{}")
    assert cause == "bad stream" and message == "the answer is application/json, not a stream of events"
    assert failure(STREAM, text_event("a")) == ("bad stream", "the stream ended before the answer did")
    assert failure(STREAM, event({"error": {"message": "out of memory"}}), DONE) == ("server error", "out of memory")
    assert failure(STREAM, event("{")) == ("bad stream", "a chunk is not JSON: {")
    assert failure(STREAM, event("3")) == ("bad stream", "a chunk is not an object: 3")
    assert failure(b"")[0] == "disconnected"
    assert failure(b"nonsense\r\n\r\n")[0] == "disconnected"
    chunked = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")
    first = text_event("a")
    assert failure(chunked, b"%x\r\n%s\r\n" % (len(first), first))[0] == "disconnected", "in mid-stream"


def test_a_failed_answer_keeps_what_came_of_it() -> None:
    record = answered(STREAM, text_event("a"), 0.02, text_event("b"))
    assert record.failure is not None and (record.chunks, record.output_tokens) == (2, 2)


def test_timeouts() -> None:
    slow = {"timeout": 0.3}
    assert failure(0.6, STREAM, **slow) == ("timeout", "not answered within 0.3 s")
    record = answered(STREAM, text_event("a"), 0.6, text_event("b", "stop"), DONE, **slow)
    assert record.failure is not None and record.failure.cause == "timeout" and record.ttft is not None
    late = answered(STREAM, text_event("a", "stop"), DONE, 0.6, **slow)
    assert late.failure is None and late.e2e < 0.3, "the answer was complete"


def test_nobody_is_there() -> None:
    with answering(lambda body, send: None) as server:
        url = server.url
    (record,) = run(url).records
    assert record.failure is not None and record.failure.cause == "not connected"
    with pytest.raises(TenfoldError, match=r"cannot reach http://127\.0\.0\.1:\d+/v1/models: "):
        run(url, model=None)


def test_a_server_that_repeats_the_key() -> None:
    refusal = b"HTTP/1.1 401 No\r\nConnection: close\r\n\r\nwrong key: hush-hush"
    assert failure(refusal, api_key="hush-hush") == ("HTTP 401", "wrong key: [API key]")
    assert "hush" not in repr(Target("x", api_key="hush-hush"))
    with pytest.raises(TenfoldError, match="the API key has a character that a header cannot hold"):
        run("http://127.0.0.1:1", api_key="schlüssel\u20ac")


def test_one_failure_stops_no_other() -> None:
    def script(body: dict[str, Any], send: Send) -> None:
        if body["max_tokens"] == 1:
            return
        send(STREAM + text_event("a", "stop") + usage_event(4, body["max_tokens"]) + DONE)

    requests = [request for output in (3, 1, 2, 1) for request in asking(5, output)]
    with answering(script) as server:
        found = run(server.url, requests)
    summary = summarize(found)
    assert (summary.completed, summary.failures, summary.output_tokens) == (10, {"disconnected": 10}, 25)


def pausing(body: dict[str, Any], send: Send) -> None:
    time.sleep(0.05)
    send(STREAM + text_event("a", "stop") + DONE)


def test_a_closed_loop() -> None:
    """Six requests of 50 ms, two at once: each is due when one before it ends."""
    requests = asking(6)
    with answering(pausing) as server:
        found = run(server.url, load=Load(requests, [0.0] * 6, concurrency=2, closed=True))
    records = sorted(found.records, key=lambda record: record.index)
    assert [record.due > 0 for record in records] == [False, False, True, True, True, True]
    assert all(record.due == record.admitted <= record.sent for record in records)
    under_way = [sum(other.sent <= record.sent < other.end for other in records) for record in records]
    assert max(under_way) == 2
    assert all(record.e2e == record.end - record.due >= 0.05 for record in records)


def test_no_omission_is_coordinated() -> None:
    """The server takes one at a time and they come faster: the wait for the client's limit is in the latency."""
    requests = asking(5)
    due = [0.0, 0.01, 0.02, 0.03, 0.04]
    with answering(pausing) as server:
        found = run(server.url, load=Load(requests, due, concurrency=1))
    records = sorted(found.records, key=lambda record: record.index)
    assert [record.due for record in records] == due
    assert [record.e2e >= 0.05 * place - 0.01 * (place - 1) for place, record in enumerate(records, 1)] == [True] * 5
    summary = summarize(found)
    assert summary.queued.max >= 0.16
    assert found.seconds >= 0.25


def test_requests_are_sent_when_they_are_due() -> None:
    requests = asking(4)
    with answering(pausing) as server:
        found = run(server.url, load=Load(requests, [0.0, 0.1, 0.1, 0.2]))
    records = sorted(found.records, key=lambda record: record.index)
    assert [record.due for record in records] == [0.0, 0.1, 0.1, 0.2]
    assert all(record.sent >= record.due and record.late == record.sent - record.due for record in records)


def test_all_at_once_is_not_throttled() -> None:
    everyone = threading.Barrier(200, timeout=20)

    def script(body: dict[str, Any], send: Send) -> None:
        everyone.wait()
        send(STREAM + text_event("a", "stop") + DONE)

    with answering(script) as server:
        summary = summarize(run(server.url, asking(200)))
    assert (summary.completed, summary.failed) == (200, 0), "none is answered before all have come"


def test_the_warm_up_is_not_counted() -> None:
    workload = made_up(3, Span(5, 9), Span(2, 2))
    noted: list[Record] = []
    with answering(pausing) as server:
        model, found = measure(
            Target(server.url), Load(workload.requests, [0.0] * 3), warm_up(workload, 2), note=noted.append
        )
    assert (model, len(server.bodies), len(found.records), len(noted)) == ("raw", 5, 3, 3)
    assert min(record.sent for record in found.records) < 0.05, "the clock starts after it"


def test_a_prompt_in_the_wrong_form_is_refused_before_anything_is_sent() -> None:
    given = Request(Prompt(1, token_ids=array("I", [1])), 1)
    with pytest.raises(TenfoldError, match="token ids without a text"):
        run("http://127.0.0.1:1", [given], endpoint=Endpoint.CHAT)


def test_urls() -> None:
    assert base_url("http://host:8000") == base_url("host:8000/") == "http://host:8000/v1"
    assert base_url("https://host/v3/") == "https://host/v3"
    assert base_url("http://[::1]:8000/v1") == "http://[::1]:8000/v1"
    assert without_password("http://me:pass@host/v1") == "http://host/v1"
    assert without_password("me:pass@host/v1") == "host/v1"
    for wrong in ("", "ftp://host", "http://", "http://host:x", "http://host/?a=b", "http://me:pass@:80"):
        with pytest.raises(TenfoldError, match="is not the URL of a server") as raised:
            base_url(wrong)
        assert "pass" not in str(raised.value)
