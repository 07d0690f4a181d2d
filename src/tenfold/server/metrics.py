"""The engine's counters for Prometheus, read when somebody asks and counted nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tenfold.engine.metrics import SECONDS, Histogram, Metrics
from tenfold.engine.service import EngineThread
from tenfold.errors import EngineError

PATIENCE = 0.2
"""Seconds to wait for the end of a step; after that the engine is read while it computes."""
ATTEMPTS = 20
CONTENT_TYPE = CONTENT_TYPE_LATEST

HISTOGRAMS = {
    "queue_delay": "Seconds from arrival to the first step that works on a request.",
    "time_to_first_token": "Seconds from arrival to the first token.",
    "inter_token_latency": "Seconds between two tokens of one request.",
    "step": "Seconds that a step took on the device.",
}


@dataclass(frozen=True)
class Snapshot:
    """The numbers of one moment; a histogram is its bucket counts and the sum of what was observed."""

    stats: dict[str, Any]
    histograms: dict[str, tuple[list[int], float]]


def snapshot(metrics: Metrics) -> Snapshot:
    observed: dict[str, Histogram] = {
        "queue_delay": metrics.queue_delay,
        "time_to_first_token": metrics.time_to_first_token,
        "inter_token_latency": metrics.inter_token_latency,
        "step": metrics.step_seconds,
    }
    return Snapshot(metrics.stats(), {name: (list(seen.counts), seen.total) for name, seen in observed.items()})


class EngineMetrics(Collector):
    """Metrics of one engine in a registry of their own, with those of the process."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._snapshot = snapshot(thread.engine.metrics)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def render(self) -> bytes:
        """The exposition in Prometheus' text format."""
        self._snapshot = await self._read()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from _gauges(self._snapshot.stats)
        yield from _counters(self._snapshot.stats)
        for name, text in HISTOGRAMS.items():
            yield _histogram(f"tenfold_{name}_seconds", text, *self._snapshot.histograms[name])

    async def _read(self) -> Snapshot:
        """Between two steps if that is soon, else beside a long step, while which next to nothing changes."""
        metrics = self._thread.engine.metrics
        try:
            return await asyncio.wait_for(self._thread.call(lambda: snapshot(metrics)), PATIENCE)
        except (TimeoutError, EngineError):
            pass
        for _ in range(ATTEMPTS):
            try:
                return snapshot(metrics)
            except RuntimeError:  # a dictionary changed while it was read
                await asyncio.sleep(0)
        return self._snapshot


def _gauges(stats: dict[str, Any]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("tenfold_blocks", "KV blocks of the arena by state.", labels=["state"])
    for state, count in stats["blocks"].items():
        blocks.add_metric([state], count)
    yield blocks
    slots = GaugeMetricFamily("tenfold_state_slots", "Slots of recurrent state by state.", labels=["state"])
    for state, count in stats["state_slots"].items():
        slots.add_metric([state], count)
    yield slots
    for name, text in (
        ("tail_waste_tokens", "Token places in referenced blocks that hold no token."),
        ("requests_running", "Sequences that hold memory."),
        ("requests_waiting", "Sequences in the queue."),
    ):
        yield GaugeMetricFamily(f"tenfold_{name}", text, value=stats[name])


def _counters(stats: dict[str, Any]) -> Iterator[Metric]:
    for name, text in (
        ("preemptions", "Sequences that gave their memory back to be computed again."),
        ("pages_moved", "Pages moved to make room for a state slot."),
    ):
        yield CounterMetricFamily(f"tenfold_{name}", text, value=stats[name])
    for name, label, text, key in (
        ("allocation_failures", "pool", "Requests for memory that found none, by pool.", "allocation_failures"),
        ("evictions", "kind", "Cached blocks and checkpoints given up for something else, by kind.", "evictions"),
        ("prefix_tokens", "outcome", "Prompt tokens: found in the cache (hit), or computed and why.", "prefix_tokens"),
        ("requests", "outcome", "Sequences that ended, by outcome.", "requests"),
        ("tokens", "kind", "Tokens of admitted prompts and generated tokens.", "tokens"),
    ):
        family = CounterMetricFamily(f"tenfold_{name}", text, labels=[label])
        for value, count in stats[key].items():
            family.add_metric([value], count)
        yield family


def _histogram(name: str, text: str, counts: list[int], total: float) -> Metric:
    buckets, below = [], 0
    for bound, count in zip((*SECONDS, float("inf")), counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total)
