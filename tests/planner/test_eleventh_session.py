"""Ten sessions of 32,768 tokens run on an 80 GB device beside a 27B hybrid; the eleventh waits, and gets its turn."""

from __future__ import annotations

import pytest

from support.instant_server import QWEN_27B, InstantServer
from tenfold.core import CacheSpec, ModelSpec
from tenfold.core.invariants import check
from tenfold.planner import describe, plan_capacity

CONTEXT = 32_768
MIB = 2**20


def test_the_arena_is_the_planned_one() -> None:
    model = ModelSpec.from_config(describe("qwen3.8-27b").config)
    capacity = plan_capacity(model, 23_859 * MIB, CONTEXT)
    assert (capacity.cache.num_pages, capacity.cache.slot_pages) == (QWEN_27B.num_pages, QWEN_27B.slot_pages)
    assert capacity.paged_sessions == 10


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_eleventh_waits_until_one_ends(prefix_caching: bool) -> None:
    server = InstantServer(QWEN_27B, prefix_caching)
    outputs = [40 + 8 * (session == 9) for session in range(11)]
    outputs[3] = 20  # the first to end
    for output in outputs:
        server.submit(CONTEXT - output, output)  # all are accepted: none is refused
    scheduler = server.scheduler
    for _ in range(19):
        server.step()
        check(scheduler)
        assert list(scheduler.running) == list(range(10)), "ten run"
        assert [seq.id for seq in scheduler.waiting] == [10], "the eleventh waits"
        assert scheduler.waiting[0].issued == 0 and not scheduler.waiting[0].table, "and costs nothing"
    server.step()
    assert server.ended == {3: 19}
    server.step()
    assert server.entered[10] == [20], "it enters in the step after the first has ended"
    assert not scheduler.waiting and len(scheduler.running) == 10
    server.drain()
    assert len(server.ended) == 11 and scheduler.preemptions == 0
    assert all(len(steps) == 1 for steps in server.entered.values()), "everyone enters once"


def test_all_eleven_run_where_there_is_room_for_them() -> None:
    server = InstantServer(CacheSpec(16, 11 * QWEN_27B.pages_for(CONTEXT) + 10, QWEN_27B.slot_pages))
    for _ in range(11):
        server.submit(CONTEXT - 8, 8)
    assert max(server.drain()) == 11
