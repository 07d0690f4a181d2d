"""What is known of past prefixes: blocks by content, state checkpoints by position, and which of them to give up first.

A full block is named by a hash chained over everything before it, from a root that depends on the tenant's salt: equal
names mean equal prefixes, and one tenant's names mean nothing to another. KV can be shared at any block. A recurrent
state cannot be rewound, so on hybrid models a hit needs a *checkpoint* of the state at exactly its position;
checkpoints may stand at any token, and then name the partly filled block before them by (name of the block before,
the tokens in it).

    tokens      |  block a  |  block b  |  block c  | d e f ...
    names       root -> a -> b -> c
    checkpoint                                       ^ (c, (d, e)): state after two more tokens
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tenfold.core.spec import CacheSpec

Key = Any
"""Name of a block: 16 bytes, or for a partly filled one ``(bytes, tuple of tokens)``."""
NAME_BYTES = 16
ORPHAN = -1.0
"""Priority of blocks that no checkpoint needs: on a hybrid model nothing can resume from them."""


def root(salt: str) -> bytes:
    """Name of the empty prefix of a tenant."""
    return blake2b(salt.encode(), digest_size=NAME_BYTES, person=b"tenfold").digest()


def chain(parent: bytes, tokens: array[int]) -> bytes:
    """Name of the block that holds ``tokens`` after the prefix named ``parent``."""
    return blake2b(tokens, key=parent, digest_size=NAME_BYTES).digest()


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A recurrent state at ``position``. ``path`` names the blocks before it, its own partly filled one included.
    ``value`` is the compute it saves per page each time a sequence starts from a copy of it, ``uses`` how often one
    has."""

    position: int
    slot: int
    path: tuple[Key, ...]
    value: float
    leaf: bool
    pinned: bool = False
    uses: int = 0

    @property
    def key(self) -> Key:
        return self.path[-1]


