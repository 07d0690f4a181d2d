"""Steps as seen from outside: who takes part in each, what it costs them, and that the text never depends on it."""

from __future__ import annotations

import random

import pytest

from support.hash_runner import HashRunner, reference
from tenfold.core import (
    CacheSpec,
    Copy,
    FinishReason,
    Request,
    Rewrite,
    SamplingParams,
    Scheduler,
    StepOutcome,
    StepPlan,
    TokenEvent,
    TokenLogprobs,
)
from tenfold.core.invariants import check

DENSE = CacheSpec(block_size=4, num_pages=64)
HYBRID = CacheSpec(block_size=4, num_pages=64, slot_pages=3)
TIGHT = [CacheSpec(block_size=4, num_pages=12), CacheSpec(block_size=4, num_pages=15, slot_pages=2)]


def request(number: int, prompt: int, max_tokens: int, stop: frozenset[int] = frozenset()) -> Request:
    tokens = tuple((number + i) % 3 for i in range(prompt))
    return Request(number, tokens, max_tokens, SamplingParams(max_tokens=max_tokens), stop)


class Serving:
    """A scheduler and a runner with up to ``depth`` steps under way, checked after every event."""

    def __init__(self, spec: CacheSpec, budget: int, rows: int = 8, depth: int = 1) -> None:
        self.scheduler = Scheduler(spec, budget, rows, prefix_caching=False)
        self.runner = HashRunner(spec, self.scheduler.max_sequences)
        self.depth = depth
        self.text: dict[int, list[int]] = {}

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.runner.submit(plan)
        check(self.scheduler)
        return plan

    def commit(self) -> list[TokenEvent]:
        events = self.scheduler.commit(self.runner.collect())
        for event in events:
            self.text.setdefault(event.sequence, []).append(event.token)
        check(self.scheduler)
        return events

    def step(self) -> tuple[StepPlan, list[TokenEvent]]:
        plan = self.plan()
        assert plan is not None
        return plan, self.commit()

    def run(self, requests: list[Request]) -> dict[int, list[int]]:
        for each in requests:
            self.scheduler.submit(each)
        while self.scheduler.live or self.scheduler.inflight:
            while len(self.scheduler.inflight) < self.depth and self.plan() is not None:
                pass
            self.commit()
        return self.text

    @property
    def pages_held(self) -> int:
        return self.scheduler.spec.num_pages - self.scheduler.cache.arena.free


@pytest.mark.parametrize("spec", [DENSE, HYBRID])
def test_every_decode_gets_its_token_while_a_long_prompt_is_prefilled(spec: CacheSpec) -> None:
    budget = 10
    serving = Serving(spec, budget)
    short = [request(i, 3, 40) for i in range(3)]
    for each in short:
        serving.scheduler.submit(each)
    serving.step()
    long = request(3, 90, 4)
    serving.scheduler.submit(long)
    chunks = []
    while not serving.text.get(3):
        plan, events = serving.step()
        assert plan.num_tokens <= budget
        assert {event.sequence for event in events} >= {0, 1, 2}, "nobody waits for somebody else's prompt"
        share = [work for work in plan.work if work.sequence == 3]
        assert len(share) == 1
        chunks.append((share[0].start, share[0].length))
    assert sum(length for _, length in chunks) == 90
    assert [start for start, _ in chunks] == [7 * i for i in range(13)]
    assert all(length == budget - 3 for _, length in chunks[:-1]), "the chunk takes what the decodes leave"
    while serving.scheduler.live:
        serving.step()
    assert serving.text == {each.id: reference(each, bool(spec.slot_pages)) for each in [*short, long]}


def test_a_finished_prompt_and_the_next_one_share_a_step() -> None:
    serving = Serving(DENSE, 10)
    serving.scheduler.submit(request(0, 12, 2))
    serving.scheduler.submit(request(1, 12, 2))
    plan, _ = serving.step()
    assert [(work.sequence, work.length, work.sample) for work in plan.work] == [(0, 10, False)]
    plan, events = serving.step()
    assert [(work.sequence, work.length, work.sample) for work in plan.work] == [(0, 2, True), (1, 8, False)]
    assert [event.sequence for event in events] == [0]


