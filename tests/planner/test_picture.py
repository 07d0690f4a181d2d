"""The arena as text."""

from __future__ import annotations

import re

from tenfold.core import Cache, CacheSpec, Request, Sequence
from tenfold.core.cache import NOTHING
from tenfold.planner import draw


def cache_of(*lengths: int, pages: int = 30, slot_pages: int = 3) -> Cache:
    cache = Cache(CacheSpec(4, pages, slot_pages), reuse=True)
    for number, length in enumerate(lengths):
        assert cache.admit(Sequence.of(Request(number, (number,) * length, 1)), NOTHING, length)
    return cache


def test_blocks_slots_and_free_pages() -> None:
    assert draw(cache_of(8, 9), width=10) == "aabbb·····\n··········\n····BBBAAA"


def test_a_shared_block_and_what_is_cached() -> None:
    cache = cache_of(8, 8)
    a, b = cache.holders.values()
    child = Sequence.of(Request(2, (0,) * 8, 1))
    a.issued = a.committed = b.issued = b.committed = 8
    assert cache.fork(a, child, defer=False)
    assert draw(cache, width=30) == "**bb" + "·" * 17 + "CCCBBBAAA"
    cache.release(b)
    assert draw(cache, width=30) == "**--" + "·" * 17 + "BBB---AAA"


def test_a_reservation_is_drawn_where_it_would_lie() -> None:
    assert draw(cache_of(8), width=30, reserved=7) == "aa░░░░░" + "·" * 20 + "AAA"


def test_a_large_arena_takes_no_more_lines() -> None:
    picture = draw(cache_of(4_000, pages=10_000), width=50, rows=4)
    assert [len(line) for line in picture.splitlines()] == [50, 50, 50, 50]
    assert picture.startswith("a" * 20 + "·")


def test_colours_change_nothing_but_colours() -> None:
    cache = cache_of(8, 9)
    painted = draw(cache, width=10, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == draw(cache, width=10)
    assert all(line.endswith("\x1b[0m") for line in painted.splitlines())


def test_letters_can_be_given() -> None:
    assert draw(cache_of(4, pages=8, slot_pages=0), letters={0: "q"}) == "q" + "·" * 7
