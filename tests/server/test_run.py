"""The server as a process: it loads, serves, and leaves as it is asked to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.serving import MODEL
from tenfold.errors import TenfoldError
from tenfold.server.run import listen

SCRIPT = Path(__file__).with_name("serve_scripted.py")


class Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{self.line()}"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stream(self, tokens: int) -> Iterator[str]:
        body = {"model": MODEL, "prompt": "x", "max_tokens": tokens, "stream": True}
        with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=20) as response:
            yield from (line.removeprefix("data: ") for line in response.iter_lines() if line)


@contextmanager
def running(timeout: float = 10, loading: float = 0.0) -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(timeout), str(loading)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        made = Process(process)
        if loading == 0:
            assert made.line() == "ready"
        yield made
    finally:
        process.kill()
        process.communicate()


def wait_for_health(url: str) -> httpx.Response:
    for _ in range(200):
        try:
            return httpx.get(url + "/health")
        except httpx.ConnectError:
            time.sleep(0.02)
    raise AssertionError("nobody listens")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_may_finish(sent: signal.Signals) -> None:
    with running() as server:
        stream = server.stream(tokens=60)
        first = next(stream)
        server.process.send_signal(sent)
        time.sleep(0.2)
        response = httpx.get(server.url + "/v1/models")
        assert response.status_code == 503 and "shutting down" in response.text
        lines = [first, *stream]
        assert lines[-1] == "[DONE]"
        assert sum(len(json.loads(line)["choices"][0]["text"]) for line in lines[:-1]) == 60
        assert server.process.wait(timeout=5) == 0
        assert server.line() == "left in order"


def test_what_takes_too_long_is_told_so() -> None:
    with running(timeout=0.3) as server:
        stream = server.stream(tokens=2000)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        error = json.loads([*stream][-1])["error"]
        assert "shutting down" in error["message"]
        assert server.process.wait(timeout=5) == 0


def test_a_second_interrupt_ends_it_at_once() -> None:
    with running(timeout=60) as server:
        stream = server.stream(tokens=2000)
        next(stream)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=5) == 130
        assert time.monotonic() - start < 1
        with pytest.raises(httpx.HTTPError):
            list(stream)


def test_it_answers_while_it_loads() -> None:
    with running(loading=0.8) as server:
        health = wait_for_health(server.url)
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        assert httpx.post(server.url + "/v1/completions", json={}).status_code == 503
        assert server.line() == "ready"
        assert httpx.get(server.url + "/health").status_code == 200


def test_it_may_be_stopped_while_it_loads() -> None:
    with running(loading=60) as server:
        wait_for_health(server.url)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=5) == 0


def test_a_model_that_cannot_be_loaded() -> None:
    with running(loading=-0.1) as server:
        assert server.process.wait(timeout=5) == 1
        assert server.process.stderr is not None
        assert server.process.stderr.read() == "error: there is no such model\n"


def test_a_port_in_use() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with listener, pytest.raises(TenfoldError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use"):
        listen("127.0.0.1", port)
    with pytest.raises(TenfoldError, match="cannot listen on nowhere"):
        listen("nowhere.invalid", 8000)
