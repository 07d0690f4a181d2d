"""submit / cancel / plan / commit: every step revisits who takes part.

``plan`` spends one step's budget: everyone's next token first, then prefill chunks of running sequences, then new
ones. It may be called up to ``depth`` times before ``commit`` folds the oldest outcome back in. There is one counter
instead of two phases: the work left of a sequence is its known tokens less those issued.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque

from tenfold.core.admission import may_start, refuse_impossible
from tenfold.core.cache import Cache
from tenfold.core.plan import Entry, Rewrite, StepOutcome, StepPlan, Work
from tenfold.core.policy import FirstComeFirstServed, Policy
from tenfold.core.sequence import NO_ROW, Sequence
from tenfold.core.spec import CacheSpec
from tenfold.core.types import FinishReason, Request, TokenEvent

new = tuple.__new__
"""Makes a named tuple from its fields in half the time of its constructor, which counts where it is made per token."""


class Scheduler:
    """Decides each step. Holds no clock, no thread and no tensor.

    Args:
        spec: the arena.
        max_batch_tokens: tokens of one step at most.
        max_sequences: sequences that run at once at most; never more than ``max_batch_tokens``, so that every running
            sequence can take part in every step.
        policy: order, victims and chunk sizes.
    """

    def __init__(
        self, spec: CacheSpec, max_batch_tokens: int, max_sequences: int = 256, policy: Policy | None = None
    ) -> None:
        if max_batch_tokens < 1 or max_sequences < 1:
            raise ValueError("max_batch_tokens and max_sequences must be at least 1")
        self.spec = spec
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = min(max_sequences, max_batch_tokens)
        self.policy: Policy = policy or FirstComeFirstServed()
        self.cache = Cache(spec)
        self.live: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.inflight: deque[StepPlan] = deque()
        self.step = 0
        self.preemptions = 0
        self._rows = list(range(self.max_sequences))

    @property
    def running(self) -> dict[int, Sequence]:
        """Sequences that hold memory, by id, in order of admission."""
        return self.cache.holders

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it could not run even alone in an empty arena.
        """
        refuse_impossible(request, self.spec)
        seq = Sequence.of(request)
        self.live[request.id] = seq
        insort(self.waiting, seq, key=self.policy.order)

    def cancel(self, sequence: int) -> bool:
        """Drop a sequence wherever it is; its memory is free at once. False if it is not live (any more)."""
        seq = self.live.pop(sequence, None)
        if seq is None:
            return False
        if sequence in self.running:
            self._retire(seq)
        else:
            self.waiting.remove(seq)
        return True

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before an outcome comes back."""
        work: list[Work] = []
        prefilling: list[Sequence] = []
        preempted: list[int] = []
        budget = self._decode(work, prefilling, preempted)
        for seq in prefilling:
            if budget and seq.id in self.running:
                budget -= self._prefill(seq, budget, work, preempted)
        entries: list[Entry] = []
        if not preempted:
            self._admit(budget, work, entries, prefilling)
        if preempted:
            work = [w for w in work if w.sequence in self.running]
        if not work:
            return None
        plan = self._seal(work, entries, preempted)
        self.inflight.append(plan)
        return plan

    def commit(self, outcome: StepOutcome) -> list[TokenEvent]:
        """Fold the oldest outstanding outcome back in; outcomes arrive in plan order."""
        plan = self.inflight.popleft()
        if plan.step != outcome.step:
            raise RuntimeError(f"outcome of step {outcome.step} where step {plan.step} was due")
        events: list[TokenEvent] = []
        live, tokens, logprobs = self.live, outcome.tokens, outcome.logprobs
        sampled = -1  # index of the latest sample in the outcome, void or not
        for w in plan.work:
            sampled += w.sample
            seq = live.get(w.sequence)
            if seq is None or seq.epoch != w.epoch:
                continue  # finished, cancelled or preempted since
            seq.committed = w.start + w.length
            if not w.sample:
                continue
            token = tokens[sampled]
            seq.pending -= 1
            seq.tokens.append(token)
            length = len(seq.tokens)
            reason = None
            if token in seq.request.stop_token_ids and length > seq.min_length:
                reason = FinishReason.STOP
            elif length >= seq.limit:
                reason = FinishReason.LENGTH
            events.append(new(TokenEvent, (w.sequence, token, reason, logprobs[sampled] if logprobs else None)))
            if reason:
                del live[w.sequence]
                self._retire(seq)
        return events

    def _decode(self, work: list[Work], prefilling: list[Sequence], preempted: list[int]) -> int:
        """Everyone's next token; who lacks more than one token is listed in ``prefilling``. Returns the budget left.

        This loop is the cost of a step, which does not depend on context length.
        """
        budget, size, running = self.max_batch_tokens, self.spec.block_size, self.running
        for seq in list(running.values()):
            start, pending = seq.issued, seq.pending
            known = len(seq.tokens) + pending
            if known - start != 1 or known >= seq.limit:
                if start < known < seq.limit:
                    prefilling.append(seq)
                continue
            gained: tuple[int, ...] = ()
            if start == len(seq.table) * size:
                if seq.id not in running or not self._make_room(seq, start + 1, preempted):
                    continue
                gained = (seq.table[-1],)
            elif preempted and seq.id not in running:
                continue
            inputs = () if pending else (seq.tokens[start],)
            work.append(new(Work, (seq.row, seq.request.id, seq.epoch, start, 1, inputs, gained, seq.slot, True)))
            seq.issued = known
            seq.pending = pending + 1
            budget -= 1
        return budget

    def _prefill(self, seq: Sequence, budget: int, work: list[Work], preempted: list[int]) -> int:
        count = self.policy.chunk(seq, budget)
        if not self._make_room(seq, seq.issued + count, preempted):
            return 0
        work.append(self._issue(seq, count))
        return count

    def _admit(self, budget: int, work: list[Work], entries: list[Entry], prefilling: list[Sequence]) -> None:
        """Waiting sequences enter in order while they fit; nobody overtakes the head of the queue."""
        while budget and self.waiting and self._rows:
            seq = self.waiting[0]
            if not may_start(seq, self.cache, self.policy, prefilling):
                break
            count = self.policy.chunk(seq, budget)
            if not self.cache.admit(seq, count):
                break
            self.waiting.pop(0)
            seq.row = heapq.heappop(self._rows)
            request = seq.request
            entries.append(
                Entry(seq.row, seq.id, seq.epoch, len(request.prompt), request.params, request.stop_token_ids, ())
            )
            work.append(self._issue(seq, count))
            prefilling.append(seq)
            budget -= count

    def _issue(self, seq: Sequence, count: int) -> Work:
        start, end = seq.issued, seq.issued + count
        had = self.spec.blocks_for(start)
        sample = end == seq.known
        work = Work(
            seq.row,
            seq.id,
            seq.epoch,
            start,
            count,
            tuple(seq.tokens[start:end]),
            tuple(seq.table[had:]),
            seq.slot,
            sample,
        )
        seq.issued = end
        seq.pending += sample
        return work

    def _make_room(self, seq: Sequence, length: int, preempted: list[int]) -> bool:
        """Extend the table of ``seq``, preempting others if need be; False if it had to give way itself."""
        while not self.cache.extend(seq, length):
            victim = self.policy.victim(self.running.values())
            self._retire(victim)
            victim.reset()
            insort(self.waiting, victim, key=self.policy.order)
            preempted.append(victim.id)
            self.preemptions += 1
            if victim is seq:
                return False
        return True

    def _retire(self, seq: Sequence) -> None:
        self.cache.release(seq)
        heapq.heappush(self._rows, seq.row)
        seq.row = NO_ROW

    def _seal(self, work: list[Work], entries: list[Entry], preempted: list[int]) -> StepPlan:
        """Freeze the step. Blocks may have moved after a table was read: what is gained is read again, the rest of
        the table is corrected by rewrites."""
        cache, rewrites = self.cache, []
        if cache.moved:
            fresh = {w.sequence: len(w.gained) for w in work}
            work = [w._replace(gained=tuple(self._gained(w))) if w.gained else w for w in work]
            for seq in self.running.values():
                for index, page in enumerate(seq.table[: len(seq.table) - fresh.get(seq.id, 0)]):
                    if page in cache.moved:
                        rewrites.append(Rewrite(seq.row, index, page))
        plan = StepPlan(self.step, tuple(work), tuple(entries), tuple(cache.copies), tuple(rewrites), tuple(preempted))
        self.step += 1
        cache.copies, cache.moved = [], set()
        return plan

    def _gained(self, work: Work) -> list[int]:
        return self.running[work.sequence].table[-len(work.gained) :]
