"""All requests of a workload, each sent when it is due, whatever became of those before it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tenfold.loadtest.client import Client, Target
from tenfold.loadtest.measures import Record, Run
from tenfold.loadtest.workload import Request

PREPARED_BYTES = 2**24
OPEN_FILES = 65_536


@dataclass(frozen=True)
class Load:
    """Requests, and when each is ``due`` in seconds from the start, in ascending order.

    ``concurrency`` limits how many are under way at once. Requests that wait for it are late, and their latency counts
    the wait; if ``closed``, they are only due when they are let go, as with clients that ask one thing after another.
    """

    requests: Sequence[Request]
    due: Sequence[float]
    concurrency: int | None = None
    closed: bool = False


def measure(
    target: Target,
    load: Load,
    warm_up: Sequence[Request] = (),
    *,
    note: Callable[[Record], None] = lambda record: None,
) -> tuple[str, Run]:
    """Send ``warm_up``, wait for all of it, then send ``load``. Ctrl-C ends it early, with what there is by then.

    Args:
        note: called with each record of the load as its request ends.

    Returns:
        The model, and the records.

    Raises:
        TenfoldError: the server's models are needed and cannot be had, or a prompt cannot be sent in the form chosen.
        KeyboardInterrupt: on Ctrl-C before the first request.
    """
    return asyncio.run(_measure(target, load, warm_up, note))


async def _measure(
    target: Target,
    load: Load,
    warm_up: Sequence[Request],
    note: Callable[[Record], None],
) -> tuple[str, Run]:
    for request in load.requests:
        request.prompt.require(target.sends)
    _raise_file_limit()
    async with Client(target) as client:
        model = await client.find_model()
        warming = await drive(client, Load(warm_up, [0.0] * len(warm_up), load.concurrency), lambda record: None)
        if warming.interrupted:
            return model, Run([], 0.0, 0.0, len(load.requests), interrupted=True)
        return model, await drive(client, load, note)


async def drive(client: Client, load: Load, note: Callable[[Record], None]) -> Run:
    """Send the requests and wait for their answers. When it is cancelled it gives up what is under way, and returns."""
    bodies = _Bodies(client.body(request) for request in load.requests)
    records: list[Record] = []
    # What is put here is the moment at which a slot came free.
    slots: asyncio.Queue[float] = asyncio.Queue()
    for _ in range(load.concurrency or 0):
        slots.put_nowait(0.0)
    started, cpu_started = time.perf_counter(), time.process_time()

    def clock() -> float:
        return time.perf_counter() - started

    async def send(body: bytes, record: Record) -> None:
        await client.send(body, record, clock)
        slots.put_nowait(clock())
        records.append(record)
        note(record)

    interrupted = False
    try:
        async with asyncio.TaskGroup() as tasks:
            for index, (request, due) in enumerate(zip(load.requests, load.due, strict=True)):
                # Even a sleep of no time lets those that were sent before get on.
                await asyncio.sleep(max(0.0, due - clock()))
                admitted = max(due, await slots.get()) if load.concurrency else due
                record = Record(
                    index,
                    due=admitted if load.closed else due,
                    admitted=admitted,
                    asked_prompt_tokens=request.prompt.tokens,
                    asked_output_tokens=request.output_tokens,
                )
                tasks.create_task(send(bodies.take(), record))
                bodies.refill()
    except asyncio.CancelledError:
        interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    seconds = clock() if interrupted else max((record.end for record in records), default=0.0)
    cpu_seconds = time.process_time() - cpu_started
    return Run(records, seconds, cpu_seconds, len(load.requests) - len(records), interrupted)


class _Bodies:
    """Bodies in order, as many of them ready as ``PREPARED_BYTES`` hold: making them must not delay what is due."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self._ready: deque[bytes] = deque()
        self._size = 0
        self.refill()

    def refill(self) -> None:
        while self._size < PREPARED_BYTES and (body := next(self._source, None)) is not None:
            self._ready.append(body)
            self._size += len(body)

    def take(self) -> bytes:
        body = self._ready.popleft()
        self._size -= len(body)
        return body


def _raise_file_limit() -> None:
    """Every request under way is an open file, and systems allow a process few of them unless it asks."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
