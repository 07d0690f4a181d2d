"""The engine's thread beside asyncio: nobody waits for ever."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from support.serving import make_engine
from tenfold.core import SamplingParams
from tenfold.engine.service import EngineThread
from tenfold.errors import EngineError, QueueFullError

LONG = SamplingParams(max_tokens=1000)


async def drain(engine: Any) -> None:
    while engine.busy:
        await asyncio.sleep(0.005)
    assert engine.scheduler.cache.arena.free == engine.scheduler.spec.num_pages


def test_prompts_are_taken_all_or_none() -> None:
    async def scenario() -> None:
        engine, _ = make_engine(seconds=0.002, max_sequences=1, max_queue=3)
        thread = EngineThread(engine)
        first = await thread.generate([[1], [2]], LONG)
        while len(engine.scheduler.running) == 0:
            await asyncio.sleep(0.001)
        with pytest.raises(QueueFullError):
            await thread.generate([[1], [2], [3]], LONG)
        assert len(engine.scheduler.live) == 2
        first.close()
        await drain(engine)
        assert not thread._streams
        thread.stop()

    asyncio.run(scenario())


def test_a_call_that_is_cancelled_leaves_nothing() -> None:
    async def scenario() -> None:
        engine, _ = make_engine(seconds=0.05)
        thread = EngineThread(engine)
        other = await thread.generate([[1]], LONG)
        task = asyncio.create_task(thread.generate([[2]], LONG))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.2)
        assert list(engine.scheduler.live) == list(other.ids) == list(thread._streams)
        other.close()
        await drain(engine)
        thread.stop()

    asyncio.run(scenario())


def test_stopping_ends_streams_and_calls() -> None:
    async def scenario() -> None:
        engine, _ = make_engine(seconds=0.1)
        thread = EngineThread(engine)
        generation = await thread.generate([[1]], LONG)
        call = asyncio.create_task(thread.call(lambda: time.sleep(0.0)))
        await asyncio.sleep(0.01)
        thread.stop()
        with pytest.raises(EngineError, match="shutting down"):
            async for _ in generation:
                pass
        with pytest.raises(EngineError):
            await asyncio.wait_for(call, 2)
        with pytest.raises(EngineError):
            await thread.generate([[1]], LONG)
        assert thread.join(2)

    asyncio.run(scenario())


def test_a_loop_that_fails_ends_streams() -> None:
    async def scenario() -> None:
        engine, _ = make_engine(seconds=0.01)
        thread = EngineThread(engine)
        generation = await thread.generate([[1]], LONG)

        def crash(*args: Any) -> None:
            raise AssertionError("a bug")

        engine.scheduler.commit = crash  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            async for _ in generation:
                pass
        await asyncio.sleep(0.01)
        assert not thread.alive

    asyncio.run(scenario())