@pytest.mark.parametrize("spec", TIGHT, ids=["dense", "hybrid"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preempted_sequence_restarts_and_yields_the_same_text(spec: CacheSpec, depth: int) -> None:
    requests = [request(i, 6, 25) for i in range(4)]
    serving = Serving(spec, 16, depth=depth)
    text = serving.run(requests)
    assert serving.scheduler.preemptions > 0
    assert text == {each.id: reference(each, bool(spec.slot_pages)) for each in requests}
    assert serving.pages_held == 0


def test_the_youngest_gives_way_and_the_plan_says_so() -> None:
    serving = Serving(CacheSpec(block_size=4, num_pages=4), 16)
    for number in (0, 1):
        serving.scheduler.submit(request(number, 3, 13))
    plans = []
    while serving.scheduler.preemptions == 0:
        plans.append(serving.step()[0])
    assert plans[-1].preempted == (1,)
    assert [work.sequence for work in plans[-1].work] == [0]
    seq = serving.scheduler.live[1]
    assert (seq.epoch, seq.issued, seq.table) == (1, 0, [])
    assert serving.scheduler.waiting == [seq]
    assert len(seq.tokens) > 3, "what was generated is kept"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_slot_moves_running_blocks_and_the_text_stays(depth: int) -> None:
    """Pages 0-5 are of sequence 0 and 6-12 of sequence 1. When 0 is gone, 3 takes the slot on pages 11-13."""
    serving = Serving(CacheSpec(block_size=4, num_pages=20, slot_pages=3), 64, depth=depth)
    requests = [request(0, 23, 9), request(1, 27, 9), request(2, 3, 5), request(3, 3, 5)]
    for each in requests[:2]:
        serving.scheduler.submit(each)
    serving.plan()
    serving.scheduler.cancel(0)
    for each in requests[2:]:
        serving.scheduler.submit(each)
    if depth == 1:
        serving.commit()
    plan = serving.plan()
    assert plan is not None
    assert plan.copies == (Copy(11, 1, 2),)
    row = serving.scheduler.live[1].row
    assert plan.rewrites == (Rewrite(row, 5, 1), Rewrite(row, 6, 2))
    assert serving.run([]) == {each.id: reference(each, True) for each in requests[1:]}
    assert serving.scheduler.cache.pages_moved == 2 and serving.pages_held == 0


def test_many_moves_leave_every_text_as_it_is() -> None:
    """Long sequences fill the low pages, all but the latest leave, and short ones take slots where its blocks lie.

    Cases are drawn from fixed seeds, so that the number of them that meet a move is the same in every run.
    """
    met = 0
    for seed in range(150):
        draw = random.Random(seed).randint
        serving = Serving(CacheSpec(draw(1, 3), draw(24, 40), draw(2, 4)), 64, depth=draw(1, 3))
        lengths = [draw(6, 20) for _ in range(draw(2, 3))]
        long = [request(i, length, 6) for i, length in enumerate(lengths)]
        short = [request(i, draw(1, 3), 6) for i in range(len(long), len(long) + draw(2, 6))]
        long = [each for each in long if serving.scheduler.spec.max_length >= len(each.prompt) + 5]
        for each in long:
            serving.scheduler.submit(each)
        serving.plan()
        for number in list(serving.scheduler.running)[:-1]:
            serving.scheduler.cancel(number)
        left = [each for each in long if each.id in serving.scheduler.live]
        assert serving.run(short) == {each.id: reference(each, True) for each in left + short}, f"seed {seed}"
        assert serving.pages_held == 0
        met += serving.scheduler.cache.pages_moved > 0
    assert met >= 20, "a test of moves that meets few of them proves little"


@pytest.mark.parametrize("spec", [DENSE, HYBRID, *TIGHT], ids=["dense", "hybrid", "tight dense", "tight hybrid"])
def test_depth_does_not_change_the_text(spec: CacheSpec) -> None:
    requests = [request(i, 4 + 3 * i, 6 + i, frozenset({6}) if i % 2 else frozenset()) for i in range(6)]
    expected = {each.id: reference(each, bool(spec.slot_pages)) for each in requests}
    for depth in (1, 2, 3):
        assert Serving(spec, 9, depth=depth).run(requests) == expected, f"depth {depth}"


def test_at_depth_two_a_step_is_planned_before_its_input_is_known() -> None:
    serving = Serving(DENSE, 16, depth=2)
    serving.scheduler.submit(request(0, 3, 5))
    first, second = serving.plan(), serving.plan()
    assert first is not None and second is not None
    assert first.work[0].tokens == (0, 1, 2)
    assert (second.work[0].start, second.work[0].length, second.work[0].tokens) == (3, 1, ())


def test_no_step_is_planned_past_the_last_token() -> None:
    serving = Serving(DENSE, 16, depth=3)
    serving.scheduler.submit(request(0, 3, 2))
    assert serving.plan() is not None
    assert serving.plan() is not None
    assert serving.plan() is None, "both tokens are under way"
    serving.commit()
    assert [event.finish_reason for event in serving.commit()] == [FinishReason.LENGTH]
    assert serving.plan() is None and not serving.scheduler.live


@pytest.mark.parametrize("spec", [DENSE, HYBRID])
def test_cancelling_what_waits(spec: CacheSpec) -> None:
    serving = Serving(spec, 16, rows=1)
    serving.scheduler.submit(request(0, 3, 9))
    serving.scheduler.submit(request(1, 3, 9))
    serving.step()
    held = serving.pages_held
    assert serving.scheduler.cancel(1)
    check(serving.scheduler)
    assert not serving.scheduler.waiting and serving.pages_held == held


@pytest.mark.parametrize("spec", [DENSE, HYBRID])
def test_cancelling_half_way_through_a_prompt_frees_at_once(spec: CacheSpec) -> None:
    serving = Serving(spec, 8)
    serving.scheduler.submit(request(0, 30, 4))
    serving.step()
    assert serving.pages_held == 2 + spec.slot_pages
    assert serving.scheduler.cancel(0)
    check(serving.scheduler)
    assert serving.pages_held == 0
    assert serving.plan() is None


@pytest.mark.parametrize("spec", [DENSE, HYBRID])
def test_cancelling_between_two_tokens_frees_at_once(spec: CacheSpec) -> None:
    serving = Serving(spec, 8)
    serving.scheduler.submit(request(0, 3, 9))
    serving.step()
    serving.step()
    assert serving.scheduler.cancel(0)
    assert serving.pages_held == 0
    assert not serving.scheduler.cancel(0), "it is not live any more"


@pytest.mark.parametrize("spec", [DENSE, HYBRID])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_cancelling_in_flight_frees_at_once_and_voids_what_comes_back(spec: CacheSpec, depth: int) -> None:
    serving = Serving(spec, 8, depth=depth)
    other = request(1, 3, 6)
    serving.scheduler.submit(request(0, 3, 9))
    serving.scheduler.submit(other)
    for _ in range(depth):
        assert serving.plan() is not None
    held = serving.pages_held
    assert serving.scheduler.cancel(0)
    check(serving.scheduler)
    assert serving.pages_held < held
    assert {event.sequence for _ in range(depth) for event in serving.commit()} == {1}
    serving.run([])
    assert serving.text == {1: reference(other, bool(spec.slot_pages))}


def test_cancelling_what_was_preempted() -> None:
    serving = Serving(CacheSpec(block_size=4, num_pages=4), 16)
    for number in (0, 1):
        serving.scheduler.submit(request(number, 3, 13))
    while serving.scheduler.preemptions == 0:
        serving.step()
    assert serving.scheduler.cancel(1)
    check(serving.scheduler)
    assert list(serving.scheduler.live) == [0] and not serving.scheduler.waiting
    serving.run([])
    assert serving.text[0] == reference(request(0, 3, 13), False)


def test_cancelling_what_has_finished_or_never_was() -> None:
    serving = Serving(DENSE, 16)
    serving.run([request(0, 3, 2)])
    assert not serving.scheduler.cancel(0)
    assert not serving.scheduler.cancel(7)


def test_a_stop_token_ends_the_text_but_not_before_min_tokens() -> None:
    for min_tokens, expected in ((0, [5]), (1, [5, 5]), (2, [5, 5, 5])):
        scheduler = Scheduler(DENSE, 16)
        params = SamplingParams(max_tokens=9, min_tokens=min_tokens)
        scheduler.submit(Request(0, (1, 2), 9, params, frozenset({5})))
        tokens, reason = [], None
        while scheduler.live:
            plan = scheduler.plan()
            assert plan is not None
            for event in scheduler.commit(StepOutcome(plan.step, [5])):
                tokens.append(event.token)
                reason = event.finish_reason
        assert (tokens, reason) == (expected, FinishReason.STOP)


def test_logprobs_reach_the_sequence_they_are_of() -> None:
    scheduler = Scheduler(DENSE, 10)
    for number, prompt in ((0, 2), (1, 30), (2, 2)):
        scheduler.submit(request(number, prompt, 4))
    plan = scheduler.plan()
    assert plan is not None and [work.sample for work in plan.work] == [True, False]
    scheduler.commit(StepOutcome(plan.step, [3], (TokenLogprobs(-0.5, ()),)))
    scheduler.cancel(0)
    scheduler.submit(request(3, 2, 4))
    while scheduler.live.keys() == {1, 2, 3}:
        plan = scheduler.plan()
        assert plan is not None
        sampling = [work.sequence for work in plan.work if work.sample]
        logprobs = tuple(TokenLogprobs(-float(sequence), ()) for sequence in sampling)
        for event in scheduler.commit(StepOutcome(plan.step, sampling, logprobs)):
            assert event.token == event.sequence
            assert event.logprobs == TokenLogprobs(-float(event.sequence), ())


def test_outcomes_come_in_plan_order() -> None:
    scheduler = Scheduler(DENSE, 16)
    scheduler.submit(request(0, 3, 4))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(RuntimeError, match="outcome of step 8 where step 0 was due"):
        scheduler.commit(StepOutcome(8, [0]))


def test_everyone_who_runs_has_a_place_in_every_step() -> None:
    assert Scheduler(DENSE, max_batch_tokens=3, max_sequences=8).max_sequences == 3
    for budget, rows in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Scheduler(DENSE, budget, rows)
