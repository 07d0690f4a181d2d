"""Every invariant of the core, in one place. Tests call ``check`` after every event."""

from __future__ import annotations

from tenfold.core.arena import FREE, SLOT
from tenfold.core.scheduler import Scheduler
from tenfold.core.sequence import NO_ROW, NO_SLOT


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError with a sentence if anything is inconsistent."""
    _check_sequences(scheduler)
    _check_arena(scheduler)
    _check_plans(scheduler)


def _check_sequences(s: Scheduler) -> None:
    spec, order = s.spec, s.policy.order
    for seq in s.running.values():
        assert 0 <= seq.committed <= seq.issued <= seq.known <= seq.limit, "counters are ordered"
        assert len(seq.table) == spec.blocks_for(seq.issued), "a table covers exactly what was issued"
        assert (seq.slot != NO_SLOT) == bool(spec.slot_pages), "a running sequence has a slot iff the model has states"
        assert seq.issued > 0, "a sequence enters with work"
    for seq in s.waiting:
        assert seq.row == NO_ROW and seq.slot == NO_SLOT and not seq.table, "waiting costs nothing"
        assert seq.issued == seq.committed == seq.pending == 0, "waiting sequences start from the beginning"
    keys = [order(seq) for seq in s.waiting]
    assert keys == sorted(keys), "the queue is in the policy's order"
    waiting = {seq.id for seq in s.waiting}
    assert len(waiting) == len(s.waiting) and waiting.isdisjoint(s.running), "a sequence waits or runs, once"
    assert waiting | s.running.keys() == s.live.keys(), "live = waiting and running"
    rows = [seq.row for seq in s.running.values()] + s._rows
    assert sorted(rows) == list(range(s.max_sequences)), "rows are held or free"


def _check_arena(s: Scheduler) -> None:
    spec, arena = s.spec, s.cache.arena
    owners = [FREE] * spec.num_pages
    for seq in s.running.values():
        if seq.slot != NO_SLOT:
            first = spec.slot_page(seq.slot)
            for page in range(first, first + spec.slot_pages):
                assert owners[page] == FREE, "a slot belongs to one sequence"
                owners[page] = SLOT
    for seq in s.running.values():
        assert len(set(seq.table)) == len(seq.table), "a table names a block once"
        for page in seq.table:
            assert owners[page] != SLOT, "a block is not part of a slot"
            owners[page] += 1
    assert owners == arena.owners, "references are exactly the appearances in tables, slots those of sequences"
    assert arena.free == owners.count(FREE), "free pages are counted"
    queued = [page for page in range(spec.num_pages) if arena._queued[page]]
    assert sorted(arena._free_pages) == queued, "the heap holds what it says it holds"
    assert {page for page in range(spec.num_pages) if owners[page] == FREE} <= set(queued), "every free page is found"
    slots = [seq.slot for seq in s.running.values() if seq.slot != NO_SLOT] + arena._free_slots
    assert sorted(slots) == list(range(spec.num_slots)), "slots are taken or free"


def _check_plans(s: Scheduler) -> None:
    spec = s.spec
    pending = dict.fromkeys(s.running, 0)
    for plan in s.inflight:
        assert plan.work, "a plan has work"
        assert plan.num_tokens <= s.max_batch_tokens, "a step keeps to its budget"
        assert len({w.row for w in plan.work}) == len({w.sequence for w in plan.work}) == len(plan.work)
        for w in plan.work:
            assert w.length > 0 and len(w.gained) <= spec.blocks_for(w.start + w.length)
            assert w.length - 1 <= len(w.tokens) <= w.length, "only the last input may be pending"
            seq = s.running.get(w.sequence)
            if w.sample and seq is not None and seq.epoch == w.epoch:
                pending[w.sequence] += 1
    for seq in s.running.values():
        assert seq.pending == pending[seq.id], "pending tokens are those being sampled in flight"
