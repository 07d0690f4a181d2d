"""The real allocator's word on how many sessions fit."""

from __future__ import annotations

from tenfold.core import Cache, CacheSpec, Request, Sequence
from tenfold.core.cache import NOTHING


def sessions_admitted(spec: CacheSpec, context: int) -> int:
    """Admit sessions of ``context`` tokens to a fresh ``Cache`` until one does not fit; returns how many did."""
    cache = Cache(spec, reuse=False)
    while cache.admit(Sequence.of(Request(len(cache.holders), (0,), 1)), NOTHING, context):
        pass
    return len(cache.holders)
