"""The only owner of memory decisions: a call succeeds wholly or changes nothing.

    tokens     | committed | in flight | to issue |
    table      [ block ][ block ][ block ][ ..tail ]      covers exactly the issued tokens
                                          ^ waste is at most one tail

A sequence that holds memory is a *holder*: it has a block table and, on hybrid models, one state slot.
"""

from __future__ import annotations

from tenfold.core.arena import Arena
from tenfold.core.plan import Copy
from tenfold.core.sequence import NO_SLOT, Sequence
from tenfold.core.spec import CacheSpec


class Cache:
    """Blocks and slots of every running sequence.

    ``copies`` collects what the next plan has to execute before its work, in order; ``moved`` the pages among their
    targets whose owners' tables changed. Both are taken by the scheduler when it makes a plan.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.arena = Arena(spec)
        self.holders: dict[int, Sequence] = {}
        self.copies: list[Copy] = []
        self.moved: set[int] = set()
        self.pages_moved = 0
        self.failures = {"blocks": 0, "slots": 0}

    def admit(self, seq: Sequence, length: int) -> bool:
        """Give ``seq`` a state slot and the blocks for its first ``length`` tokens."""
        blocks = self.spec.blocks_for(length)
        if self.arena.free < blocks + self.spec.slot_pages:
            self.failures["slots" if self.arena.free < self.spec.slot_pages else "blocks"] += 1
            return False
        if self.spec.slot_pages:
            seq.slot, moves = self.arena.take_slot()
            if moves:
                self._move(moves)
        seq.table = [self.arena.take_block() for _ in range(blocks)]
        self.holders[seq.id] = seq
        return True

    def extend(self, seq: Sequence, length: int) -> bool:
        """Let the table of ``seq`` cover ``length`` tokens."""
        missing = self.spec.blocks_for(length) - len(seq.table)
        if missing > self.arena.free:
            self.failures["blocks"] += 1
            return False
        for _ in range(missing):
            seq.table.append(self.arena.take_block())
        return True

    def release(self, seq: Sequence) -> None:
        """Take back all that ``seq`` holds."""
        for page in reversed(seq.table):
            self.arena.release_block(page)
        seq.table = []
        if seq.slot != NO_SLOT:
            self.arena.release_slot(seq.slot)
            seq.slot = NO_SLOT
        del self.holders[seq.id]

    @property
    def tail_waste(self) -> int:
        """Token places in referenced blocks that hold no token."""
        size = self.spec.block_size
        return sum(len(seq.table) * size - seq.issued for seq in self.holders.values())

    def _move(self, moves: dict[int, int]) -> None:
        """Blocks left the pages of a slot: list the copies and rewrite the tables that name them."""
        self.copies += _runs(moves)
        self.moved.difference_update(moves)
        self.moved.update(moves.values())
        self.pages_moved += len(moves)
        for seq in self.holders.values():
            if not moves.keys().isdisjoint(seq.table):
                seq.table = [moves.get(page, page) for page in seq.table]


def _runs(moves: dict[int, int]) -> list[Copy]:
    """Single-page moves, joined where both sides are consecutive and the ranges do not overlap."""
    runs: list[Copy] = []
    for source, target in moves.items():
        if runs:
            last = runs[-1]
            pages = last.pages + 1
            joins = source == last.source + last.pages and target == last.target + last.pages
            if joins and abs(last.source - last.target) >= pages:
                runs[-1] = Copy(last.source, last.target, pages)
                continue
        runs.append(Copy(source, target, 1))
    return runs
