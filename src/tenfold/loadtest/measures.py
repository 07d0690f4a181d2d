"""From the records of requests to latencies, throughput and goodput. Times are in seconds."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tenfold.errors import TenfoldError


@dataclass(frozen=True)
class Failure:
    """Why a request failed: a ``cause`` that many share, such as ``HTTP 429``, and what was said."""

    cause: str
    message: str


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds from the start of the load.

    ``due`` is when it should have been sent, and latencies count from there; ``admitted`` is when the client's own
    limit of requests at once let it go, and what lies between that and ``sent`` is the client being late. ``gaps`` are
    the times between chunks with content, each of which may have several tokens.
    """

    index: int
    due: float
    admitted: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    end: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    has_usage: bool = False
    failure: Failure | None = None

    @property
    def chunks(self) -> int:
        return 0 if self.first is None else 1 + len(self.gaps)

    @property
    def late(self) -> float:
        return self.sent - self.admitted

    @property
    def ttft(self) -> float | None:
        """Time to the first token; None if no content came."""
        return None if self.first is None else self.first - self.due

    @property
    def itl(self) -> float | None:
        """Inter-token latency: the mean gap between chunks with content; None with fewer than two."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens or chunks."""
        if self.first is None or self.last is None or not self.gaps or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Time from when it was due to the end of the answer."""
        return self.end - self.due


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of ``ordered`` lies, between neighbours in proportion; NaN for none."""
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Distribution:
    """``count`` values; all else is NaN when there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        """Of those values that are not None."""
        ordered = sorted(value for value in values if value is not None)
        mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
        percentiles = (percentile(ordered, percent) for percent in (50, 90, 95, 99, 100))
        return cls(len(ordered), mean, *percentiles)


GOALS = ("ttft", "itl", "tpot", "e2e")


def parse_goals(goals: Iterable[str]) -> dict[str, float]:
    """``["ttft:500", "e2e:5000"]``, in milliseconds, as seconds by name.

    Raises:
        TenfoldError: a goal is not of this form.
    """
    found = {}
    for goal in goals:
        name, _, limit = goal.partition(":")
        try:
            seconds = float(limit) / 1000
        except ValueError:
            seconds = math.nan
        if name not in GOALS or not seconds > 0:
            raise TenfoldError(f"--goodput {goal!r}: write {', '.join(GOALS)} and milliseconds, such as ttft:500")
        found[name] = seconds
    return found


def meets(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether a request succeeded within all ``goals``. What one token has no measure of, it meets."""
    if record.failure is not None or ("ttft" in goals and record.ttft is None):
        return False
    return all((getattr(record, name) or 0.0) <= limit for name, limit in goals.items())


@dataclass(frozen=True)
class Run:
    """What a load left: its records, in order of their ends.

    ``seconds`` is the time from the start to the last end, ``cpu_seconds`` the client's own computation in it.
    ``unfinished`` requests were under way or not yet sent when the user ``interrupted`` the load.
    """

    records: list[Record]
    seconds: float
    cpu_seconds: float
    unfinished: int = 0
    interrupted: bool = False


@dataclass(frozen=True)
class Summary:
    """Latencies and tokens are those of requests that succeeded; rates are per second of the whole load."""

    seconds: float
    completed: int
    failed: int
    unfinished: int
    failures: Mapping[str, int]
    examples: Mapping[str, str]
    """By cause: how many requests failed, and what the first of them was told."""
    ttft: Distribution
    itl: Distribution
    """Of all gaps between chunks, not of the means of requests."""
    tpot: Distribution
    e2e: Distribution
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """Prompt tokens that the server found in its cache; None if no answer says so."""
    chunks: int
    without_usage: int
    """Answers that did not count their tokens: prompts are as long as asked, and every chunk is taken for a token."""
    other_length: int
    """Answers of more or fewer tokens than were asked for."""
    late: Distribution
    queued: Distribution
    """Time for which the client's own limit of requests at once held requests back that were due."""
    client_cores: float
    goals: Mapping[str, float]
    good: int | None
    """Requests that met all goals; None without goals."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0


def summarize(run: Run, goals: Mapping[str, float] | None = None) -> Summary:
    """The measures of a load; ``goals`` as from ``parse_goals``."""
    goals = goals or {}
    done = [record for record in run.records if record.failure is None]
    failures = [record.failure for record in run.records if record.failure is not None]
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    return Summary(
        seconds=run.seconds,
        completed=len(done),
        failed=len(failures),
        unfinished=run.unfinished,
        failures=dict(Counter(failure.cause for failure in failures).most_common()),
        examples={failure.cause: failure.message for failure in reversed(failures)},
        ttft=Distribution.of(record.ttft for record in done),
        itl=Distribution.of(gap for record in done for gap in record.gaps),
        tpot=Distribution.of(record.tpot for record in done),
        e2e=Distribution.of(record.e2e for record in done),
        prompt_tokens=sum(record.prompt_tokens for record in done),
        output_tokens=sum(record.output_tokens for record in done),
        cached_tokens=sum(cached) if cached else None,
        chunks=sum(record.chunks for record in done),
        without_usage=sum(not record.has_usage for record in done),
        other_length=sum(record.output_tokens != record.asked_output_tokens for record in done),
        late=Distribution.of(record.late for record in run.records),
        queued=Distribution.of(record.admitted - record.due for record in run.records),
        client_cores=run.cpu_seconds / run.seconds if run.seconds > 0 else 0.0,
        goals=goals,
        good=sum(meets(record, goals) for record in done) if goals else None,
    )


def output_rate(records: Iterable[Record], seconds: float, bins: int) -> list[float]:
    """Output tokens per second in each of ``bins`` equal parts of ``seconds``, those of failed requests included.

    A request's tokens are spread evenly over its chunks: how many came in which is not known.
    """
    width = seconds / bins if seconds > 0 else 1.0
    counts = [0.0] * bins
    for record in records:
        if record.first is None:
            continue
        each, moment = record.output_tokens / record.chunks, record.first
        for gap in (0.0, *record.gaps):
            moment += gap
            counts[min(max(int(moment / width), 0), bins - 1)] += each
    return [count / width for count in counts]
