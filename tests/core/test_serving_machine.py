"""Random specs, budgets and depths; random submissions and cancellations; every invariant after every event."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.hash_runner import HashRunner, reference
from tenfold.core import CacheSpec, Request, SamplingParams, Scheduler, StepOutcome, StepPlan
from tenfold.core.invariants import check
from tenfold.errors import RequestError

SPECS = st.builds(
    CacheSpec,
    block_size=st.integers(1, 4),
    num_pages=st.integers(4, 32),
    slot_pages=st.sampled_from([0, 1, 2, 3, 5]),
)
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=20).map(tuple)


class Serving(RuleBasedStateMachine):
    @initialize(
        spec=SPECS, budget=st.integers(1, 24), rows=st.integers(1, 8), depth=st.integers(1, 3), reuse=st.booleans()
    )
    def start(self, spec: CacheSpec, budget: int, rows: int, depth: int, reuse: bool) -> None:
        self.scheduler = Scheduler(spec, budget, rows, prefix_caching=reuse)
        self.runner = HashRunner(spec, self.scheduler.max_sequences)
        self.depth = depth
        self.requests: dict[int, Request] = {}
        self.text: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.cancelled: set[int] = set()
        self.next_id = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 30),
        stop=st.sampled_from([frozenset(), frozenset({0}), frozenset({1, 2})]),
        min_tokens=st.integers(0, 2),
    )
    def submit(self, prompt: tuple[int, ...], max_tokens: int, stop: frozenset[int], min_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
        request = Request(self.next_id, prompt, max_tokens, params, stop)
        self.next_id += 1
        fits = self.scheduler.spec.pages_for(len(prompt) + max_tokens - 1) <= self.scheduler.spec.num_pages
        if not fits:
            with pytest.raises(RequestError, match="blocks"):
                self.scheduler.submit(request)
            return
        self.scheduler.submit(request)
        self.requests[request.id], self.text[request.id] = request, []

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=PROMPTS, max_tokens=st.integers(1, 12), samples=st.integers(1, 3))
    def continue_earlier(self, data: st.DataObject, more: tuple[int, ...], max_tokens: int, samples: int) -> None:
        """Prompts that share a beginning with what an earlier sequence saw and wrote, several samples of each."""
        earlier = data.draw(st.sampled_from(sorted(self.requests)))
        history = self.requests[earlier].prompt + tuple(self.text[earlier])
        shared = history[: data.draw(st.integers(1, len(history)))]
        prompt = shared + more[: data.draw(st.integers(0, len(more)))]
        breakpoints = tuple(data.draw(st.lists(st.integers(0, len(prompt)), max_size=2)))
        salt = data.draw(st.sampled_from(["", "tenant"]))
        if self.scheduler.spec.pages_for(len(prompt) + max_tokens - 1) > self.scheduler.spec.num_pages:
            return
        params = SamplingParams(max_tokens=max_tokens)
        requests = [
            Request(self.next_id + i, prompt, max_tokens, params, cache_salt=salt, breakpoints=breakpoints)
            for i in range(samples)
        ]
        self.next_id += samples
        self.scheduler.submit(*requests)
        for request in requests:
            self.requests[request.id], self.text[request.id] = request, []

    @precondition(lambda self: self.scheduler.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.scheduler.live)))
        dropped = self.scheduler.cancel(victim)
        assert victim in dropped
        assert not self.scheduler.cancel(victim)
        self.cancelled.add(victim)

    @precondition(lambda self: len(self.scheduler.inflight) < self.depth)
    @rule()
    def plan(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.runner.submit(plan)
        else:
            assert self.scheduler.inflight or not self.scheduler.live, "an idle device always gets work"

    @precondition(lambda self: self.scheduler.inflight)
    @rule()
    def commit(self) -> None:
        for event in self.scheduler.commit(self.runner.collect()):
            assert event.sequence not in self.finished | self.cancelled, "no token after the end"
            self.text[event.sequence].append(event.token)
            if event.finish_reason:
                self.finished.add(event.sequence)

    @rule(steps=st.integers(1, 12))
    def advance(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.scheduler.inflight) < self.depth:
                self.plan()
            if self.scheduler.inflight and len(self.scheduler.inflight) == self.depth:
                self.commit()
            check(self.scheduler)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            check(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.scheduler.live and not self.scheduler.inflight:
                break
            if len(self.scheduler.inflight) < self.depth:
                self.plan()
            if self.scheduler.inflight:
                self.commit()
            check(self.scheduler)
        assert not self.scheduler.live, "everything ends"
        assert self.scheduler.cache.available == self.scheduler.spec.num_pages, "nobody holds a page"
        assert self.finished | self.cancelled == set(self.requests)
        for i, request in self.requests.items():
            expected = reference(request, bool(self.scheduler.spec.slot_pages))
            if i in self.cancelled:
                expected = expected[: len(self.text[i])]
            assert self.text[i] == expected, f"request {i}"


TestServing = Serving.TestCase
TestServing.settings = settings(
    max_examples=int(os.environ.get("TENFOLD_TEST_EXAMPLES", "200")),
    stateful_step_count=60,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def run(runner, scheduler: Scheduler, requests: list[Request], depth: int) -> list[StepPlan]:
    plans = []
    for request in requests:
        scheduler.submit(request)
    while scheduler.live or scheduler.inflight:
        while len(scheduler.inflight) < depth and (plan := scheduler.plan()):
            plans.append(plan)
            runner.submit(plan)
        scheduler.commit(runner.collect())
    return plans


class TokenlessRunner:
    """Answers every sample with token 0, as a simulator does."""

    def __init__(self) -> None:
        self.done: list[StepOutcome] = []

    def submit(self, plan: StepPlan) -> None:
        self.done.append(StepOutcome(plan.step, [0] * sum(w.sample for w in plan.work)))

    def collect(self) -> StepOutcome:
        return self.done.pop(0)


@settings(max_examples=150, deadline=None)
@given(
    spec=SPECS.filter(lambda spec: spec.max_length >= 24),
    prompts=st.lists(PROMPTS, max_size=6),
    budget=st.integers(1, 9),
    depth=st.integers(1, 3),
)
def test_decisions_do_not_depend_on_what_the_tokens_are(spec, prompts, budget, depth) -> None:
    requests = [Request(i, prompt, 5, SamplingParams(max_tokens=5)) for i, prompt in enumerate(prompts)]

    def shape(plans):
        return [
            [(w.row, w.sequence, w.start, w.length, w.gained, w.slot, w.sample) for w in plan.work]
            + [plan.copies, plan.rewrites, plan.preempted]
            for plan in plans
        ]

    hashed = run(HashRunner(spec, min(4, budget)), Scheduler(spec, budget, 4, prefix_caching=False), requests, depth)
    blind = run(TokenlessRunner(), Scheduler(spec, budget, 4, prefix_caching=False), requests, depth)
    assert shape(hashed) == shape(blind)
