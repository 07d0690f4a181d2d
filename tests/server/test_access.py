"""Keys, names, and what is answered while the server loads or leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from support.byte_tokenizer import ByteTokenizer
from support.serving import MODEL, make_engine, serving
from tenfold.server import ServerSettings
from tenfold.server.app import build_app
from tenfold.server.state import Served, Serving


def test_keys_and_names() -> None:
    with serving(ServerSettings(aliases=("other", "org/name"), api_keys=("first", "zweiter-ß"))) as live:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
            response = httpx.get(live.url + "/v1/models", headers=headers)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(live.url + "/metrics").status_code == 401
        assert httpx.get(live.url + "/nothing").status_code == 401
        assert httpx.get(live.url + "/health").status_code == 200
        stranger = openai.OpenAI(base_url=f"{live.url}/v1", api_key="bad", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="first", max_retries=0) as client:
            assert [model.id for model in client.models.list().data] == [MODEL, "other", "org/name"]
            assert client.models.retrieve("org/name").id == "org/name"
            assert client.completions.create(model="org/name", prompt="[[x]]").model == "org/name"
        umlaut = {"Authorization": "Bearer zweiter-ß".encode()}
        assert httpx.get(live.url + "/v1/models", headers=umlaut).status_code == 200


def test_before_and_after() -> None:
    async def scenario() -> None:
        state = Serving(ServerSettings())
        transport = httpx.ASGITransport(build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def both(expected: int, status: str) -> httpx.Response:
                health = await client.get("/health")
                assert (health.status_code, health.json()) == (expected, {"status": status})
                return await client.get("/v1/models")

            response = await both(503, "loading")
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            assert "loading" in response.json()["error"]["message"]
            assert (await client.get("/metrics")).status_code == 503

            state.open(Served(make_engine()[0], ByteTokenizer(), MODEL))
            assert (await both(200, "ok")).status_code == 200

            state.refuse()
            response = await both(503, "stopping")
            assert response.status_code == 503 and "shutting down" in response.json()["error"]["message"]
            assert (await client.get("/metrics")).status_code == 200
            state.close()

    asyncio.run(scenario())


def test_an_engine_that_died() -> None:
    class Crash(Exception):
        pass

    def crash(*args: Any) -> None:
        raise Crash

    with serving(seconds=0.01) as live:
        live.engine.scheduler.commit = crash  # type: ignore[method-assign]
        body = {"model": MODEL, "prompt": "x"}
        assert httpx.post(live.url + "/v1/completions", json=body, timeout=5).status_code == 500
        health = httpx.get(live.url + "/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        assert httpx.post(live.url + "/v1/completions", json=body).status_code == 503
        live.engine.scheduler.inflight.clear()
        for sequence in list(live.engine.scheduler.live):
            live.engine.finish(sequence)
