"""Which checkpoint is given up first: compute saved per page, times how often it was wanted, and recency."""

from __future__ import annotations

from tenfold.core import CacheSpec
from tenfold.core.prefix import Checkpoint, PrefixIndex


def index_with(*checkpoints: Checkpoint) -> PrefixIndex:
    index = PrefixIndex(CacheSpec(block_size=4, num_pages=64, slot_pages=2))
    for checkpoint in checkpoints:
        index.add_checkpoint(checkpoint)
    return index


def checkpoint(name: bytes, value: float, uses: int = 0) -> Checkpoint:
    return Checkpoint(position=4, slot=0, path=(name,), value=value, leaf=False, uses=uses)


def test_what_saves_least_per_page_goes_first() -> None:
    cheap, dear = checkpoint(b"cheap", 2.0), checkpoint(b"dear", 3.0)
    assert index_with(dear, cheap).victim() is cheap


def test_one_that_sequences_started_from_outlives_one_that_saves_more_but_was_never_used() -> None:
    used, unused = checkpoint(b"used", 2.0, uses=1), checkpoint(b"unused", 3.0)
    assert index_with(used, unused).victim() is unused


def test_uses_long_ago_do_not_keep_it_for_ever() -> None:
    old = checkpoint(b"old", 2.0, uses=3)
    index = index_with(old)
    for i in range(10):
        index.add_checkpoint(checkpoint(b"new %d" % i, 3.0))
        if index.victim() is old:
            return
    raise AssertionError("what nobody wants any more stays")