class PrefixIndex:
    """Names of blocks and checkpoints, and their order of eviction. It owns no memory: ``Cache`` acts on its answers.

    Priorities follow GreedyDual-Size-Frequency (Cherkasova, 1998): what an item saves per page times how often it was
    wanted, plus an offset that rises to the priority of whatever is evicted, so that recency, frequency and value are
    one number. An item's value is its compute saved per page, from the model's own costs.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.page_of: dict[Key, int] = {}
        self.keys_at: dict[int, tuple[Key, ...]] = {}  # in tuples, which the garbage collector leaves alone
        self.checkpoints: dict[Key, Checkpoint] = {}
        self.needed: dict[Key, int] = {}  # checkpoints that stand on a block, for hybrid models
        self.tails: dict[bytes, dict[int, int]] = {}  # block name -> length of checkpoints' partial blocks -> how many
        self.clock = 0.0
        self.ghosts: OrderedDict[Key, None] = OrderedDict()
        self._heap: list[tuple[float, int, int, Key | Checkpoint]] = []
        self._stamps: dict[Any, int] = {}
        self._stamp = 0

    # Blocks

    def add_block(self, key: Key, page: int) -> bool:
        """Name the block in ``page``; False if another page already has that name."""
        if key in self.page_of:
            return False
        self.page_of[key] = page
        self.keys_at[page] = (*self.keys_at.get(page, ()), key)
        if self.ghosts:
            self.ghosts.pop(key, None)
        return True

    def forget_page(self, page: int) -> None:
        """The content of ``page`` is about to be lost."""
        for key in self.keys_at.pop(page, ()):
            del self.page_of[key]
            self.withdraw(key)
            self._remember(key)

    def forget_key(self, key: Key) -> None:
        """One name of a page is void; the page may have others."""
        page = self.page_of.pop(key)
        self.withdraw(key)
        others = tuple(each for each in self.keys_at.pop(page) if each != key)
        if others:
            self.keys_at[page] = others

    def move(self, moves: dict[int, int]) -> None:
        for source in moves.keys() & self.keys_at.keys():
            keys = self.keys_at.pop(source)
            self.keys_at[moves[source]] = keys
            for key in keys:
                self.page_of[key] = moves[source]

    def offer_block(self, page: int, depth: int) -> None:
        """``page`` has no reference any more: it may be evicted, unless a checkpoint stands on it."""
        keys = self.keys_at[page]
        if self.spec.slot_pages and not self.needed.keys().isdisjoint(keys):
            return
        priority = ORPHAN if self.spec.slot_pages else self.clock + self.spec.block_value
        self._push(keys[0], priority, depth)

    def withdraw_page(self, page: int) -> None:
        """``page`` has a reference again."""
        for key in self.keys_at.get(page, ()):
            self.withdraw(key)

    # Checkpoints

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoints[checkpoint.key] = checkpoint
        if isinstance(checkpoint.key, tuple):
            lengths = self.tails.setdefault(checkpoint.key[0], {})
            length = len(checkpoint.key[1])
            lengths[length] = lengths.get(length, 0) + 1
        for key in checkpoint.path:
            self.needed[key] = self.needed.get(key, 0) + 1
            self.withdraw(key)
        self.ghosts.pop(("checkpoint", checkpoint.key), None)
        self.touch(checkpoint)

    def touch(self, checkpoint: Checkpoint) -> None:
        """It was made or used just now."""
        self._push(checkpoint, self.clock + checkpoint.value * (1 + checkpoint.uses), checkpoint.position)

    def remove_checkpoint(self, checkpoint: Checkpoint) -> list[tuple[int, Key]]:
        """Forget it; returns depths and names of the blocks that no checkpoint stands on any more."""
        del self.checkpoints[checkpoint.key]
        self.withdraw(checkpoint)
        if isinstance(checkpoint.key, tuple):
            parent, tail = checkpoint.key
            lengths = self.tails[parent]
            lengths[len(tail)] -= 1
            if not lengths[len(tail)]:
                del lengths[len(tail)]
            if not lengths:
                del self.tails[parent]
        orphans = []
        for depth, key in enumerate(checkpoint.path):
            self.needed[key] -= 1
            if not self.needed[key]:
                del self.needed[key]
                orphans.append((depth, key))
        return orphans

    def checkpoint_before(self, keys: Tokens[bytes], base: bytes, tokens: Tokens[int], depth: int) -> Checkpoint | None:
        """The deepest checkpoint at most one token short of ``tokens``, whose first ``depth`` blocks are at hand."""
        size, last = self.spec.block_size, len(tokens) - 1
        for block in range(min(depth, last // size), -1, -1):
            parent = keys[block - 1] if block else base
            for length in sorted(self.tails.get(parent, ()), reverse=True):
                end = block * size + length
                if end <= last:
                    found = self.checkpoints.get((parent, tuple(tokens[block * size : end])))
                    if found is not None:
                        return found
            if block and (found := self.checkpoints.get(parent)) is not None:
                return found
        return None

    # Eviction

    def victim(self) -> Key | Checkpoint | None:
        """The item of least priority, withdrawn; None if there is none. The clock rises to its priority."""
        while self._heap:
            priority, _, stamp, item = heapq.heappop(self._heap)
            if self._stamps.get(item) == stamp:
                del self._stamps[item]
                self.clock = max(self.clock, priority)
                return item
        return None

    def least(self) -> float | None:
        """Priority of the next victim."""
        while self._heap and self._stamps.get(self._heap[0][3]) != self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def withdraw(self, item: Key | Checkpoint) -> None:
        self._stamps.pop(item, None)

    def evicted_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._remember(("checkpoint", checkpoint.key))

    def _push(self, item: Key | Checkpoint, priority: float, depth: int) -> None:
        self._stamp += 1
        self._stamps[item] = self._stamp
        heapq.heappush(self._heap, (priority, -depth, self._stamp, item))
        if len(self._heap) > 4 * len(self._stamps) + 64:
            self._heap = [entry for entry in self._heap if self._stamps.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)

    def _remember(self, key: Key) -> None:
        """Names of what was evicted, as many as there are pages: they tell an eviction from a first sight."""
        self.ghosts[key] = None
        if len(self.ghosts) > self.spec.num_pages:
            self.ghosts.popitem(last=False)


def path_of(keys: Tokens[bytes], base: bytes, tokens: Tokens[int], position: int, size: int) -> tuple[Key, ...]:
    """Names of the blocks that hold the first ``position`` tokens, a partly filled last one included."""
    full = position // size
    path: Iterable[Key] = keys[:full]
    if position % size:
        parent = keys[full - 1] if full else base
        return (*path, (parent, tuple(tokens[full * size : position])))
    return tuple(path)
