"""Every invariant of the core, in one place. Tests call ``check`` after every event."""

from __future__ import annotations

from tenfold.core.arena import CACHED, FREE, SLOT
from tenfold.core.prefix import Key
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
        assert seq.published <= seq.issued // spec.block_size, "only what is issued is published"
    for seq in s.waiting:
        assert seq.row == NO_ROW and seq.slot == NO_SLOT and not seq.table, "waiting costs nothing"
        assert seq.issued == seq.committed == seq.pending == 0, "waiting sequences start from the beginning"
    keys = [order(seq) for seq in s.waiting]
    assert keys == sorted(keys), "the queue is in the policy's order"
    waiting = {seq.id for seq in s.waiting}
    assert len(waiting) == len(s.waiting) and waiting.isdisjoint(s.running), "a sequence waits or runs, once"
    following = {each.id for leader in s.live.values() for each in leader.followers}
    searches = {id(seq.search): seq.search for seq in s.live.values() if seq.search is not None}.values()
    for search in searches:
        assert len(search.members) == search.width == len({seq.id for seq in search.members}), "a beam for each member"
        assert len({len(seq.tokens) for seq in search.beams}) == 1, "beams grow together"
        assert len(search.beams) == len(search.scores) and not search.complete, "a search waits for some beam"
        assert all(seq.id in s.running or seq in s.waiting for seq in search.beams), "beams run or wait"
        following |= {seq.id for seq in search.idle}
    assert waiting | s.running.keys() | following == s.live.keys(), "live = waiting, running and about to branch off"
    assert following.isdisjoint(waiting | s.running.keys()), "who follows neither waits nor runs"
    assert s.leading == {i: seq for i, seq in s.running.items() if seq.followers}, "leaders have followers"
    assert s.promised <= len(s._rows) or len(s.running) == 1, "a group has rows for all its samples, or it runs alone"
    wanted: dict[bytes, int] = {}
    for seq in s.waiting if s.joins.active else ():
        for key in seq.keys:
            wanted[key] = wanted.get(key, 0) + 1
    assert wanted == s.joins.wanted, "wanted counts the blocks of those who wait"
    assert s.joins.watched == {i: seq for i, seq in s.running.items() if seq.marks}, "watched are those with marks"
    assert all(mark >= seq.issued for seq in s.running.values() for mark in seq.marks), "marks lie ahead"
    rows = [seq.row for seq in s.running.values()] + s._rows
    assert sorted(rows) == list(range(s.max_sequences)), "rows are held or free"


def _check_arena(s: Scheduler) -> None:
    spec, arena = s.spec, s.cache.arena
    owners = [FREE] * spec.num_pages
    index = s.cache.index
    slots = [seq.slot for seq in s.running.values() if seq.slot != NO_SLOT]
    slots += [checkpoint.slot for checkpoint in index.checkpoints.values()]
    for slot in slots:
        first = spec.slot_page(slot)
        for page in range(first, first + spec.slot_pages):
            assert owners[page] == FREE, "a slot belongs to one sequence or checkpoint"
            owners[page] = SLOT
    for seq in s.running.values():
        assert len(set(seq.table)) == len(seq.table), "a table names a block once"
        for page in seq.table:
            assert owners[page] != SLOT, "a block is not part of a slot"
            owners[page] += 1
    for page in index.keys_at:
        assert owners[page] != SLOT, "a slot has no name"
        if owners[page] == FREE:
            owners[page] = CACHED
    assert owners == arena.owners, "references are the appearances in tables, cached is what is named beyond them"
    assert arena.cached == owners.count(CACHED), "cached pages are counted"
    assert arena.free == owners.count(FREE), "free pages are counted"
    queued = [page for page in range(spec.num_pages) if arena._queued[page]]
    assert sorted(arena._free_pages) == queued, "the heap holds what it says it holds"
    assert {page for page in range(spec.num_pages) if owners[page] == FREE} <= set(queued), "every free page is found"
    assert sorted(slots + arena._free_slots) == list(range(spec.num_slots)), "slots are taken or free"
    _check_index(s)


def _check_index(s: Scheduler) -> None:
    index, owners = s.cache.index, s.cache.arena.owners
    assert index.page_of == {key: page for page, keys in index.keys_at.items() for key in keys}, "names and pages agree"
    needed: dict[Key, int] = {}
    tails: dict[bytes, dict[int, int]] = {}
    for key, checkpoint in index.checkpoints.items():
        assert key == checkpoint.key and not checkpoint.pinned, "checkpoints go by their position's name"
        assert all(each in index.page_of for each in checkpoint.path), "what a checkpoint stands on is there"
        assert checkpoint in index._stamps, "an idle checkpoint can be evicted"
        for each in checkpoint.path:
            needed[each] = needed.get(each, 0) + 1
        if isinstance(key, tuple):
            lengths = tails.setdefault(key[0], {})
            lengths[len(key[1])] = lengths.get(len(key[1]), 0) + 1
    assert needed == index.needed, "needed counts the checkpoints that stand on a block"
    assert tails == index.tails, "tails count the checkpoints in the middle of a block"
    for page, keys in index.keys_at.items():
        evictable = any(key in index._stamps for key in keys)
        stands = any(key in needed for key in keys)
        assert evictable == (owners[page] == CACHED and not stands), "evictable is what nobody holds or stands on"


def _check_plans(s: Scheduler) -> None:
    spec = s.spec
    pending = dict.fromkeys(s.running, 0)
    for plan in s.inflight:
        for entry in plan.entries:
            if entry.source >= 0 and entry.sequence in s.running and s.running[entry.sequence].epoch == entry.epoch:
                pending[entry.sequence] += 1
        assert plan.work, "a plan has work"
        assert plan.num_tokens <= s.max_batch_tokens, "a step keeps to its budget"
        assert len({w.row for w in plan.work}) == len({w.sequence for w in plan.work}) == len(plan.work)
        for w in plan.work:
            assert w.length > 0 and len(w.gained) <= spec.blocks_for(w.start + w.length)
            assert w.length - 1 <= len(w.tokens) <= w.length, "only the last input may be pending"
            seq = s.running.get(w.sequence)
            if w.sample and seq is not None and seq.epoch == w.epoch:
                pending[w.sequence] += seq.draws
    for seq in s.running.values():
        assert seq.pending == pending[seq.id], "pending tokens are those being sampled in flight"
