"""Pages, blocks and slots alone: who owns a page, which one is handed out, and what follows a move."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.core import CacheSpec
from tenfold.core.arena import FREE, SLOT, Arena

POISON = "poison"


def test_blocks_are_handed_out_lowest_page_first() -> None:
    arena = Arena(CacheSpec(1, 6))
    assert [arena.take_block() for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    for page in (4, 1, 3):
        arena.release_block(page)
    assert [arena.take_block() for _ in range(3)] == [1, 3, 4]
    assert arena.free == 0


def test_slots_are_handed_out_highest_first() -> None:
    arena = Arena(CacheSpec(1, 10, 3))
    assert [arena.take_slot() for _ in range(3)] == [(0, {}), (1, {}), (2, {})]
    assert arena.owners == [FREE] + [SLOT] * 9
    arena.release_slot(2)
    arena.release_slot(0)
    assert arena.take_slot() == (0, {})
    assert (arena.slots_taken, arena.slots_free, arena.free) == (2, 1, 4)


def test_a_block_lives_until_its_last_reference() -> None:
    arena = Arena(CacheSpec(1, 2))
    page = arena.take_block()
    arena.share_block(page)
    arena.release_block(page)
    assert (arena.owners[page], arena.free) == (1, 1)
    arena.release_block(page)
    assert (arena.owners[page], arena.free) == (FREE, 2)


def test_a_slot_moves_the_blocks_in_its_way_to_the_lowest_free_pages() -> None:
    arena = Arena(CacheSpec(1, 8, 3))
    for _ in range(7):
        arena.take_block()
    arena.share_block(6)
    for page in (0, 2, 4):
        arena.release_block(page)
    slot, moves = arena.take_slot()
    assert (slot, moves) == (0, {5: 0, 6: 2})
    assert arena.owners == [1, 1, 2, 1, FREE, SLOT, SLOT, SLOT], "references move with the block"
    assert arena.free == 1


def test_slots_free_is_bound_by_the_pages_that_blocks_leave() -> None:
    arena = Arena(CacheSpec(1, 9, 3))
    assert arena.slots_free == 3
    for _ in range(4):
        arena.take_block()
    assert arena.slots_free == 1
    assert Arena(CacheSpec(1, 9)).slots_free == 0


def test_releasing_what_is_not_held_is_an_error_that_changes_nothing() -> None:
    arena = Arena(CacheSpec(1, 5, 2))
    page = arena.take_block()
    arena.take_slot()
    before = (list(arena.owners), arena.free)
    with pytest.raises(RuntimeError, match="page 1 is not a referenced block"):
        arena.release_block(1)
    with pytest.raises(RuntimeError, match="page 4 is not a referenced block"):
        arena.release_block(4)
    with pytest.raises(RuntimeError, match="page 1 is not part of a taken slot"):
        arena.release_slot(1)
    assert (arena.owners, arena.free) == before
    arena.release_block(page)
    with pytest.raises(RuntimeError, match="page 0"):
        arena.release_block(page)


class Shadow:
    """An arena beside what its pages would hold: every block and slot has a content of its own.

    A freed page is poisoned. Moves copy contents in the order they are listed, as a runner does.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.arena = Arena(spec)
        self.memory = [POISON] * spec.num_pages
        self.blocks: dict[str, int] = {}
        self.references: Counter[str] = Counter()
        self.slots: dict[str, int] = {}
        self.made = 0

    def name(self) -> str:
        self.made += 1
        return f"content {self.made}"

    def pages_of(self, slot: int) -> range:
        first = self.arena.spec.slot_page(slot)
        return range(first, first + self.arena.spec.slot_pages)

    def take_block(self) -> None:
        lowest = self.arena.owners.index(FREE)
        name = self.name()
        self.blocks[name] = page = self.arena.take_block()
        assert page == lowest
        assert self.memory[page] == POISON, "a page that is handed out held nothing"
        self.memory[page] = name
        self.references[name] = 1

    def share_block(self, name: str) -> None:
        self.arena.share_block(self.blocks[name])
        self.references[name] += 1

    def release_block(self, name: str) -> None:
        self.arena.release_block(self.blocks[name])
        self.references[name] -= 1
        if not self.references[name]:
            self.memory[self.blocks.pop(name)] = POISON

    def take_slot(self) -> None:
        highest = min(set(range(self.arena.spec.num_slots)) - set(self.slots.values()))
        slot, moves = self.arena.take_slot()
        assert slot == highest
        assert moves.keys() == set(self.pages_of(slot)) & set(self.blocks.values()), "only what is in the way moves"
        assert not set(moves.values()) & set(self.pages_of(slot))
        assert list(moves.values()) == sorted(moves.values())
        for source, target in moves.items():
            assert self.memory[target] == POISON, "a block moves to a free page"
            self.memory[target], self.memory[source] = self.memory[source], POISON
        self.blocks = {name: moves.get(page, page) for name, page in self.blocks.items()}
        name = self.name()
        self.slots[name] = slot
        for page in self.pages_of(slot):
            assert self.memory[page] == POISON
            self.memory[page] = name

    def release_slot(self, name: str) -> None:
        slot = self.slots.pop(name)
        self.arena.release_slot(slot)
        for page in self.pages_of(slot):
            self.memory[page] = POISON

    def check(self) -> None:
        arena, spec = self.arena, self.arena.spec
        taken = len(self.slots) * spec.slot_pages
        assert arena.free + len(self.blocks) + taken == spec.num_pages, "every page is exactly one of three"
        assert arena.free == arena.owners.count(FREE) == self.memory.count(POISON)
        assert arena.slots_taken == len(self.slots)
        for name, page in self.blocks.items():
            assert self.memory[page] == name, "a block holds what was written to it"
            assert arena.owners[page] == self.references[name]
        for name, slot in self.slots.items():
            assert {self.memory[page] for page in self.pages_of(slot)} == {name}
            assert {arena.owners[page] for page in self.pages_of(slot)} == {SLOT}


@settings(max_examples=200, deadline=None)
@given(
    spec=st.builds(CacheSpec, st.just(1), st.integers(1, 24), st.integers(0, 5)),
    choices=st.lists(
        st.tuples(st.sampled_from(["take", "share", "drop", "slot", "leave"]), st.integers(0)), max_size=80
    ),
)
def test_every_page_is_free_or_a_block_or_in_a_slot_and_contents_survive(
    spec: CacheSpec, choices: list[tuple[str, int]]
) -> None:
    shadow = Shadow(spec)
    for action, choice in choices:
        blocks, slots = list(shadow.blocks), list(shadow.slots)
        if action == "take" and shadow.arena.free:
            shadow.take_block()
        elif action == "share" and blocks:
            shadow.share_block(blocks[choice % len(blocks)])
        elif action == "drop" and blocks:
            shadow.release_block(blocks[choice % len(blocks)])
        elif action == "slot" and shadow.arena.slots_free:
            shadow.take_slot()
        elif action == "leave" and slots:
            shadow.release_slot(slots[choice % len(slots)])
        shadow.check()
    for name in list(shadow.slots):
        shadow.release_slot(name)
    while shadow.blocks:
        shadow.release_block(next(iter(shadow.blocks)))
    shadow.check()
    assert shadow.arena.free == spec.num_pages
    assert [shadow.arena.take_block() for _ in range(spec.num_pages)] == list(range(spec.num_pages)), "none is lost"
