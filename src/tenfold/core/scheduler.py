"""submit / cancel / plan / commit: every step revisits who takes part.

``plan`` spends one step's budget: everyone's next token first, then prefill chunks of running sequences, then new
ones. It may be called up to ``depth`` times before ``commit`` folds the oldest outcome back in. There is one counter
instead of two phases: the work left of a sequence is its known tokens less those issued.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque

from tenfold.core.admission import Promises, refuse_impossible
from tenfold.core.beam import BeamSearch
from tenfold.core.cache import NOTHING, Cache, Match
from tenfold.core.joins import Joins
from tenfold.core.plan import Entry, Rewrite, StepOutcome, StepPlan, TokenLogprobs, Work
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
        prefix_caching: whether sequences may start from what past ones left.
    """

    def __init__(
        self,
        spec: CacheSpec,
        max_batch_tokens: int,
        max_sequences: int = 256,
        policy: Policy | None = None,
        prefix_caching: bool = True,
    ) -> None:
        if max_batch_tokens < 1 or max_sequences < 1:
            raise ValueError("max_batch_tokens and max_sequences must be at least 1")
        self.spec = spec
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = min(max_sequences, max_batch_tokens)
        self.policy: Policy = policy or FirstComeFirstServed()
        self.cache = Cache(spec, prefix_caching)
        self.joins = Joins(self.cache)
        self.live: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.leading: dict[int, Sequence] = {}  # running sequences whose followers have yet to branch off
        self.inflight: deque[StepPlan] = deque()
        self.step = 0
        self.preemptions = 0
        self._forked: list[Sequence] = []  # beams that the runner does not know yet
        self._rows = list(range(self.max_sequences))

    @property
    def running(self) -> dict[int, Sequence]:
        """Sequences that hold memory, by id, in order of admission."""
        return self.cache.holders

    @property
    def promised(self) -> int:
        """Rows kept for samples that have yet to branch off sequences that run."""
        return sum(len(leader.followers) for leader in self.leading.values())

    def submit(self, request: Request, *samples: Request) -> None:
        """Queue a request; further ``samples`` of the same prompt branch off when it is computed.

        They are admitted together, or all wait. Only more of them than there are rows run in parts.
        Beam search needs ``beam_width`` requests in all, one for each beam. The texts come back under the first
        ``n``, all their tokens at once.

        Raises:
            RequestError: it could not run even alone in an empty arena.
        """
        refuse_impossible(request, self.spec)
        seq = Sequence.of(request)
        others = [Sequence.of(sample) for sample in samples]
        if request.params.use_beam_search:
            BeamSearch.of(seq, others)
        else:
            seq.followers = others
        self.live.update((each.id, each) for each in (seq, *others))
        self._enqueue(seq)

    def cancel(self, sequence: int) -> list[int]:
        """Drop a sequence wherever it is, or the whole beam search it belongs to; its memory is free at once.

        Returns the ids that are not live any more: none if it was not.
        """
        seq = self.live.get(sequence)
        if seq is None:
            return []
        dropped = [seq] if seq.search is None else seq.search.members
        for each in dropped:
            self._drop(each)
        return [each.id for each in dropped]

    def _drop(self, seq: Sequence) -> None:
        del self.live[seq.id]
        if seq.id in self.running:
            self._retire(seq)
        elif seq in self.waiting:
            self._dequeue(seq)
        elif seq.search is None:
            leader = next(each for each in (*self.leading.values(), *self.waiting) if seq in each.followers)
            leader.followers.remove(seq)
            if not leader.followers:
                self.leading.pop(leader.id, None)
        if seq.followers:
            self._enqueue_group(seq.followers)
            seq.followers = []

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before an outcome comes back."""
        work: list[Work] = []
        prefilling: list[Sequence] = []
        preempted: list[int] = []
        self.joins.save_reached()
        budget = self._decode(work, prefilling, preempted)
        for seq in prefilling:
            if budget and seq.id in self.running:
                budget -= self._prefill(seq, budget, work, preempted)
        entries: list[Entry] = []
        if preempted:
            work = [w for w in work if w.sequence in self.running]
        if self._forked:
            work = self._introduce(work, entries)
        for seq in prefilling:
            if seq.id in self.running:
                self.cache.publish(seq)
        if not preempted:
            self._admit(budget, work, entries, prefilling)
        if self.leading:
            self._branch(entries)
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
        live, size = self.live, self.spec.block_size
        tokens, logprobs = outcome.tokens, outcome.logprobs
        sampled = -1  # index of the latest sample in the outcome, void or not
        for _, number, epoch, start, length, _, _, _, sample in plan.work:
            sampled += sample
            seq = live.get(number)
            if seq is None or seq.epoch != epoch:
                continue  # finished, cancelled or preempted since
            seq.committed = end = start + length
            if not sample:
                continue
            if not end % size:
                self.cache.publish(seq)
            if seq.search is not None:
                self._search(seq, logprobs[sampled] if logprobs else None, events)
                continue
            # What _take does, without a call for each token.
            token, chosen = tokens[sampled], logprobs[sampled] if logprobs else None
            seq.pending -= 1
            seq.tokens.append(token)
            over = end + 1 >= seq.limit or token in seq.stop_token_ids
            reason = self._end(seq, token) if over else None
            events.append(new(TokenEvent, (number, token, reason, chosen, seq.reused, None)))
        for entry in plan.entries:
            if entry.source < 0:
                continue
            sampled += 1
            seq = live.get(entry.sequence)
            if seq is not None and seq.epoch == entry.epoch:
                seq.committed = max(seq.committed, entry.prompt_length)
                events.append(self._take(seq, tokens[sampled], logprobs[sampled] if logprobs else None))
        return events

    def _take(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        """Append a sampled token; end the sequence if it was its last."""
        seq.pending -= 1
        seq.tokens.append(token)
        over = len(seq.tokens) >= seq.limit or token in seq.stop_token_ids
        reason = self._end(seq, token) if over else None
        return TokenEvent(seq.id, token, reason, logprobs, seq.reused)

    def _end(self, seq: Sequence, token: int) -> FinishReason | None:
        """End a sequence whose latest ``token`` may be its last; None if it has to go on."""
        if token in seq.stop_token_ids and len(seq.tokens) > seq.min_length:
            reason = FinishReason.STOP
        elif len(seq.tokens) >= seq.limit:
            reason = FinishReason.LENGTH
        else:
            return None
        del self.live[seq.id]
        self._retire(seq)
        return reason

    def _decode(self, work: list[Work], prefilling: list[Sequence], preempted: list[int]) -> int:
        """Everyone's next token; who lacks more than one token is listed in ``prefilling``. Returns the budget left.

        This loop is the cost of a step, which does not depend on context length.
        """
        size, running = self.spec.block_size, self.running
        for seq in list(running.values()):
            start, pending = seq.issued, seq.pending
            known = len(seq.tokens) + pending
            if known - start != 1 or known >= seq.limit:
                if start < known < seq.limit:
                    prefilling.append(seq)
                continue
            gained: tuple[int, ...] = ()
            if not start % size or seq.shared_tail:
                had = len(seq.table)
                if seq.id not in running or not self._make_room(seq, start + 1, preempted):
                    continue
                gained = tuple(seq.table[had:])
            elif preempted and seq.id not in running:
                continue
            inputs = () if pending else (seq.tokens[start],)
            work.append(new(Work, (seq.row, seq.id, seq.epoch, start, 1, inputs, gained, seq.slot, True)))
            seq.issued = known
            seq.pending = pending + seq.draws
        return self.max_batch_tokens - len(work)

    def _prefill(self, seq: Sequence, budget: int, work: list[Work], preempted: list[int]) -> int:
        count = self.policy.chunk(seq, budget)
        if seq.marks:
            count = min(count, seq.marks[0] - seq.issued)
        if not self._make_room(seq, seq.issued + count, preempted):
            return 0
        work.append(self._issue(seq, count, self.spec.blocks_for(seq.issued)))
        return count

    def _admit(self, budget: int, work: list[Work], entries: list[Entry], prefilling: list[Sequence]) -> None:
        """Waiting sequences enter in order while they fit. Nobody overtakes the head of the queue, except one that
        waits for a checkpoint that a running sequence is about to reach.

        A sequence enters only when its followers find rows too, or, if there are more of them than rows, when all are
        free: otherwise the first samples of many prompts would take every row, and the others share nothing.
        """
        if not self.waiting or not self._rows:
            return
        at = 0
        kept = self.promised
        promises = Promises(self.cache, self.policy, prefilling, kept)
        while budget and at < len(self.waiting) and kept < len(self._rows):
            seq = self.waiting[at]
            match = self.cache.match(seq)
            if self.joins.awaits(seq, match):
                at += 1
                continue
            if kept + min(1 + len(seq.followers), self.max_sequences) > len(self._rows):
                break
            if not promises.leave_room(seq, match):
                break
            entered = self._enter(seq, match, budget)
            if entered is None and not self.running:
                entered = self._enter(seq, NOTHING, budget)  # what it would reuse is in the way of the rest of it
            if entered is None:
                break
            entry, first = entered
            entries.append(entry)
            work.append(first)
            self.cache.publish(seq)
            promises.add(seq)
            kept += len(seq.followers)
            budget -= first.length

    def _enter(self, seq: Sequence, match: Match, budget: int) -> tuple[Entry, Work] | None:
        """Admit ``seq`` from the queue with its first work, or change nothing."""
        marks = self.joins.marks(seq, match)
        start = match.position
        count = min(self.policy.chunk(seq, budget), seq.known - start)
        if marks:
            count = min(count, marks[0] - start)
        if not self.cache.admit(seq, match, start + count, self.joins.wanted_after(seq, match)):
            return None
        self._dequeue(seq)
        seq.row = heapq.heappop(self._rows)
        if seq.followers:
            self.leading[seq.id] = seq
        self.joins.watch(seq, marks)
        return self._entry(seq, tuple(seq.tokens[:start])), self._issue(seq, count, 0)

    def _branch(self, entries: list[Entry]) -> None:
        """Samples of a prompt branch off in the step that computes its end; those that find no room queue up together,
        and the first of them leads the others."""
        for seq in list(self.leading.values()):
            if seq.issued < len(seq.tokens):
                continue
            del self.leading[seq.id]
            followers, seq.followers = seq.followers, []
            while followers and self._rows and self.cache.fork(seq, followers[0], defer=True):
                child, *followers = followers
                child.row = heapq.heappop(self._rows)
                child.pending, child.reused = 1, seq.reused
                entries.append(self._entry(child, tuple(child.tokens), seq.row))
            if followers:
                self._enqueue_group(followers)

    def _entry(self, seq: Sequence, reused: tuple[int, ...], source: int = -1) -> Entry:
        request = seq.request
        prompt = len(request.prompt)
        candidates = seq.search.candidates if seq.search is not None else 0
        stop = request.stop_token_ids
        return Entry(seq.row, seq.id, seq.epoch, prompt, request.params, stop, reused, source, candidates)

    def _search(self, seq: Sequence, candidates: TokenLogprobs | None, events: list[TokenEvent]) -> None:
        """A beam came back; with the last of them the search takes a step."""
        search = seq.search
        if search is None or candidates is None:
            raise RuntimeError("the runner returned no candidates for a beam")
        search.arrived[seq.id] = candidates
        if not search.complete:
            return
        growths = search.advance()
        if growths is None:
            self._end_search(search, events)
            return
        parents = search.beams
        search.beams = []
        going = {growth.parent for growth in growths}
        for index, parent in enumerate(parents):
            if index not in going:
                self._retire(parent, keep=False)
                parent.reset()
                search.idle.append(parent)
        grown: list[tuple[Sequence, int]] = []
        for growth in growths:
            parent = parents[growth.parent]
            first = parent not in search.beams
            beam = parent if first else self._fork_beam(parent, search.idle.pop())
            search.beams.append(beam)
            grown.append((beam, growth.token))
        for beam, token in grown:
            beam.tokens.append(token)
            if beam.id not in self.running:
                self._enqueue(beam)

    def _fork_beam(self, parent: Sequence, child: Sequence) -> Sequence:
        """Let ``child`` go on from all that ``parent`` computed; without room for it, it computes that again later."""
        child.tokens = parent.tokens[:]
        child.keys = list(parent.keys)
        child.reused = parent.reused
        if len(self._rows) > self.promised and self.cache.fork(parent, child, defer=False):
            child.row = heapq.heappop(self._rows)
            self._forked.append(child)
        return child

    def _introduce(self, work: list[Work], entries: list[Entry]) -> list[Work]:
        """Forked beams enter with their first work, which brings their whole table."""
        forked = {seq.id: seq for seq in self._forked if seq.id in self.running}
        self._forked = []
        introduced = []
        for w in work:
            seq = forked.get(w.sequence)
            if seq is not None:
                entries.append(self._entry(seq, tuple(seq.tokens[: w.start])))
                w = w._replace(gained=tuple(seq.table))
            introduced.append(w)
        return introduced

    def _end_search(self, search: BeamSearch, events: list[TokenEvent]) -> None:
        """Every member ends; the best texts are reported under the first of them, in order of their ids."""
        members = sorted(search.members, key=lambda seq: seq.id)
        for seq, (score, tokens) in zip(members[: members[0].request.params.n], search.finished, strict=False):
            stopped = tokens[-1] in search.stop_token_ids
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            reused = members[0].reused
            events += [TokenEvent(seq.id, token, None, None, reused) for token in tokens[:-1]]
            events.append(TokenEvent(seq.id, tokens[-1], reason, None, reused, score))
        for seq in members:
            self._drop(seq)

    def _issue(self, seq: Sequence, count: int, had: int) -> Work:
        """Issue ``count`` tokens; the runner knows the first ``had`` blocks of the table."""
        start, end = seq.issued, seq.issued + count
        sample = end == seq.known
        tokens, gained = tuple(seq.tokens[start:end]), tuple(seq.table[had:])
        work = Work(seq.row, seq.id, seq.epoch, start, count, tokens, gained, seq.slot, sample)
        seq.issued = end
        seq.pending += sample * seq.draws
        return work

    def _make_room(self, seq: Sequence, length: int, preempted: list[int]) -> bool:
        """Extend the table of ``seq``, preempting others if need be; False if it had to give way itself."""
        while not self.cache.extend(seq, length):
            victim = self.policy.victim(self.running.values())
            # Its blocks and state are worth keeping where they are; with a step under way nobody knows what they hold.
            self._retire(victim, keep=victim.committed == victim.issued)
            victim.reset()
            if victim.search is not None:
                victim.search.arrived.pop(victim.id, None)
            self._enqueue(victim)
            preempted.append(victim.id)
            self.preemptions += 1
            if victim is seq:
                return False
        return True

    def _retire(self, seq: Sequence, keep: bool = True) -> None:
        self.joins.unwatch(seq)
        self.leading.pop(seq.id, None)
        self.cache.release(seq, keep)
        heapq.heappush(self._rows, seq.row)
        seq.row = NO_ROW

    def _enqueue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=self.policy.order)
        self.joins.expect(seq)

    def _enqueue_group(self, group: list[Sequence]) -> None:
        """Samples of one prompt wait; the first stands in the queue for all."""
        leader, *followers = group
        leader.followers = followers
        self._enqueue(leader)

    def _dequeue(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.joins.forget(seq)

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
        cache.copies, cache.deferred, cache.moved, cache.fresh = cache.deferred, [], set(), set()
        return plan

    def _gained(self, work: Work) -> list[int]:
        return self.running[work.sequence].table[-len(work.gained) :]
