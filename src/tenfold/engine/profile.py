"""A profile of the engine: what each step spent its time on, and what each request waited for.

The file is in Chrome's trace event format and opens in chrome://tracing and ui.perfetto.dev. It holds times, counts and
ids, and nothing that a client sent: no text, no token, no salt and no key.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tenfold.core import FinishReason, Request, Scheduler, StepOutcome, StepPlan, TokenEvent
from tenfold.engine.ports import Clock, ModelRunner
from tenfold.errors import TenfoldError
from tenfold.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

DEFAULT_LIMIT = "256MiB"
"""About 300,000 steps."""
WRITE_SECONDS = 0.5
"""How often the file is written; a process that is killed loses no more than this."""

SCHEDULER, CALLS, STEPS, DELIVERY = 1, 2, 3, 4
TRACKS = {
    SCHEDULER: "scheduler",
    CALLS: "calls of the runner",
    STEPS: "runner's steps",
    DELIVERY: "event delivery",
}
"""Rows of the picture, from the top; to the viewers they are threads."""

PAGE = 4096
"""Bytes that reach a file together or not at all: a write that is cut short by a kill ends where a page ends."""
END = b"\n]\n"


class TraceFile:
    """Trace events on their way to a file, in the format's JSON array form.

    A thread of its own encodes and writes them, so that the engine only ever appends to a queue. Readers do without
    the closing bracket, and no event lies across two pages of the file, so whatever a killed process leaves can be
    opened.

    Args:
        path: the file; one that exists is overwritten.
        limit: bytes of the file at most. Where they end, the file is closed in order and later events are dropped.

    Raises:
        TenfoldError: the file cannot be written.
    """

    def __init__(self, path: str | Path, limit: int) -> None:
        self.path = Path(path)
        self._limit = limit
        self._size = 0
        self._pending: deque[dict[str, Any]] = deque()
        self._open = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenfold-profile", daemon=True)
        try:
            self._file = self.path.open("wb")
            # Commas go before events, not after them: cut after any event, the file lacks nothing but the bracket.
            self._put(b"[\n" + _encode({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "tenfold"}}))
        except OSError as error:
            raise TenfoldError(f"the profile {self.path} cannot be written: {error.strerror or error}") from error

    def start(self) -> None:
        """Write from now on; until then events wait."""
        self._thread.start()

    def add(self, event: dict[str, Any]) -> None:
        """Append one event. May be called from any thread."""
        if self._open:
            self._pending.append(event)

    def close(self) -> None:
        """Write what is left and complete the file. Does nothing the second time."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._write()
        self._finish()

    def _run(self) -> None:
        while not self._stop.wait(WRITE_SECONDS):
            self._write()

    def _write(self) -> None:
        if not self._open:
            return
        full = False
        try:
            page = bytearray()
            for _ in range(len(self._pending)):
                line = b",\n" + _encode(self._pending.popleft())
                room = PAGE - (self._size + len(page)) % PAGE
                padding = room if len(line) > room else 0
                full = self._size + len(page) + padding + len(line) + len(END) > self._limit
                if full:
                    break
                if padding:
                    self._put(page + b" " * padding)
                    page.clear()
                page += line
            self._put(page)
        except OSError as error:
            logger.warning("the profile %s cannot be written any more and ends: %s", self.path, error)
            full = True
        else:
            if full:
                limit = format_bytes(self._limit)
                logger.warning("the profile %s has reached its limit of %s and ends", self.path, limit)
        if full:
            self._finish()

    def _put(self, data: bytes | bytearray) -> None:
        self._file.write(data)
        self._file.flush()
        self._size += len(data)

    def _finish(self) -> None:
        if not self._open:
            return
        self._open = False
        self._pending.clear()
        with suppress(OSError), self._file:  # where the disk is full the bracket is missing
            self._file.write(END)


