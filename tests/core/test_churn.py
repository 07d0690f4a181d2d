"""Crowded arenas: preemptions, moves and reuse of pages all the time, over fixed seeds so that every run meets them."""

from __future__ import annotations

import random

import pytest

from support.hash_runner import HashRunner, beam_reference, reference
from tenfold.core import CacheSpec, Request, SamplingParams, Scheduler
from tenfold.core.invariants import check

CASES = 120


class Churn:
    """One scheduler under a random load of short and long requests, some of which are cancelled."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        spec = CacheSpec(rng.randint(1, 4), rng.randint(16, 40), rng.choice([0, 1, 2, 3, 5]))
        self.scheduler = Scheduler(spec, rng.choice([4, 16, 64]), rng.randint(2, 8), prefix_caching=rng.random() < 0.8)
        self.runner = HashRunner(spec, self.scheduler.max_sequences)
        self.depth = rng.randint(1, 3)
        self.requests: dict[int, Request] = {}
        self.text: dict[int, list[int]] = {}
        self.scores: dict[int, float] = {}
        self.cancelled: set[int] = set()

    def submit(self) -> None:
        rng, spec = self.rng, self.scheduler.spec
        longest = spec.max_length
        length = rng.randint(1, 4) if rng.random() < 0.5 else rng.randint(1, longest)
        prompt = tuple(rng.randrange(3) for _ in range(length))
        if self.requests and rng.random() < 0.6:
            prompt = self.continued(rng.choice(list(self.requests)), longest)
        max_tokens = rng.randint(1, longest - len(prompt) + 1)
        breakpoints = tuple(rng.sample(range(len(prompt) + 3), rng.randint(0, min(2, len(prompt)))))
        salt = rng.choice(["", "", "other"])
        samples = rng.choice([1, 1, 1, 3])
        requests = [
            Request(
                len(self.requests) + i,
                prompt,
                max_tokens,
                SamplingParams(max_tokens=max_tokens),
                cache_salt=salt,
                breakpoints=breakpoints,
            )
            for i in range(samples)
        ]
        width = rng.randint(1, 3)
        if rng.random() < 0.2 and spec.pages_for(len(prompt) + max_tokens - 1) * width <= spec.num_pages:
            requests = self.beams(prompt, max_tokens, min(width, self.scheduler.max_sequences), salt)
        for request in requests:
            self.requests[request.id], self.text[request.id] = request, []
        self.scheduler.submit(*requests)

    def beams(self, prompt: tuple[int, ...], max_tokens: int, width: int, salt: str) -> list[Request]:
        rng = self.rng
        params = SamplingParams(
            max_tokens=max_tokens,
            use_beam_search=True,
            beam_width=width,
            n=rng.randint(1, width),
            length_penalty=rng.choice([0.0, 1.0, 1.7]),
            early_stopping=rng.choice([True, False, "never"]),
        )
        stop = rng.choice([frozenset(), frozenset({0}), frozenset({1, 2})])
        first = len(self.requests)
        return [Request(first + i, prompt, max_tokens, params, stop, cache_salt=salt) for i in range(width)]

    def continued(self, earlier: int, longest: int) -> tuple[int, ...]:
        """A prompt that shares a beginning with what an earlier sequence saw and wrote."""
        rng = self.rng
        history = self.requests[earlier].prompt + tuple(self.text[earlier])
        shared = history[: rng.randint(1, len(history))] if rng.random() < 0.5 else history
        return (*shared, *(rng.randrange(3) for _ in range(rng.randint(0, 4))))[:longest]

    def step(self) -> None:
        scheduler = self.scheduler
        while len(scheduler.inflight) < self.depth and (plan := scheduler.plan()):
            check(scheduler)
            self.runner.submit(plan)
        for event in scheduler.commit(self.runner.collect()) if scheduler.inflight else ():
            self.text[event.sequence].append(event.token)
            if event.score is not None:
                self.scores[event.sequence] = event.score
        check(scheduler)

    def run(self) -> None:
        for _ in range(self.rng.randint(10, 60)):
            if self.rng.random() < 0.5:
                self.submit()
            if self.scheduler.live and self.rng.random() < 0.15:
                victim = self.rng.choice(sorted(self.scheduler.live))
                self.cancelled.update(self.scheduler.cancel(victim))
            self.step()
        while self.scheduler.live or self.scheduler.inflight:
            self.step()


@pytest.fixture(scope="module")
def churns() -> list[Churn]:
    churns = [Churn(seed) for seed in range(CASES)]
    for churn in churns:
        churn.run()
    return churns


def test_every_text_is_right(churns) -> None:
    for seed, churn in enumerate(churns):
        for i, request in churn.requests.items():
            if request.params.use_beam_search:
                continue
            expected = reference(request, bool(churn.scheduler.spec.slot_pages))
            if i in churn.cancelled:
                expected = expected[: len(churn.text[i])]
            assert churn.text[i] == expected, f"seed {seed}, request {i}"


def test_every_beam_search_is_right(churns) -> None:
    searched = 0
    for seed, churn in enumerate(churns):
        recurrent = bool(churn.scheduler.spec.slot_pages)
        first = [
            i
            for i, request in churn.requests.items()
            if request.params.use_beam_search and churn.requests.get(i - 1, request).params is not request.params
        ]
        for i in {*first, *([0] if churn.requests[0].params.use_beam_search else [])} - churn.cancelled:
            request = churn.requests[i]
            expected = beam_reference(request, recurrent)
            texts = [churn.text[i + k] for k in range(request.params.n)]
            assert texts == [text for _, text in expected], f"seed {seed}"
            got = [churn.scores[i + k] for k in range(request.params.n)]
            assert got == pytest.approx([score for score, _ in expected])
            searched += 1
    assert searched >= CASES // 2


def test_hard_states_were_met(churns) -> None:
    """A churn that never preempts or moves proves little."""
    assert sum(churn.scheduler.preemptions > 0 for churn in churns) >= CASES // 4
    assert sum(churn.scheduler.cache.pages_moved > 0 for churn in churns) >= CASES // 15
    for cause in ("hit", "no_checkpoint", "evicted", "cold"):
        assert sum(churn.scheduler.cache.prefix_tokens[cause] > 0 for churn in churns) >= CASES // 8, cause
