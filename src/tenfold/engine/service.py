"""The engine on a thread of its own, beside an asyncio loop.

Thread rules: the engine, the scheduler and the runner are touched by the engine's thread only. Calls come in through
one inbox, which is emptied between steps; events go out with ``loop.call_soon_threadsafe``, once per step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Tokens
from typing import Any, TypeVar

from tenfold.core import FinishReason, SamplingParams, TokenEvent
from tenfold.engine.engine import NO_TOKEN, Engine
from tenfold.engine.profile import DELIVERY
from tenfold.errors import EngineError

logger = logging.getLogger(__name__)
T = TypeVar("T")

Stream = asyncio.Queue[TokenEvent]


class EngineThread:
    """Runs an engine's loop. Created and used from one asyncio loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._streams: dict[int, Stream] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        if engine.profile is not None:
            engine.profile.time_call(self, "_deliver", DELIVERY)
        self._thread = threading.Thread(target=self._run, name="tenfold-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    async def generate(
        self,
        prompts: Tokens[Tokens[int]],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        breakpoints: Tokens[tuple[int, ...]] = (),
    ) -> Generation:
        """Queue prompts, all or none, and return their stream of tokens once the engine has taken them.

        ``cache_salt`` is as for ``Engine.submit``; ``breakpoints``, if there are any, has those of each prompt.

        Raises:
            RequestError, QueueFullError: as ``Engine.submit``.
            EngineError: the engine is shutting down.
        """
        for prompt in prompts:
            self.engine.request(prompt, params)  # refuse what is plainly wrong without waiting for a step to end
        stream: Stream = asyncio.Queue()
        taken: list[int] = []
        places = breakpoints or [()] * len(prompts)

        def submit() -> None:
            try:
                for prompt, marks in zip(prompts, places, strict=True):
                    taken.extend(self.engine.submit(prompt, params, cache_salt=cache_salt, breakpoints=marks))
            except Exception:
                for sequence in taken:
                    self.engine.finish(sequence)
                raise
            self._loop.call_soon_threadsafe(self._open, tuple(taken), stream)

        def abandon() -> None:
            for sequence in taken:
                self.engine.finish(sequence)
                self._loop.call_soon_threadsafe(self._streams.pop, sequence, None)

        try:
            await self.call(submit)
        except asyncio.CancelledError:
            self._post(abandon)
            raise
        return Generation(self, tuple(taken), stream)

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the engine's thread between two steps and return its result."""
        if not self.alive:
            raise EngineError("the server is shutting down")
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                self._loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                self._loop.call_soon_threadsafe(_settle, future, result, None)

        self._post(run)
        return await future

    def finish(self, sequence: int, reason: FinishReason) -> None:
        """End a sequence as soon as the current step is over. No further event of it is delivered."""
        self._streams.pop(sequence, None)
        self._post(lambda: self.engine.finish(sequence, reason))

    async def drain(self, seconds: float) -> bool:
        """Wait until nothing is live, at most ``seconds``; True if all of it finished."""
        deadline = self._loop.time() + seconds
        while self.engine.busy and self._thread.is_alive():
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def stop(self) -> None:
        """End every stream with ``FinishReason.CANCELLED``, and the thread once its current step is over."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._end_all(FinishReason.CANCELLED)

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end after ``stop``, at most ``seconds``; True if it did. Blocks."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _post(self, function: Callable[[], Any]) -> None:
        with self._wake:
            self._inbox.append(function)
            self._wake.notify()

    def _open(self, ids: tuple[int, ...], stream: Stream) -> None:
        self._streams.update((i, stream) for i in ids)

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.sequence)
            if stream is not None:
                stream.put_nowait(event)
                if event.finish_reason is not None:
                    del self._streams[event.sequence]

    def _end_all(self, reason: FinishReason) -> None:
        """Nobody waits for a thread that is gone: end every stream and every call."""
        self._stopping = True
        for sequence, stream in self._streams.items():
            stream.put_nowait(TokenEvent(sequence, NO_TOKEN, reason, None))
        self._streams.clear()
        for future in list(self._calls):
            _settle(future, None, EngineError("the engine has stopped"))

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.critical("the engine's loop failed: nothing can be generated any more", exc_info=True)
            self._loop.call_soon_threadsafe(self._end_all, FinishReason.ERROR)

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not self.engine.busy and not self._stopping:
                    self._wake.wait()
                if self._stopping:
                    return
                calls, self._inbox = self._inbox, deque()
            for call in calls:
                call()
            events = self.engine.step()
            if events:
                self._loop.call_soon_threadsafe(self._deliver, events)


class Generation:
    """The tokens of the prompts' sequences as they come; sample ``j`` of prompt ``i`` has index ``i * samples + j``.

    Iterate it to the end, or ``close`` it: what is still running then ends and frees its memory within a step.
    """

    def __init__(self, thread: EngineThread, ids: tuple[int, ...], stream: Stream) -> None:
        self._thread = thread
        self._stream = stream
        self.ids = ids
        self._open = set(ids)

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, TokenEvent]]]:
        """Yield lists of ``(index, event)``, each with all that waited at that moment, until every sample has ended.

        Raises:
            EngineError: the step that computed a sample failed, or the server stopped.
        """
        position = {sequence: index for index, sequence in enumerate(self.ids)}
        while self._open:
            waiting = [await self._stream.get()]
            while not self._stream.empty():
                waiting.append(self._stream.get_nowait())
            events: list[tuple[int, TokenEvent]] = []
            failure: EngineError | None = None
            for event in waiting:
                if event.sequence not in self._open:
                    continue
                failure = failure or _failure(event)
                if failure is None:
                    events.append((position[event.sequence], event))
                    if event.finish_reason is not None:
                        self._open.discard(event.sequence)
            if events:
                yield events
            if failure is not None:
                raise failure

    def finish(self, index: int) -> None:
        """End one sample because a stop string appeared in its text."""
        self._end(self.ids[index], FinishReason.STOP)

    def close(self) -> None:
        for sequence in list(self._open):
            self._end(sequence, FinishReason.CANCELLED)

    def _end(self, sequence: int, reason: FinishReason) -> None:
        if sequence in self._open:
            self._open.discard(sequence)
            self._thread.finish(sequence, reason)


def _failure(event: TokenEvent) -> EngineError | None:
    if event.finish_reason is FinishReason.ERROR:
        return EngineError("the step that computed this request failed; the server's log says why")
    if event.finish_reason is FinishReason.CANCELLED:
        return EngineError("the server is shutting down")
    return None


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
