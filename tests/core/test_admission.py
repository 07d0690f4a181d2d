"""What can never fit is refused with its count of blocks; what does not fit now waits its turn."""

from __future__ import annotations

import pytest

from support.hash_runner import HashRunner, reference
from tenfold.core import CacheSpec, FirstComeFirstServed, Request, SamplingParams, Scheduler, Sequence, StepPlan
from tenfold.core.invariants import check
from tenfold.errors import RequestError

DENSE = CacheSpec(block_size=4, num_pages=8)
HYBRID = CacheSpec(block_size=4, num_pages=8, slot_pages=3)


def request(number: int, prompt: int, max_tokens: int) -> Request:
    return Request(number, tuple(i % 3 for i in range(prompt)), max_tokens, SamplingParams(max_tokens=max_tokens))


def entered(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [entry.sequence for entry in plan.entries]


class Serving:
    """A scheduler and a runner, one step at a time."""

    def __init__(self, spec: CacheSpec, budget: int = 64, rows: int = 8) -> None:
        self.scheduler = Scheduler(spec, budget, rows, prefix_caching=False)
        self.runner = HashRunner(spec, self.scheduler.max_sequences)
        self.text: dict[int, list[int]] = {}

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.runner.submit(plan)
            for event in self.scheduler.commit(self.runner.collect()):
                self.text.setdefault(event.sequence, []).append(event.token)
        check(self.scheduler)
        return plan


@pytest.mark.parametrize(
    ("spec", "prompt", "max_tokens", "words"),
    [
        (DENSE, 30, 4, "30 prompt tokens plus max_tokens 4 need 9 blocks of 4 tokens; the arena has 8 pages"),
        (DENSE, 1, 33, "need 9 blocks of 4 tokens; the arena has 8 pages: at most 33 tokens in all fit"),
        (HYBRID, 20, 2, "need 6 blocks of 4 tokens and 1 state slot of 3 pages; the arena has 8 pages"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_its_blocks(
    spec: CacheSpec, prompt: int, max_tokens: int, words: str
) -> None:
    scheduler = Scheduler(spec, 64)
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request(0, prompt, max_tokens))
    assert words in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    assert not scheduler.live and not scheduler.waiting, "a refusal costs nothing"


@pytest.mark.parametrize(("spec", "prompt", "max_tokens"), [(DENSE, 30, 3), (DENSE, 1, 32), (HYBRID, 20, 1)])
def test_the_largest_request_that_fits_runs_to_its_end(spec: CacheSpec, prompt: int, max_tokens: int) -> None:
    """The last token is never an input, so that it needs no place."""
    serving = Serving(spec)
    largest = request(0, prompt, max_tokens)
    serving.scheduler.submit(largest)
    while serving.scheduler.live:
        assert serving.step() is not None
    assert serving.text[0] == reference(largest, bool(spec.slot_pages))
    assert serving.scheduler.preemptions == 0


@pytest.mark.parametrize(("prompt", "max_tokens", "param"), [(0, 1, "prompt"), (1, 0, "max_tokens")])
def test_requests_without_work_are_refused(prompt: int, max_tokens: int, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        Scheduler(DENSE, 64).submit(Request(0, (1,) * prompt, max_tokens))
    assert caught.value.param == param


def test_what_does_not_fit_now_waits_and_nobody_gives_way_to_it() -> None:
    serving = Serving(DENSE)
    serving.scheduler.submit(request(0, 16, 8))
    assert entered(serving.step()) == [0]
    serving.scheduler.submit(request(1, 16, 4))  # four blocks and a page of headroom, where four are free
    while 0 in serving.scheduler.live:
        plan = serving.step()
        assert entered(plan) == [] and plan is not None
        assert [work.sequence for work in plan.work] == [0]
        assert 1 in serving.scheduler.live, "it is not refused"
    assert serving.scheduler.preemptions == 0
    assert entered(serving.step()) == [1], "it enters in the step after the memory came back"


@pytest.mark.parametrize("spec", [DENSE, HYBRID])
def test_nobody_overtakes_the_head_of_the_queue(spec: CacheSpec) -> None:
    serving = Serving(spec)
    serving.scheduler.submit(request(0, 5, 8))
    serving.step()
    serving.scheduler.submit(request(1, spec.max_length - 2, 2))  # needs the whole arena
    serving.scheduler.submit(request(2, 1, 1))  # would fit at once
    order = []
    while serving.scheduler.live:
        order += entered(serving.step())
    assert order == [1, 2]
    assert serving.scheduler.preemptions == 0


def test_the_whole_prompt_must_fit_not_only_its_first_chunk() -> None:
    serving = Serving(DENSE, budget=4)
    serving.scheduler.submit(request(0, 12, 8))
    serving.step()
    serving.scheduler.submit(request(1, 20, 2))  # its first chunk is one block; the other four would have to be free
    for _ in range(3):
        assert entered(serving.step()) == []
    while serving.scheduler.live:
        serving.step()
    assert serving.scheduler.preemptions == 0


class SmallChunks(FirstComeFirstServed):
    def chunk(self, seq: Sequence, budget: int) -> int:
        return min(seq.want, budget, 2)


def test_blocks_that_a_prefill_still_lacks_are_promised_to_it() -> None:
    scheduler = Scheduler(DENSE, 16, policy=SmallChunks())
    scheduler.submit(request(0, 20, 2))
    scheduler.submit(request(1, 12, 2))  # seven pages are free, four of them promised, one is headroom
    assert entered(scheduler.plan()) == [0]
    scheduler.cancel(1)
    scheduler.submit(request(2, 8, 2))
    assert entered(scheduler.plan()) == [2]


def test_rows_bound_how_many_run() -> None:
    serving = Serving(CacheSpec(4, 64), rows=2)
    for number in range(3):
        serving.scheduler.submit(request(number, 4, 2))
    assert entered(serving.step()) == [0, 1]
    assert entered(serving.step()) == []
    assert entered(serving.step()) == [2]


def samples(first: int, prompt: int, max_tokens: int, count: int) -> list[Request]:
    """Requests for one prompt, which no other number starts with."""
    tokens = (first, *(i % 3 for i in range(prompt - 1)))
    params = SamplingParams(max_tokens=max_tokens)
    return [Request(first + i, tokens, max_tokens, params) for i in range(count)]


def test_samples_of_a_prompt_share_it_however_many_prompts_wait() -> None:
    """A hundred prompts of three blocks, four samples each, on ten rows and without prefix caching."""
    serving = Serving(CacheSpec(4, 120), rows=10)
    groups = [samples(4 * number, 12, 6, 4) for number in range(100)]
    for group in groups:
        serving.scheduler.submit(*group)
    order, alone, taken = [], 0, 0
    while serving.scheduler.live:
        plan = serving.step()
        order += sorted(entered(plan))
        alone += sum(len(seq.table) for seq in serving.scheduler.running.values())
        taken += 120 - serving.scheduler.cache.arena.free
    assert order == sorted(order), "groups enter in the order of arrival, each with all its samples"
    assert 1 - taken / alone > 0.4, "of 5 blocks each, 3 are shared by four: 45% saved at the end"
    assert serving.text == {each.id: reference(each, False) for group in groups for each in group}
    assert serving.scheduler.preemptions == 0


def test_a_group_waits_until_there_are_rows_for_all_and_is_not_overtaken() -> None:
    serving = Serving(CacheSpec(4, 64), rows=4)
    serving.scheduler.submit(request(0, 4, 2))
    serving.scheduler.submit(request(1, 4, 4))
    serving.scheduler.submit(*samples(2, 4, 3, 3))
    serving.scheduler.submit(request(5, 4, 1))
    steps = []
    while serving.scheduler.live:
        steps.append(sorted(entered(serving.step())))
    assert steps == [[0, 1], [], [2, 3, 4], [], [5]], "two rows are free while 0 and 1 run"


def test_rows_are_kept_for_samples_until_their_prompt_is_computed() -> None:
    serving = Serving(CacheSpec(4, 64), budget=4, rows=4)
    serving.scheduler.submit(*samples(0, 12, 3, 3))
    serving.scheduler.submit(*samples(3, 2, 1, 2))
    serving.scheduler.submit(request(5, 2, 1))
    assert [entered(serving.step()) for _ in range(3)] == [[0], [], [1, 2]]


@pytest.mark.parametrize("spec", [CacheSpec(4, 64), CacheSpec(4, 64, slot_pages=3)])
def test_more_samples_than_rows_run_in_parts(spec: CacheSpec) -> None:
    serving = Serving(spec, rows=3)
    requests = [request(0, 4, 3), *samples(1, 8, 3, 8), request(9, 4, 3)]
    serving.scheduler.submit(requests[0])
    serving.scheduler.submit(*requests[1:9])
    serving.scheduler.submit(requests[9])
    parts = []
    while serving.scheduler.live:
        parts.append(sorted(entered(serving.step())))
    assert [part for part in parts if part] == [[0], [1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert serving.text == {each.id: reference(each, bool(spec.slot_pages)) for each in requests}


def test_states_are_promised_to_samples_that_have_yet_to_branch_off() -> None:
    """Four slots of three pages fit, two are in use, and each of the three samples needs one."""
    serving = Serving(CacheSpec(block_size=4, num_pages=16, slot_pages=3))
    serving.scheduler.submit(request(0, 2, 3))
    serving.scheduler.submit(request(1, 2, 3))
    serving.scheduler.submit(*samples(2, 4, 2, 3))
    assert [entered(serving.step()) for _ in range(4)] == [[0, 1], [], [], [2, 3, 4]]
    assert serving.scheduler.cache.failures == {"blocks": 0, "slots": 0}
