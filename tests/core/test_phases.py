"""One server that goes through phases of load without a restart, on the arena of a 27B hybrid among others.

At every phase as many sessions run at once as the arithmetic of that phase alone allows: neither what earlier phases
left in the cache nor where their blocks and slots lay takes anything away from the sessions of now.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from support.instant_server import NATIVE_CONTEXT, QWEN_27B, InstantServer
from tenfold.core import CacheSpec


class Load(NamedTuple):
    """``sessions`` of ``prompt`` tokens each, submitted at once, that generate ``output`` tokens."""

    sessions: int
    prompt: int
    output: int

    def allowed(self, spec: CacheSpec) -> int:
        """Sessions at once at full length. The last token is sampled but never an input: it takes no memory."""
        return min(self.sessions, spec.num_pages // spec.pages_for(self.prompt + self.output - 1))


CHATS = Load(200, 300, 20)
FILLED = Load(200, 305, 15)
"""Prompts whose last block has room for the output, so that nobody ever grows."""
LONG = Load(3, NATIVE_CONTEXT - 64, 64)
PHASES = {
    "27B at its native context": (QWEN_27B, [CHATS, LONG, CHATS]),
    "27B at a quarter of it": (QWEN_27B, [FILLED, Load(9, NATIVE_CONTEXT // 4 - 32, 32), FILLED]),
    "27B back and forth": (QWEN_27B, [CHATS, Load(24, 32_700, 60), LONG, CHATS, Load(12, 32_700, 60)]),
    "small states": (CacheSpec(16, 3_500, 3), [CHATS, Load(6, 20_000, 40), CHATS]),
    "no states": (CacheSpec(16, 3_000), [CHATS, Load(5, 20_000, 40), CHATS]),
    "small states, filled": (CacheSpec(16, 3_500, 3), [FILLED, Load(6, 20_000, 40), FILLED]),
    "no states, filled": (CacheSpec(16, 3_000), [FILLED, Load(5, 20_000, 40), FILLED]),
}


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("phases", PHASES)
def test_every_phase_runs_what_its_own_arithmetic_allows(phases: str, prefix_caching: bool) -> None:
    spec, loads = PHASES[phases]
    server = InstantServer(spec, prefix_caching)
    peaks = []
    for load in loads:
        for _ in range(load.sessions):
            server.submit(load.prompt, load.output)
        peaks.append(max(server.drain()))
    arithmetic = [load.allowed(spec) for load in loads]
    assert all(abs(peak - count) <= 1 for peak, count in zip(peaks, arithmetic, strict=True)), (peaks, arithmetic)
    assert len(server.ended) == server.submitted, "everyone ends"
    assert server.scheduler.preemptions == 0


def mixed(rng: random.Random, sessions: int, longest: int, output: int) -> list[tuple[int, int]]:
    """Lengths of prompts and outputs, most prompts well below the longest and a few near it."""
    return [(max(1, int(longest * rng.random() ** 3)), rng.randint(1, output)) for _ in range(sessions)]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("spec", "sessions", "output"),
    [
        pytest.param(QWEN_27B, 60, 64, id="27B"),
        pytest.param(CacheSpec(16, 1_500, 7), 120, 600, id="small states"),
        pytest.param(CacheSpec(16, 1_500), 120, 600, id="no states"),
    ],
)
def test_every_phase_runs_as_on_a_server_that_just_started(
    spec: CacheSpec, sessions: int, output: int, depth: int
) -> None:
    """Step by step, with growth, moves and preemptions: what is cached of others never delays a live session."""
    rng = random.Random(depth)
    server = InstantServer(spec, True, depth)
    for longest in (800, spec.max_length // 2, 400):
        fresh = InstantServer(spec, False, depth)
        for prompt, generated in mixed(rng, sessions, longest, output):
            server.submit(prompt, generated)
            fresh.submit(prompt, generated)
        assert server.drain() == fresh.drain()
    assert len(server.ended) == server.submitted
    cache = server.scheduler.cache
    assert cache.evictions["blocks"] > 1_000, "the cache was full when others came"
    if spec is QWEN_27B:
        assert cache.pages_moved > 1_000, "slots had to go where blocks were"
    else:
        assert server.scheduler.preemptions > 0