class Profile:
    """An ``Instrument`` that writes a trace.

    Steps are spans in the rows of ``TRACKS``; a request is a span of its own, divided into ``queued``, ``prefill`` and
    ``decode``, with an instant ``preempted`` wherever it lost its memory; counters follow the queue, the arena and the
    tokens of each step.

    Args:
        path: the file; one that exists is overwritten.
        limit: size of the file at most, in bytes or for example ``"256MiB"``.
        clock: must be the engine's.

    Raises:
        TenfoldError: the file cannot be written, or the limit is not a size.
    """

    def __init__(self, path: str | Path, limit: str | int = DEFAULT_LIMIT, clock: Clock = time.monotonic) -> None:
        self._file = TraceFile(path, parse_bytes(limit))
        self._clock = clock
        self._start = clock()
        self._scheduler: Scheduler  # from ``watch`` on
        self._phases: dict[int, str] = {}  # of every live request
        self._prefilling: dict[int, int] = {}  # epochs of those whose prompt is being computed
        self._under_way: deque[tuple[int, float, dict[str, int]]] = deque()  # steps: number, submission, arguments
        self._step_end = self._start
        for track, name in TRACKS.items():
            for kind, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track})):
                self._file.add({"ph": "M", "pid": 1, "tid": track, "name": kind, "args": value})
        atexit.register(self.close)

    def watch(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        """Start the trace of an engine with this scheduler and this runner."""
        self._scheduler = scheduler
        self.time_call(scheduler, "plan", SCHEDULER)
        self.time_call(runner, "submit", CALLS)
        self.time_call(runner, "collect", CALLS)
        self.time_call(scheduler, "commit", SCHEDULER)
        self._file.start()

    def time_call(self, owner: object, method: str, track: int) -> None:
        """Make every call of this method of ``owner`` a span.

        A function takes the method's place in the one object that is watched. So an engine without a profile does not
        pay for it, not even by asking whether there is one.
        """
        call: Callable[..., Any] = getattr(owner, method)
        name = method.lstrip("_")

        def timed(*args: Any) -> Any:
            began = self._clock()
            try:
                return call(*args)
            finally:
                self._span(track, name, began, self._clock())

        setattr(owner, method, timed)

    def close(self) -> None:
        """End the spans of requests that are still live and complete the file. Does nothing the second time.

        Happens by itself when the interpreter ends in order.
        """
        atexit.unregister(self.close)
        now = self._clock()
        for sequence in list(self._phases):
            self._end(sequence, "unfinished", now)
        self._file.close()

    # Instrument

    def submitted(self, request: Request, now: float) -> None:
        numbers = {"prompt_tokens": len(request.prompt), "max_tokens": request.max_tokens}
        self._async("b", request.id, f"request {request.id}", now, numbers)
        self._phases[request.id] = "queued"
        self._async("b", request.id, "queued", now)

    def planned(self, plan: StepPlan, now: float) -> None:
        for sequence in plan.preempted:
            self._preempted(sequence, now)
        for entry in plan.entries:
            if not entry.params.use_beam_search:  # beams enter whenever they fork
                self._preempted(entry.sequence, now)  # if so, then by an attempt at a plan that came to nothing
            if self._phases.get(entry.sequence) == "queued":
                self._turn(entry.sequence, "prefill", now)
                self._prefilling[entry.sequence] = entry.epoch
        decodes = sum(work.length == 1 and work.sample for work in plan.work)
        tokens = plan.num_tokens
        numbers = {
            "tokens": tokens,
            "decode_sequences": decodes,
            "prefill_tokens": tokens - decodes,
            "pages_copied": sum(copy.pages for copy in plan.copies),
            "free_pages": self._scheduler.cache.arena.free,
        }
        self._under_way.append((plan.step, self._clock(), numbers))

    def stepped(self, plan: StepPlan, outcome: StepOutcome, events: list[TokenEvent], now: float) -> None:
        tokens = self._step(plan.step, outcome.seconds, now)
        if self._prefilling:
            for work in plan.work:
                if work.sample:
                    self._computed(work.sequence, work.epoch, now)
            for entry in plan.entries:
                if entry.source >= 0:
                    self._computed(entry.sequence, entry.epoch, now)
        scheduler, arena = self._scheduler, self._scheduler.cache.arena
        self._count("sequences", now, running=len(scheduler.running), waiting=len(scheduler.waiting))
        self._count("pages", now, free=arena.free, cached=arena.cached)
        if scheduler.spec.slot_pages:
            self._count("state slots", now, free=arena.slots_free)
        self._count("step", now, tokens=tokens)

    def ended(self, request: Request, reason: FinishReason, now: float) -> None:
        self._end(request.id, reason.value, now)

    # Details

    def _step(self, step: int, seconds: float, now: float) -> int:
        """Add the span of a step in the runner and return its tokens.

        Steps run one after the other: one that was submitted early begins when the one before it ends.
        """
        number, began, numbers = self._under_way.popleft()
        while number != step:  # that one failed, and nothing came back
            number, began, numbers = self._under_way.popleft()
        began = max(began, self._step_end)
        self._step_end = min(began + seconds, now)
        self._span(STEPS, f"step {number}", began, self._step_end, numbers)
        return numbers["tokens"]

    def _computed(self, sequence: int, epoch: int, now: float) -> None:
        if self._prefilling.get(sequence) == epoch:  # an outcome of an older epoch is void
            del self._prefilling[sequence]
            self._turn(sequence, "decode", now)

    def _preempted(self, sequence: int, now: float) -> None:
        if self._phases.get(sequence, "queued") != "queued":
            self._async("n", sequence, "preempted", now)
            self._turn(sequence, "queued", now)
            self._prefilling.pop(sequence, None)

    def _turn(self, sequence: int, phase: str, now: float) -> None:
        self._async("e", sequence, self._phases[sequence], now)
        self._phases[sequence] = phase
        self._async("b", sequence, phase, now)

    def _end(self, sequence: int, reason: str, now: float) -> None:
        phase = self._phases.pop(sequence, None)
        self._prefilling.pop(sequence, None)
        if phase is not None:
            self._async("e", sequence, phase, now)
            self._async("e", sequence, f"request {sequence}", now, {"finish_reason": reason})

    def _async(self, kind: str, sequence: int, name: str, now: float, args: dict[str, Any] | None = None) -> None:
        event = {"ph": kind, "pid": 1, "ts": self._time(now), "cat": "request", "id": sequence, "name": name}
        self._file.add({**event, "args": args} if args else event)

    def _span(self, track: int, name: str, began: float, ended: float, args: dict[str, int] | None = None) -> None:
        begin = self._time(began)
        duration = round(self._time(ended) - begin, 3)
        event = {"ph": "X", "pid": 1, "tid": track, "ts": begin, "dur": duration, "name": name}
        self._file.add({**event, "args": args} if args else event)

    def _count(self, name: str, now: float, **values: int) -> None:
        self._file.add({"ph": "C", "pid": 1, "ts": self._time(now), "name": name, "args": values})

    def _time(self, seconds: float) -> float:
        """Microseconds since the start of the trace, to the nanosecond."""
        return round(1e6 * (seconds - self._start), 3)


def _encode(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode("ascii")
