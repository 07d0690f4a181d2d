"""Counters, gauges and histograms of the engine, in the terms of its users. Export is somebody else's task.

Tokens that come back in one step share their gap to the step before, so that a step costs a few additions rather than
an observation per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from typing import Any

from tenfold.core import FinishReason, Request, Scheduler, StepOutcome, StepPlan, TokenEvent

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bucket bounds of every time histogram."""
RECENT = 64
"""Completions that the expected wait is estimated from."""


class Histogram:
    """Cumulative-free bucket counts over ``SECONDS``; the last bucket is unbounded."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += times
        self.total += seconds * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


class _Times:
    """What is remembered of a live request."""

    __slots__ = ("arrival", "latest", "started")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.started = False
        self.latest = 0.0  # when its last token came back; 0 before the first


class Metrics:
    """An ``Instrument`` that counts. ``stats`` reads everything as plain numbers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.queue_delay = Histogram()
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.step_seconds = Histogram()
        self.requests: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.tokens: Counter[str] = Counter(prompt=0, output=0)
        self._live: dict[int, _Times] = {}
        self._ends: deque[float] = deque(maxlen=RECENT)
        self._collected = 0.0

    def submitted(self, request: Request, now: float) -> None:
        self._live[request.id] = _Times(now)

    def planned(self, plan: StepPlan, now: float) -> None:
        for entry in plan.entries:
            times = self._live.get(entry.sequence)
            if times is not None and not times.started:
                times.started = True
                self.tokens["prompt"] += entry.prompt_length if entry.source < 0 else 0
                self.queue_delay.observe(now - times.arrival)

    def stepped(self, plan: StepPlan, outcome: StepOutcome, events: list[TokenEvent], now: float) -> None:
        self.step_seconds.observe(outcome.seconds)
        self.tokens["output"] += len(events)
        previous, steady, live = self._collected, 0, self._live
        for event in events:
            times = live[event.sequence]
            latest = times.latest
            times.latest = now
            if latest == previous and latest:
                steady += 1
            elif latest:
                self.inter_token_latency.observe(now - latest)
            else:
                self.time_to_first_token.observe(now - times.arrival)
        if steady:
            self.inter_token_latency.observe(now - previous, steady)
        self._collected = now

    def ended(self, request: Request, reason: FinishReason, now: float) -> None:
        self._live.pop(request.id, None)
        self._ends.append(now)
        self.requests[reason.value] += 1

    def expected_wait(self, now: float) -> float:
        """Seconds until the queue has drained at the recent rate of completion; at least 1."""
        waiting = len(self.scheduler.waiting)
        if len(self._ends) < 2 or now <= self._ends[0]:
            return 1.0
        return max(1.0, waiting * (now - self._ends[0]) / len(self._ends))

    def stats(self) -> dict[str, Any]:
        """Everything at this moment. Counts are whole numbers, times seconds (None where nothing was observed)."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        arena, spec = cache.arena, cache.spec
        checkpoints = len(cache.index.checkpoints)
        slots = arena.slots_taken
        return {
            "pages": spec.num_pages,
            "page_bytes": spec.page_bytes,
            "block_size": spec.block_size,
            "blocks": {
                "free": arena.free,
                "referenced": spec.num_pages - arena.free - arena.cached - slots * spec.slot_pages,
                "cached": arena.cached,
            },
            "state_slots": {"free": arena.slots_free, "taken": slots - checkpoints, "checkpoint": checkpoints},
            "prefix_tokens": dict(cache.prefix_tokens),
            "evictions": dict(cache.evictions),
            "tail_waste_tokens": cache.tail_waste,
            "allocation_failures": dict(cache.failures),
            "preemptions": scheduler.preemptions,
            "pages_moved": cache.pages_moved,
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "requests": dict(self.requests),
            "tokens": dict(self.tokens),
            "steps": scheduler.step,
            "queue_delay_seconds_mean": self.queue_delay.mean,
            "time_to_first_token_seconds_mean": self.time_to_first_token.mean,
            "inter_token_latency_seconds_mean": self.inter_token_latency.mean,
            "step_seconds_mean": self.step_seconds.mean,
        }
