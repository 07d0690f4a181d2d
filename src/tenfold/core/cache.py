"""The only owner of memory decisions: a call succeeds wholly or changes nothing.

    tokens     | reused | committed | in flight | to issue |
    table      [ block ][ block ][ block ][ ..tail ]           covers exactly the issued tokens
                                           ^ waste is at most one tail

A sequence that holds memory is a *holder*: it has a block table and, on hybrid models, one state slot. What nobody
holds any more but may be wanted again is *cached*: blocks by content, states as checkpoints. Cached things are what
is taken first when a holder needs pages.
"""

from __future__ import annotations

from typing import NamedTuple

from tenfold.core.arena import CACHED, Arena
from tenfold.core.plan import Copy
from tenfold.core.prefix import Checkpoint, Key, PrefixIndex, chain, path_of
from tenfold.core.sequence import NO_SLOT, Sequence
from tenfold.core.spec import CacheSpec


class Match(NamedTuple):
    """What is at hand of a sequence: ``position`` tokens need not be computed, starting from ``checkpoint`` on hybrid
    models; the KV of ``depth`` tokens is cached, which may be more."""

    position: int
    depth: int
    checkpoint: Checkpoint | None


NOTHING = Match(0, 0, None)


class Cache:
    """Blocks and slots of every running sequence, and what is kept of past ones.

    ``copies`` collects what the next plan has to execute before its work, in order, and ``deferred`` what the plan
    after it has to; ``moved`` the pages whose owners' tables changed; ``fresh`` the names given while the plan is
    being made. The scheduler takes them when it seals a plan.

    Args:
        spec: the arena.
        reuse: whether to keep and match prefixes.
    """

    def __init__(self, spec: CacheSpec, reuse: bool = True) -> None:
        self.spec = spec
        self.reuse = reuse
        self.arena = Arena(spec)
        self.index = PrefixIndex(spec)
        self.holders: dict[int, Sequence] = {}
        self.copies: list[Copy] = []
        self.deferred: list[Copy] = []
        self.moved: set[int] = set()
        self.fresh: set[Key] = set()
        self.pages_moved = 0
        self.failures = {"blocks": 0, "slots": 0}
        self.evictions = {"blocks": 0, "checkpoints": 0}
        self.prefix_tokens = {"hit": 0, "cold": 0, "no_checkpoint": 0, "evicted": 0}

    @property
    def available(self) -> int:
        """Pages that a holder could get: free ones, cached blocks and checkpoints."""
        return self.arena.free + self.arena.cached + len(self.index.checkpoints) * self.spec.slot_pages

    @property
    def tail_waste(self) -> int:
        """Token places in tables that hold no token. A shared tail counts for each table that names it."""
        size = self.spec.block_size
        return sum(len(seq.table) * size - seq.issued for seq in self.holders.values())

    # Matching

    def match(self, seq: Sequence) -> Match:
        """The longest prefix at hand on which every kind of layer agrees, at most one token short of the tokens.
        Pure."""
        if not self.reuse:
            return NOTHING
        self.name(seq)
        page_of, size, depth = self.index.page_of, self.spec.block_size, 0
        for key in seq.keys:
            if key not in page_of:
                break
            depth += 1
        if not self.spec.slot_pages:
            position = min(depth * size, len(seq.tokens) - 1)
            if position % size and seq.keys[depth - 1] in self.fresh:
                position -= position % size  # copies come before the work that will fill this block
            return Match(position, depth * size, None)
        found = self.index.checkpoint_before(seq.keys, seq.root, seq.tokens, depth)
        return Match(found.position if found else 0, depth * size, found)

    def name(self, seq: Sequence) -> None:
        """Name every full block of known tokens."""
        keys, tokens, size = seq.keys, seq.tokens, self.spec.block_size
        for block in range(len(keys), len(tokens) // size):
            keys.append(chain(keys[-1] if keys else seq.root, tokens[block * size : (block + 1) * size]))

    def fits(self, seq: Sequence, match: Match, length: int, spare: int) -> bool:
        """Whether ``admit`` would succeed for ``length`` tokens and leave ``spare`` pages available."""
        shared = self._shared(seq, match)
        held = sum(self.arena.owners[page] == CACHED for page in shared)
        need = self.spec.pages_for(length) - match.position // self.spec.block_size
        return self.available - held >= need + spare

    # Holding

    def admit(self, seq: Sequence, match: Match, length: int, wanted: bool = False) -> bool:
        """Give ``seq`` its shared prefix, a state slot and the blocks for its first ``length`` tokens.

        The state of a checkpoint is copied into the slot, or the checkpoint's own slot is taken over: when it is the
        end of a past sequence and nobody else waits for it (``wanted``), or when there is no room for a copy.
        """
        checkpoint = match.checkpoint
        if checkpoint is not None:
            checkpoint.pinned = True
            self.index.withdraw(checkpoint)
        shared = self._shared(seq, match)
        for page in shared:
            self._share(page)
        takes_over = checkpoint is not None and checkpoint.leaf and not wanted
        fresh = self.spec.blocks_for(length) - match.position // self.spec.block_size
        fitted = self._make_free(fresh + (0 if takes_over else self.spec.slot_pages))
        if not fitted and checkpoint is not None and not takes_over:
            takes_over = True
            fitted = self._make_free(fresh)
        if not fitted:
            self._release_pages(shared)
            if checkpoint is not None:
                checkpoint.pinned = False
                self.index.touch(checkpoint)
            self.failures["slots" if self.arena.free < self.spec.slot_pages else "blocks"] += 1
            return False
        self.holders[seq.id] = seq
        self._count(seq, match)
        seq.table = shared
        seq.issued = seq.committed = match.position
        seq.published = match.position // self.spec.block_size
        if self.spec.slot_pages:
            self._take_state(seq, checkpoint, takes_over)
        self._own_tail(seq, match)
        while len(seq.table) < self.spec.blocks_for(length):
            seq.table.append(self.arena.take_block())
        return True

    def extend(self, seq: Sequence, length: int) -> bool:
        """Let the table of ``seq`` cover ``length`` tokens, and make the block it writes next its own."""
        table = seq.table
        split = seq.shared_tail and seq.issued % self.spec.block_size and self.arena.owners[table[-1]] > 1
        missing = self.spec.blocks_for(length) - len(table)
        if not self._make_free(missing + bool(split)):
            self.failures["blocks"] += 1
            return False
        if split:
            self._copy_tail(seq)
        seq.shared_tail = False
        for _ in range(missing):
            table.append(self.arena.take_block())
        return True

    def fork(self, parent: Sequence, child: Sequence, defer: bool) -> bool:
        """Let ``child`` hold all that ``parent`` holds: blocks by reference, the state by one copy.

        The state is copied before the work of the next plan, or with ``defer`` of the one after: when the parent's own
        work of the plan being made has to come first.
        """
        if not self._make_free(self.spec.slot_pages):
            self.failures["slots"] += 1
            return False
        self.holders[child.id] = child
        if self.spec.slot_pages:
            child.slot = self._take_slot()
            (self.deferred if defer else self.copies).append(self._state_copy(parent.slot, child.slot))
        child.table = list(parent.table)
        for page in child.table:
            self.arena.share_block(page)
        child.keys, child.published = list(parent.keys), parent.published
        child.issued, child.committed = parent.issued, parent.committed
        parent.shared_tail = child.shared_tail = True
        return True

    def release(self, seq: Sequence, keep: bool = True) -> None:
        """Take back all that ``seq`` holds. With ``keep``, its blocks stay cached and its state becomes a
        checkpoint."""
        if self.reuse and keep and seq.issued <= len(seq.tokens):
            self.publish(seq)
            if seq.slot != NO_SLOT and seq.issued:
                self._leave_checkpoint(seq)
        if seq.slot != NO_SLOT:
            self.arena.release_slot(seq.slot)
            seq.slot = NO_SLOT
        self._release_pages(seq.table)
        seq.table = []
        seq.shared_tail = False
        del self.holders[seq.id]

    # Keeping

    def publish(self, seq: Sequence) -> None:
        """Name the full blocks of ``seq`` that are computed once the steps planned so far have run."""
        first, full = seq.published, min(seq.issued, len(seq.tokens)) // self.spec.block_size
        if not self.reuse or first >= full:
            return
        self.name(seq)
        names = seq.keys[first:full]
        for key, page in zip(names, seq.table[first:full], strict=True):
            self.index.add_block(key, page)
        self.fresh.update(names)
        seq.published = full

    def checkpoint(self, seq: Sequence, urgent: bool) -> bool:
        """Save the state of ``seq`` at its issued position, copying it before the next plan's work.

        Takes free pages, or evicts what is worth less; ``urgent`` (somebody waits for it) evicts whatever is least.
        """
        path = self._path(seq, seq.issued)
        if (existing := self.index.checkpoints.get(path[-1])) is not None:
            self.index.touch(existing)
            return True
        value = self._value(seq, path)
        pages = self.spec.slot_pages
        while self.arena.free < pages:
            least = self.index.least()
            if least is None or (least > self.index.clock + value and not urgent):
                return False
            self._evict()
        slot = self._take_slot()
        self.copies.append(self._state_copy(seq.slot, slot))
        self._add_checkpoint(seq, Checkpoint(seq.issued, slot, path, value, leaf=False))
        return True

    def flush(self) -> None:
        """Forget everything cached: its content cannot be relied on any more."""
        for checkpoint in list(self.index.checkpoints.values()):
            self.arena.release_slot(checkpoint.slot)
        for page, state in enumerate(self.arena.owners):
            if state == CACHED:
                self.arena.drop_block(page)
        self.index = PrefixIndex(self.spec)
        self.copies, self.deferred = [], []

    # Details of admission

    def _shared(self, seq: Sequence, match: Match) -> list[int]:
        """Pages of the matched prefix, a partly filled last one included."""
        if not match.position:
            return []
        if match.checkpoint is not None:
            return [self.index.page_of[key] for key in match.checkpoint.path]
        return [self.index.page_of[key] for key in seq.keys[: self.spec.blocks_for(match.position)]]

    def _take_state(self, seq: Sequence, checkpoint: Checkpoint | None, takes_over: bool) -> None:
        if checkpoint is not None and takes_over:
            seq.slot = checkpoint.slot
            self._forget_checkpoint(checkpoint)
            return
        seq.slot = self._take_slot()
        if checkpoint is not None:
            self.copies.append(self._state_copy(checkpoint.slot, seq.slot))
            checkpoint.pinned = False
            checkpoint.uses += 1
            self.index.touch(checkpoint)

    def _own_tail(self, seq: Sequence, match: Match) -> None:
        """The last matched block is written next if it is not full: take a copy, or the block itself if nobody
        minds."""
        fill = match.position % self.spec.block_size
        if not fill:
            return
        page = seq.table[-1]
        keys = self.index.keys_at.get(page, ())
        if self.arena.owners[page] > 1 or any(not isinstance(key, tuple) or len(key[1]) > fill for key in keys):
            self._copy_tail(seq)

    def _copy_tail(self, seq: Sequence) -> None:
        page = seq.table[-1]
        own = self.arena.take_block()
        seq.table[-1] = own
        self.moved.add(own)
        self.copies.append(Copy(page, own, 1))
        self._release_pages([page], len(seq.table) - 1)

    def _count(self, seq: Sequence, match: Match) -> None:
        """Tokens of a first admission by what became of them: reused, or computed for want of what."""
        if seq.epoch:
            return
        seq.reused = match.position
        size, ghosts = self.spec.block_size, self.index.ghosts
        rest = len(seq.tokens) - match.position
        lost = max(0, match.depth - match.position)
        evicted = sum(key in ghosts for key in seq.keys[match.depth // size :]) * size
        if lost and any(
            ("checkpoint", key) in ghosts for key in seq.keys[match.position // size : match.depth // size]
        ):
            evicted, lost = evicted + lost, 0
        self.prefix_tokens["hit"] += match.position
        self.prefix_tokens["no_checkpoint"] += lost
        self.prefix_tokens["evicted"] += evicted
        self.prefix_tokens["cold"] += max(0, rest - lost - evicted)

    # Details of keeping

    def _path(self, seq: Sequence, position: int) -> tuple[Key, ...]:
        self.name(seq)
        return path_of(seq.keys, seq.root, seq.tokens, position, self.spec.block_size)

    def _value(self, seq: Sequence, path: tuple[Key, ...]) -> float:
        """Compute saved per page by a checkpoint at the end of ``path``, over the deepest one before it."""
        before = self.index.checkpoint_before(seq.keys, seq.root, seq.tokens[: seq.issued], seq.published)
        base = before.position if before is not None else 0
        pages = self.spec.slot_pages + (seq.issued - base) / self.spec.block_size
        return self.spec.cost(base, seq.issued) / pages

    def _leave_checkpoint(self, seq: Sequence) -> None:
        """The slot of a sequence that ends becomes its checkpoint, without a copy."""
        path = self._path(seq, seq.issued)
        existing = self.index.checkpoints.get(path[-1])
        if existing is not None:
            if not existing.pinned:
                self.index.touch(existing)
            return
        checkpoint = Checkpoint(seq.issued, seq.slot, path, self._value(seq, path), leaf=True)
        seq.slot = NO_SLOT
        self._add_checkpoint(seq, checkpoint)

    def _add_checkpoint(self, seq: Sequence, checkpoint: Checkpoint) -> None:
        named = self.index.page_of
        for key, page in zip(checkpoint.path, seq.table, strict=False):
            if key not in named:
                self.index.add_block(key, page)
        self.index.add_checkpoint(checkpoint)

    def _forget_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Drop its name, not its slot; blocks that only it needed become the first victims."""
        for depth, key in self.index.remove_checkpoint(checkpoint):
            page = self.index.page_of.get(key)
            if page is None:
                continue
            if isinstance(key, tuple):
                self.index.forget_key(key)
                if self.arena.owners[page] == CACHED and page not in self.index.keys_at:
                    self.arena.drop_block(page)
                    continue
            if self.arena.owners[page] == CACHED:
                self.index.offer_block(page, depth)

    def _make_free(self, pages: int) -> bool:
        """Evict until ``pages`` are free; False, and nothing evicted, if that cannot be reached."""
        arena = self.arena
        if arena.free >= pages:
            return True
        idle = sum(not each.pinned for each in self.index.checkpoints.values())
        if arena.free + arena.cached + idle * self.spec.slot_pages < pages:
            return False
        while arena.free < pages:
            self._evict()
        return True

    def _evict(self) -> None:
        victim = self.index.victim()
        if victim is None:
            raise RuntimeError("cached pages are left, but nothing to evict")
        if isinstance(victim, Checkpoint):
            self.index.evicted_checkpoint(victim)
            self._forget_checkpoint(victim)
            self.arena.release_slot(victim.slot)
            self.evictions["checkpoints"] += 1
        else:
            page = self.index.page_of[victim]
            self.index.forget_page(page)
            self.arena.drop_block(page)
            self.evictions["blocks"] += 1

    def _share(self, page: int) -> None:
        if self.arena.owners[page] == CACHED:
            self.index.withdraw_page(page)
        self.arena.share_block(page)

    def _release_pages(self, pages: list[int], depth: int = 0) -> None:
        """Drop references from the last page to the first: ends of prefixes are evicted before their beginnings."""
        named = self.index.keys_at
        for i in range(len(pages) - 1, -1, -1):
            page = pages[i]
            keep = page in named
            if self.arena.release_block(page, keep) and keep:
                self.index.offer_block(page, depth + i)

    def _state_copy(self, source: int, target: int) -> Copy:
        """One slot's state into another."""
        return Copy(self.spec.slot_page(source), self.spec.slot_page(target), self.spec.slot_pages)

    def _take_slot(self) -> int:
        """The highest free slot; blocks on its pages move, and every table and name follows."""
        slot, moves = self.arena.take_slot()
        if moves:
            self.copies += _runs(moves)
            self.moved.difference_update(moves)
            self.moved.update(moves.values())
            self.pages_moved += len(moves)
            self.index.move(moves)
            for seq in self.holders.values():
                if not moves.keys().isdisjoint(seq.table):
                    seq.table = [moves.get(page, page) for page in seq.table]
        return slot


def _runs(moves: dict[int, int]) -> list[Copy]:
    """Single-page moves, joined where both sides are consecutive. Targets lie outside the slot, so none overlap."""
    runs: list[Copy] = []
    for source, target in moves.items():
        if runs:
            last = runs[-1]
            if source == last.source + last.pages and target == last.target + last.pages:
                runs[-1] = Copy(last.source, last.target, last.pages + 1)
                continue
        runs.append(Copy(source, target, 1))
    return runs
