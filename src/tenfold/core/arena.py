"""Pages, blocks and slots: one arena, two pools, and a boundary that moves.

    page 0                                                        page num_pages - 1
    | block | block | free | block | free ... free |  slot 2 | slot 1 | slot 0 |
      blocks: lowest page first  ->                    <-  slots: highest first

Every page is exactly one of: free, a block (with a count of references), or part of a taken slot. Taking a slot whose
pages hold blocks moves those blocks to the lowest free pages; nothing else ever moves.
"""

from __future__ import annotations

import heapq

from tenfold.core.spec import CacheSpec

FREE = 0
SLOT = -1


class Arena:
    """Bookkeeping of pages. Callers check ``free`` first: the methods themselves never fail half-way.

    ``owners[page]`` is the number of references to the block in that page, or ``FREE``, or ``SLOT``.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.owners = [FREE] * spec.num_pages
        self.free = spec.num_pages
        self._free_pages = list(range(spec.num_pages))  # a heap that may hold stale and omit no free page
        self._queued = bytearray(b"\1") * spec.num_pages  # whether a page is in the heap
        self._free_slots = list(range(spec.num_slots))

    @property
    def slots_taken(self) -> int:
        return self.spec.num_slots - len(self._free_slots)

    @property
    def slots_free(self) -> int:
        """Slots that could be taken now: limited by the grid and by the free pages that blocks leave."""
        if not self.spec.slot_pages:
            return 0
        return min(len(self._free_slots), self.free // self.spec.slot_pages)

    def take_block(self) -> int:
        """The lowest free page, now a block with one reference. Needs ``free >= 1``."""
        owners, queued = self.owners, self._queued
        while True:
            page = heapq.heappop(self._free_pages)
            queued[page] = 0
            if owners[page] == FREE:
                owners[page] = 1
                self.free -= 1
                return page

    def share_block(self, page: int) -> None:
        """One more reference to a referenced block."""
        self.owners[page] += 1

    def release_block(self, page: int) -> None:
        """Drop one reference; the page is free when it was the last."""
        owners = self.owners
        if owners[page] <= 0:
            raise RuntimeError(f"page {page} is not a referenced block")
        owners[page] -= 1
        if owners[page] == FREE:
            self._freed(page)

    def take_slot(self) -> tuple[int, dict[int, int]]:
        """The highest free slot, and where the blocks on its pages moved: ``{old page: new page}``.

        Needs ``free >= slot_pages``; then a slot of the grid is free, and enough free pages lie outside it.
        """
        slot = heapq.heappop(self._free_slots)
        owners = self.owners
        first = self.spec.slot_page(slot)
        evicted: list[tuple[int, int]] = []
        for page in range(first, first + self.spec.slot_pages):
            if owners[page] != FREE:
                evicted.append((page, owners[page]))
            else:
                self.free -= 1
            owners[page] = SLOT
        moves = {}
        for page, references in evicted:
            moves[page] = target = self.take_block()
            owners[target] = references
        return slot, moves

    def release_slot(self, slot: int) -> None:
        first = self.spec.slot_page(slot)
        for page in range(first, first + self.spec.slot_pages):
            if self.owners[page] != SLOT:
                raise RuntimeError(f"page {page} is not part of a taken slot")
            self.owners[page] = FREE
            self._freed(page)
        heapq.heappush(self._free_slots, slot)

    def _freed(self, page: int) -> None:
        self.free += 1
        if not self._queued[page]:
            self._queued[page] = 1
            heapq.heappush(self._free_pages, page)
