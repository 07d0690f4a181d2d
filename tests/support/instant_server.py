"""A scheduler whose device is instantaneous: what runs when, without what it says."""

from __future__ import annotations

from collections import deque

from tenfold.core import CacheSpec, Request, SamplingParams, Scheduler, StepOutcome, StepPlan
from tenfold.core.invariants import check

QWEN_27B = CacheSpec(block_size=16, num_pages=23_859, slot_pages=147, page_bytes=2**20)
"""The 27B hybrid in the 23,859 MiB that an 80 GB device has left for it."""
NATIVE_CONTEXT = 262_144
TOKEN = 1


class InstantServer:
    """Every sample is the same token; no two prompts share anything, because each begins with a token of its own.

    ``running`` lists how many sequences ran after each step, ``entered`` and ``ended`` the steps in which each did.
    """

    def __init__(self, spec: CacheSpec, prefix_caching: bool = True, depth: int = 1) -> None:
        self.scheduler = Scheduler(spec, 10_000_000, 1_024, prefix_caching=prefix_caching)
        self.depth = depth
        self.submitted = 0
        self.running: list[int] = []
        self.entered: dict[int, list[int]] = {}
        self.ended: dict[int, int] = {}
        self._plans: deque[StepPlan] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.live or self._plans)

    def submit(self, prompt: int, output: int) -> int:
        session = self.submitted
        self.submitted += 1
        tokens = (2 + session, *(TOKEN,) * (prompt - 1))
        self.scheduler.submit(Request(session, tokens, output, SamplingParams(max_tokens=output)))
        return session

    def step(self) -> None:
        scheduler = self.scheduler
        while len(self._plans) < self.depth and (plan := scheduler.plan()) is not None:
            self._plans.append(plan)
            for entry in plan.entries:
                self.entered.setdefault(entry.sequence, []).append(plan.step)
        plan = self._plans.popleft()
        outcome = StepOutcome(plan.step, [TOKEN] * sum(work.sample for work in plan.work))
        for event in scheduler.commit(outcome):
            if event.finish_reason:
                self.ended[event.sequence] = plan.step
        self.running.append(len(scheduler.running))

    def drain(self) -> list[int]:
        """Run until nobody is left; returns how many ran after each of these steps."""
        since = len(self.running)
        while self.busy:
            self.step()
        check(self.scheduler)
        return self.running[since:]
