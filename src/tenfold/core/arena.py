"""Pages, blocks and slots: one arena, two pools, and a boundary that moves.

    page 0                                                        page num_pages - 1
    | block | block | free | block | free ... free |  slot 2 | slot 1 | slot 0 |
      blocks: lowest page first  ->                    <-  slots: highest first

Every page is exactly one of: free, a block (referenced, or cached with no reference), or part of a taken slot. Taking a
slot whose pages hold blocks moves those blocks to the lowest free pages; nothing else ever moves.
"""

from __future__ import annotations

import heapq

from tenfold.core.spec import CacheSpec

FREE = 0
SLOT = -1
CACHED = -2


class Arena:
    """Bookkeeping of pages. Callers check ``free`` first: the methods themselves never fail half-way.

    ``owners[page]`` is the number of references to the block in that page, or ``FREE``, ``CACHED`` or ``SLOT``;
    ``free`` and ``cached`` count the pages in those states.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.owners = [FREE] * spec.num_pages
        self.free = spec.num_pages
        self.cached = 0
        self._free_pages = list(range(spec.num_pages))  # a heap that may hold stale and omits no free page
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
        """One more reference to a referenced or cached block."""
        if self.owners[page] == CACHED:
            self.owners[page] = 1
            self.cached -= 1
        else:
            self.owners[page] += 1

    def release_block(self, page: int, keep: bool = False) -> bool:
        """Drop one reference; True if it was the last. The page is then cached if ``keep``, else free."""
        owners = self.owners
        if owners[page] <= 0:
            raise RuntimeError(f"page {page} is not a referenced block")
        owners[page] -= 1
        if owners[page]:
            return False
        if keep:
            owners[page] = CACHED
            self.cached += 1
        else:
            self._freed(page)
        return True

    def drop_block(self, page: int) -> None:
        """A cached block is given up."""
        if self.owners[page] != CACHED:
            raise RuntimeError(f"page {page} is not a cached block")
        self.owners[page] = FREE
        self.cached -= 1
        self._freed(page)

    def take_slot(self) -> tuple[int, dict[int, int]]:
        """The highest free slot, and where the blocks on its pages moved: ``{old page: new page}``.

        Needs ``free >= slot_pages``; then a slot of the grid is free, and enough free pages lie outside it.
        """
        slot = heapq.heappop(self._free_slots)
        owners = self.owners
        first = self.spec.slot_page(slot)
        displaced: list[tuple[int, int]] = []
        for page in range(first, first + self.spec.slot_pages):
            if owners[page] != FREE:
                displaced.append((page, owners[page]))
            else:
                self.free -= 1
            owners[page] = SLOT
        moves = {}
        for page, state in displaced:
            moves[page] = target = self.take_block()
            owners[target] = state
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
