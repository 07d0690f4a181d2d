"""Requests that share a prefix on a hybrid model: where states are worth a checkpoint, and who waits for one.

A state cannot be rewound, so whoever computes a shared prefix has to stop where the others branch off, save its
state, and let them continue from there. Dense models need none of this: a block can be read in the very step that
writes it.
"""

from __future__ import annotations

from tenfold.core.cache import Cache, Match
from tenfold.core.sequence import Sequence


class Joins:
    """``wanted`` counts the waiting sequences that contain a block; ``watched`` are running ones with marks ahead."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.active = bool(cache.spec.slot_pages) and cache.reuse
        self.wanted: dict[bytes, int] = {}
        self.watched: dict[int, Sequence] = {}

    def expect(self, seq: Sequence) -> None:
        """``seq`` waits."""
        if self.active:
            self.cache.name(seq)
            for key in seq.keys:
                self.wanted[key] = self.wanted.get(key, 0) + 1

    def forget(self, seq: Sequence) -> None:
        """``seq`` waits no more."""
        if self.active:
            for key in seq.keys:
                self.wanted[key] -= 1
                if not self.wanted[key]:
                    del self.wanted[key]

    def marks(self, seq: Sequence, match: Match) -> list[int]:
        """Positions after the match at which the state of ``seq`` should be saved, in order.

        Those are the request's breakpoints; the depth to which its blocks were known already, because there an earlier
        sequence branched off; and the last block that another waiting sequence has in common with it.
        """
        if not self.active:
            return []
        size, last = self.cache.spec.block_size, len(seq.tokens) - 1
        places = set(seq.request.breakpoints)
        if not seq.epoch:  # a sequence that was preempted finds its own blocks: nobody branched off there
            places.add(min(match.depth, last))
        for block in range(last // size - 1, match.position // size - 1, -1):
            if self.wanted.get(seq.keys[block], 0) > 1:  # itself and another
                places.add((block + 1) * size)
                break
        return sorted(place for place in places if match.position < place <= last)

    def wanted_after(self, seq: Sequence, match: Match) -> bool:
        """Whether another waiting sequence could use the checkpoint that ``seq`` matched."""
        block = match.position // self.cache.spec.block_size - 1
        return self.active and block >= 0 and self.wanted.get(seq.keys[block], 0) > 1

    def awaits(self, seq: Sequence, match: Match) -> bool:
        """Whether a running sequence is about to reach a position from which ``seq`` could start further on."""
        return any(
            match.position < mark < len(seq.tokens) and self._agree(seq, other, mark)
            for other in self.watched.values()
            for mark in other.marks
        )

    def watch(self, seq: Sequence, marks: list[int]) -> None:
        """``seq`` runs with ``marks`` ahead of it."""
        seq.marks = marks
        if marks:
            self.watched[seq.id] = seq

    def unwatch(self, seq: Sequence) -> None:
        """``seq`` stopped running."""
        self.watched.pop(seq.id, None)

    def save_reached(self) -> None:
        """Save the state of every sequence that stands at a mark, before its next work moves it on."""
        for seq in list(self.watched.values()):
            if seq.issued != seq.marks[0]:
                continue
            del seq.marks[0]
            if not seq.marks:
                del self.watched[seq.id]
            block = seq.issued // self.cache.spec.block_size - 1
            self.cache.checkpoint(seq, urgent=block >= 0 and seq.keys[block] in self.wanted)

    def _agree(self, seq: Sequence, other: Sequence, position: int) -> bool:
        """Whether both have the same first ``position`` tokens, and the same tenant."""
        full, size = position // self.cache.spec.block_size, self.cache.spec.block_size
        same = seq.keys[full - 1] == other.keys[full - 1] if full else seq.root == other.root
        return same and seq.tokens[full * size : position] == other.tokens[full * size : position]
