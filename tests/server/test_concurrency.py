"""Many at once, clients that leave, a queue that is full, a step that fails."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest

from support.serving import MODEL, Live, serving

ENDLESS = {"model": MODEL, "prompt": "go on", "max_tokens": 2000}


def async_client(live: Live) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_streams_interleave_and_the_short_one_ends_first() -> None:
    async def scenario(live: Live) -> list[str]:
        ended: list[str] = []
        async with async_client(live) as client:

            async def read(name: str, text: str) -> None:
                messages = [{"role": "user", "content": f"[[{text}]]"}]
                stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
                pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
                assert "".join(pieces) == text
                assert len(pieces) > 3 or len(text) < 5
                ended.append(name)

            long = [asyncio.create_task(read(f"long {i}", f"{i % 10}" * 400)) for i in range(12)]
            while live.stats["requests_running"] < 12:
                await asyncio.sleep(0.005)
            await read("short", "ok")
            await asyncio.gather(*long)
        return ended

    with serving(seconds=0.004) as live:
        ended = asyncio.run(scenario(live))
    assert ended[0] == "short" and len(ended) == 13


def test_choices_interleave() -> None:
    with serving(seconds=0.005) as live:
        body = {"model": MODEL, "prompt": "x", "n": 3, "max_tokens": 10, "stream": True}
        text = httpx.post(live.url + "/v1/completions", json=body).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and "[DONE]" not in line]
    indices = [json.loads(line)["choices"][0]["index"] for line in lines]
    assert indices.count(0) > 3 and indices != sorted(indices)


def test_a_reader_that_leaves_frees_its_blocks() -> None:
    with serving(seconds=0.005) as live:
        with httpx.stream("POST", live.url + "/v1/completions", json=ENDLESS | {"stream": True}) as response:
            next(response.iter_lines())
            assert live.stats["requests_running"] == 1
        live.wait_until(lambda stats: stats["blocks"]["referenced"] == 0 and not stats["requests_running"], seconds=1)
        assert live.stats["requests"]["cancelled"] == 1


@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_gives_up_frees_its_blocks(waiting: bool) -> None:
    with serving(seconds=0.005, max_sequences=1) as live:
        if waiting:
            held = httpx.Client()
            response = held.send(
                held.build_request("POST", live.url + "/v1/completions", json=ENDLESS | {"stream": True}), stream=True
            )
            live.wait_until(lambda stats: stats["requests_running"] == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + "/v1/completions", json=ENDLESS | {"n": 2}, timeout=0.15)
        ended = 2
        if waiting:
            live.wait_until(lambda stats: stats["requests_waiting"] == 0, seconds=1)
            response.close()
            held.close()
            ended = 3
        live.wait_until(lambda stats: stats["blocks"]["referenced"] == 0 and not stats["requests_running"], seconds=1)
        live.wait_until(lambda stats: stats["requests"]["cancelled"] == ended, seconds=1)


def test_a_full_queue() -> None:
    async def scenario(live: Live) -> None:
        async with async_client(live) as client:
            stream = await client.completions.create(**ENDLESS, stream=True)
            live.wait_until(lambda stats: stats["requests_running"] == 1)
            waiting = [asyncio.create_task(client.completions.create(**ENDLESS)) for _ in range(2)]
            while live.stats["requests_waiting"] < 2:
                await asyncio.sleep(0.005)
            for prompt in ("x", ["x", "y"]):
                with pytest.raises(openai.RateLimitError) as caught:
                    await client.completions.create(**ENDLESS | {"prompt": prompt})
                assert int(caught.value.response.headers["retry-after"]) >= 1
                assert caught.value.type == "rate_limit_error"
            assert live.stats["requests_waiting"] == 2, "all prompts of a request are taken, or none"
            with pytest.raises(openai.BadRequestError, match="bound of 2"):
                await client.completions.create(**ENDLESS | {"n": 3})
            for task in waiting:
                task.cancel()
            await stream.close()

    with serving(seconds=0.005, max_sequences=1, max_queue=2) as live:
        asyncio.run(scenario(live))


def test_a_step_that_fails() -> None:
    with serving(seconds=0.005) as live:
        lines = []
        with httpx.stream("POST", live.url + "/v1/completions", json=ENDLESS | {"stream": True}) as response:
            for line in response.iter_lines():
                lines.append(line)
                live.runner.broken = True
        assert response.status_code == 200
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert set(events[-1]) == {"error"} and "failed" in events[-1]["error"]["message"]
        assert events[-1]["error"]["type"] == "server_error"
        with pytest.raises(openai.APIError, match="failed"):
            client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
            list(client.completions.create(**ENDLESS, stream=True))
        response = httpx.post(live.url + "/v1/completions", json=ENDLESS)
        assert response.status_code == 500 and "failed" in response.json()["error"]["message"]
        live.runner.broken = False
        answer = httpx.post(live.url + "/v1/completions", json={"model": MODEL, "prompt": "[[well]]"}).json()
        assert answer["choices"][0]["text"] == "well"


def test_pages_that_run_out_only_slow_things_down() -> None:
    async def scenario(live: Live) -> list[str]:
        async with async_client(live) as client:
            made = [client.completions.create(model=MODEL, prompt="x", max_tokens=100) for _ in range(12)]
            return [answer.choices[0].text for answer in await asyncio.gather(*made)]

    with serving(pages=20) as live:
        texts = asyncio.run(scenario(live))
    assert len(set(texts)) == 1 and len(texts[0]) == 100
    assert live.stats["preemptions"] > 0


def test_health_answers_while_a_long_step_runs() -> None:
    body = ENDLESS | {"stream": True}
    with serving(seconds=0.5) as live, httpx.stream("POST", live.url + "/v1/completions", json=body):
        live.wait_until(lambda stats: stats["requests_running"] == 1)
        start = time.monotonic()
        assert httpx.get(live.url + "/health").status_code == 200
        assert "tenfold_requests_running 1.0" in httpx.get(live.url + "/metrics").text
        assert time.monotonic() - start < 0.45
