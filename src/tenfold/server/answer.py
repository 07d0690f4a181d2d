"""Running a request: all at once or as a stream, never longer than somebody waits for it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from tenfold.core import SamplingParams
from tenfold.engine.ranking import best
from tenfold.engine.service import Generation
from tenfold.errors import EngineError, RequestError
from tenfold.server.errors import ClientGone, as_api_error
from tenfold.server.forms import Form, usage
from tenfold.server.samples import Piece, Sample, pieces
from tenfold.server.state import Serving

logger = logging.getLogger(__name__)
T = TypeVar("T")

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""They ask caches and proxies to pass every chunk on at once."""


@dataclass
class Answer:
    """A request that the engine has taken."""

    serving: Serving
    generation: Generation
    samples: list[Sample]
    form: Form
    params: SamplingParams
    prompt_tokens: int

    @classmethod
    async def begin(
        cls,
        serving: Serving,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        form: Form,
        *,
        cache_salt: str,
        breakpoints: Sequence[tuple[int, ...]] = (),
    ) -> Answer:
        """Queue the prompts. Raises RequestError, QueueFullError and EngineError as ``EngineThread.generate``."""
        count = params.samples
        total, bound = len(prompts) * count, serving.engine.max_queue
        if bound is not None and total > bound:
            name = "n" if count == params.n else "best_of"
            raise RequestError(
                f"{len(prompts)} prompts times {name} = {count} exceed the queue's bound of {bound}", name
            )
        generation = await serving.thread.generate(prompts, params, cache_salt=cache_salt, breakpoints=breakpoints)
        samples = [
            Sample(place * count + sample, serving.tokenizer, prompt, params)
            for place, prompt in enumerate(prompts)
            for sample in range(count)
        ]
        return cls(serving, generation, samples, form, params, sum(len(prompt) for prompt in prompts))

    async def whole(self) -> JSONResponse:
        """Wait for the end of all samples."""
        parts: list[list[Piece]] = [[] for _ in self.samples]
        try:
            async for ready in pieces(self.generation, self.samples):
                for piece in ready:
                    parts[piece.sample].append(piece)
        finally:
            self.generation.close()
        chosen = [_joined(parts[sample]) for sample in self._best()]
        return JSONResponse(self.form.whole([part._replace(sample=i) for i, part in enumerate(chosen)], self._usage()))

    def stream(self, include_usage: bool) -> StreamingResponse:
        return _EventStream(self, include_usage)

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """Server-sent events: chunks, then ``[DONE]``; or an error object, and nothing after it."""
        extra = {"usage": None} if include_usage else {}
        try:
            async for ready in pieces(self.generation, self.samples):
                choices = (choice for piece in ready for choice in self.form.chunk_choices(piece))
                yield b"".join(_event(self.form.chunk(choice) | extra) for choice in choices)
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("a stream failed")
            yield _event(as_api_error(error, stopping=self.serving.stopping).body())
            return
        if include_usage:
            yield _event(self.form.usage_chunk(self._usage()))
        yield b"data: [DONE]\n\n"

    def _best(self) -> list[int]:
        """Indices of the samples to answer with: all of them, or the best of each prompt."""
        n, count = self.params.n, self.params.samples
        if n == count:
            return list(range(len(self.samples)))
        scores = [sample.score for sample in self.samples]
        return [i + each for i in range(0, len(scores), count) for each in best(scores[i : i + count], n)]

    def _usage(self) -> dict[str, Any]:
        """Samples share their prompt: what was cached of it is what the first of them found."""
        cached = sum(sample.reused for sample in self.samples[:: self.params.samples])
        return usage(self.prompt_tokens, sum(sample.tokens for sample in self.samples), cached)


class _EventStream(StreamingResponse):
    """Frees what the generation holds however the response ends, even if it never began."""

    def __init__(self, answer: Answer, include_usage: bool) -> None:
        super().__init__(answer.events(include_usage), headers=STREAM_HEADERS, media_type="text/event-stream")
        self._generation = answer.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away. The body must have been read.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.wait({task, gone})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _joined(parts: Sequence[Piece]) -> Piece:
    """All pieces of one sample as one."""
    entries = tuple(entry for part in parts for entry in part.entries)
    return parts[-1]._replace(text="".join(part.text for part in parts), entries=entries)
