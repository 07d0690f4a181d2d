"""The share of prompt tokens that need not be computed, on recorded prompts, for a 27B hybrid and several pools.

A trace tells for each request when it came, how long its prompt and its answer were, and which blocks of 512 tokens the
prompt consists of. Tokens are made up from those: equal blocks have equal tokens, answers are unlike any other. One
loop in virtual time serves the requests in order. A request starts when its memory is there, for prompt and answer at
once, publishes its prompt chunk by chunk as it is computed, holds its memory for the seconds that a simple cost model
says, and leaves behind what its system keeps. Only the memory differs: Tenfold's is its real cache with its real
rules for checkpoints, the others are models of how other systems do it.
"""

from __future__ import annotations

import argparse
import heapq
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.report import Result, Row
from tenfold.core import Cache, CacheSpec, ModelSpec, Request, Sequence
from tenfold.core.cache import NOTHING
from tenfold.core.joins import Joins
from tenfold.core.prefix import chain, root
from tenfold.planner.models import KNOWN

MIB = 2**20
POOL_MIB = 23_859
"""What an 80 GB device has left beside the weights."""
SCALES = (1, 4, 16)
QWEN_27B = KNOWN["qwen3.8-27b"]
TRACE_BLOCK = 512
PADDED_BLOCK, PADDED_BYTES = 784, 51_380_224
"""A block padded to a third of the state, as vLLM does for this model."""
PADDED_STATE, PADDED_RUNNING = 3, 6
"""Padded blocks of one saved state, and of the states of a running request when prefixes are cached."""
TOKENS_PER_SECOND, SECONDS_PER_TOKEN = 13_800.0, 0.0155
"""Prefill and decode of the 27B model on an H200 with a batch of 8."""
CHUNK = 8192
BLOCK_SIZE = 16
ANSWERS = 1 << 40
"""Tokens from here on belong to answers."""

NOTES = [
    "Prompt tokens not computed over prompt tokens. The infinite cache shares every known block, up to one token "
    "short of the prompt.",
    f"A breakpoint is given at the end of the last whole block of {TRACE_BLOCK} of each prompt: what a server knows is "
    "the end of the prompt, and the trace tells of shared prefixes in whole blocks only.",
    f"Memory is held for {1e6 / TOKENS_PER_SECOND:.0f} us a computed prompt token and {1e3 * SECONDS_PER_TOKEN:g} ms "
    "an answer token, however many run: an H200 with a batch of 8. Requests wait in order while theirs is not there.",
    f"Every {BLOCK_SIZE}: a state at the end of each block. Every {PADDED_BLOCK}: blocks padded to a third of a state, "
    f"which takes {PADDED_STATE} of them; a running request takes {PADDED_RUNNING} more than its tokens do. Ends of "
    f"chunks: only at the last such block of every {CHUNK:,} computed tokens, of the prompt and of the answer. All "
    "three give up what was least recently used, and are models of other systems, not those systems.",
    "Tenfold's requests also wait for a state that another one is about to save; the others' do not.",
]


class Item(NamedTuple):
    """One request of a trace; ``arrival`` in seconds."""

    id: int
    arrival: float
    prompt: int
    output: int
    blocks: tuple[int, ...]

    @property
    def length(self) -> int:
        """Positions ever computed: the last token of an answer is no input."""
        return self.prompt + self.output - 1


class Start(NamedTuple):
    """A request that got its memory: what the system knows it by, the tokens reused, and the positions at which its
    prefill pauses."""

    handle: Any
    reused: int
    stops: list[int]


class Memory(Protocol):
    """What differs between the systems."""

    def arrive(self, item: Item) -> Any: ...

    def start(self, waiting: Any, idle: bool) -> Start | str:
        """The request got its memory; or "wait", and others may go first; or "full"."""
        ...

    def reach(self, handle: Any, position: int) -> None: ...

    def finish(self, handle: Any) -> None: ...


def read_trace(path: Path) -> list[Item]:
    items = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            row = json.loads(line)
            arrival, prompt, output = row["timestamp"] / 1000, row["input_length"], max(1, row["output_length"])
            items.append(Item(number, arrival, prompt, output, tuple(row["hash_ids"])))
    return items


def endless(items: list[Item]) -> tuple[float, float]:
    """What an infinite cache reuses: blocks of the trace over all blocks, and tokens over all tokens, at most one short
    of the prompt."""
    seen: set[int] = set()
    blocks = tokens = 0
    for item in items:
        known = 0
        while known < len(item.blocks) and item.blocks[known] in seen:
            known += 1
        blocks += known
        tokens += min(known * TRACE_BLOCK, item.prompt - 1)
        seen.update(item.blocks)
    return blocks / sum(len(item.blocks) for item in items), tokens / sum(item.prompt for item in items)


def replay(items: list[Item], memory: Memory) -> float:
    """Serve all requests in virtual time; returns the share of prompt tokens that were reused."""
    order = count()
    events: list[tuple[float, int, str, Any]] = [(item.arrival, next(order), "arrive", item) for item in items]
    queue: list[Any] = []
    running = reused = 0
    full = False  # until somebody leaves

    def begin(now: float, started: Start) -> None:
        at = started.reused
        for stop in started.stops:
            now, at = now + (stop - at) / TOKENS_PER_SECOND, stop
            heapq.heappush(events, (now, next(order), "reach", (started.handle, stop)))

    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "arrive":
            queue.append((what, memory.arrive(what)))
        elif kind == "reach":
            handle, stop = what
            memory.reach(handle, stop)
        else:
            memory.finish(what)
            running -= 1
            full = False
        at = 0
        while at < len(queue) and not full:
            item, waiting = queue[at]
            started = memory.start(waiting, not running)
            if started == "wait":
                at += 1
                continue
            if isinstance(started, str):
                full = True
                break
            del queue[at]
            running += 1
            reused += started.reused
            begin(now, started)
            seconds = (item.prompt - started.reused) / TOKENS_PER_SECOND + item.output * SECONDS_PER_TOKEN
            heapq.heappush(events, (now + seconds, next(order), "finish", started.handle))
    if queue:
        raise RuntimeError(f"{len(queue)} requests never fitted")
    return reused / sum(item.prompt for item in items)


def stops(start: int, end: int, places: list[int]) -> list[int]:
    return sorted({*range(start + CHUNK, end, CHUNK), *places, end})


class Names:
    """Tokens of a trace's blocks, and the names that the cache gives to the blocks of 16 in them, made once."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.root = root("")
        self.known: dict[int, list[bytes]] = {}

    def tokens(self, item: Item) -> array[int]:
        tokens = array("q")
        for block in item.blocks:
            tokens.extend(range(block * TRACE_BLOCK, (block + 1) * TRACE_BLOCK))
        del tokens[item.prompt :]
        return tokens

    def keys(self, item: Item, tokens: array[int]) -> list[bytes]:
        keys: list[bytes] = []
        for place, block in enumerate(item.blocks):
            names = self.known.get(block)
            if names is None:
                parent = keys[-1] if keys else self.root
                names = self.known[block] = []
                first, end = place * TRACE_BLOCK, min((place + 1) * TRACE_BLOCK, item.prompt)
                for at in range(first, end - self.size + 1, self.size):
                    parent = chain(parent, tokens[at : at + self.size])
                    names.append(parent)
            keys += names
        return keys


class Tenfold:
    """The real cache, its joins and its checkpoints."""

    def __init__(self, spec: CacheSpec, names: Names) -> None:
        self.names = names
        self.cache = Cache(spec)
        self.joins = Joins(self.cache)

    def arrive(self, item: Item) -> Sequence:
        whole = item.prompt // TRACE_BLOCK * TRACE_BLOCK
        request = Request(item.id, (), item.output, breakpoints=(whole,))
        tokens = self.names.tokens(item)
        seq = Sequence(request, tokens, item.prompt + item.output, item.prompt, root=self.names.root)
        seq.keys = self.names.keys(item, tokens)
        self.joins.expect(seq)
        return seq

    def start(self, waiting: Sequence, idle: bool) -> Start | str:
        cache, joins, seq = self.cache, self.joins, waiting
        match = cache.match(seq)
        if joins.awaits(seq, match):
            return "wait"
        length = seq.limit - 1
        if not idle and not cache.fits(seq, match, length, 0):
            return "full"
        marks = joins.marks(seq, match)
        if not cache.admit(seq, match, length, joins.wanted_after(seq, match)):
            if not idle:
                return "full"
            match = NOTHING
            marks = joins.marks(seq, match)
            if not cache.admit(seq, match, length):
                return "full"
        joins.forget(seq)
        joins.watch(seq, marks)
        self._executed()
        return Start(seq, match.position, stops(match.position, len(seq.tokens), marks))

    def reach(self, handle: Sequence, position: int) -> None:
        handle.issued = handle.committed = position
        self.cache.publish(handle)
        self.joins.save_reached()
        self._executed()

    def finish(self, handle: Sequence) -> None:
        prompt = len(handle.tokens)
        first = ANSWERS + (handle.id << 20)
        handle.tokens.extend(range(first, first + handle.limit - prompt))
        handle.issued = handle.committed = handle.limit - 1
        self.joins.unwatch(handle)
        self.cache.release(handle)
        self._executed()

    def _executed(self) -> None:
        """What a plan would carry to the device was carried."""
        cache = self.cache
        cache.copies, cache.deferred, cache.moved, cache.fresh = [], [], set(), set()


class Running(NamedTuple):
    item: Item
    reused: int
    published: list[int]
    """Blocks of this request that are in the cache's index and referenced by it."""


class Blockwise:
    """A state saved at the end of every block, or (``sparse``) of the last block of every chunk, and the least recently
    used given up first.

    Blocks count ``block`` tokens and one unit of memory, a saved state ``state`` units, and the states of a running
    request ``running`` units. Blocks and states are used when a request starts from them, and last when it ends; of one
    request the last blocks go first. Saved states can be given up at any time, blocks when no request holds them.
    """

    def __init__(self, units: int, block: int, state: int, running: int, sparse: bool = False) -> None:
        self.block, self.state, self.running, self.sparse = block, state, running, sparse
        self.free = units
        self.evictable = 0
        self.references: dict[int, int] = {}
        self.unused: OrderedDict[tuple[str, int], int] = OrderedDict()

    def arrive(self, item: Item) -> Item:
        return item

    def start(self, waiting: Item, idle: bool) -> Start | str:
        item = waiting
        hit = self._match(item)
        keys = [self._key(item, i) for i in range(hit)]
        need = -(-item.length // self.block) - hit + self.running
        held = sum(not self.references[key] for key in keys)
        if self.free + self.evictable - held < need:
            return "full"
        for key in keys:
            if not self.references[key]:
                self.evictable -= self.unused.pop(("block", key))
            self.references[key] += 1
        if hit:
            self.unused.move_to_end(("state", keys[-1]))
        self._make_free(need)
        self.free -= need
        reused = hit * self.block
        return Start(Running(item, reused, keys), reused, stops(reused, item.prompt, []))

    def reach(self, handle: Running, position: int) -> None:
        self._publish(handle, position)

    def finish(self, handle: Running) -> None:
        self._publish(handle, handle.item.length)
        blocks = -(-handle.item.length // self.block)
        held = 0
        for key in reversed(handle.published):
            if key < 0:
                continue
            held += 1
            self.references[key] -= 1
            if not self.references[key]:
                self.unused["block", key] = 1
                self.evictable += 1
        self.free += blocks - held + self.running

    def _match(self, item: Item) -> int:
        depth, most = 0, (item.prompt - 1) // self.block
        while depth < most and self._key(item, depth) in self.references:
            depth += 1
        while depth and ("state", self._key(item, depth - 1)) not in self.unused:
            depth -= 1
        return depth

    def _publish(self, running: Running, position: int) -> None:
        """Name the blocks up to ``position`` and save the state at the end of each: more of them than there is room for
        would only push each other out."""
        item, published = running.item, running.published
        full = position // self.block
        room = 1 if self.sparse else (self.free + self.evictable) // self.state + 1
        for i in range(len(published), full):
            key = self._key(item, i)
            if key in self.references:
                published.append(-1)  # another request computed it meanwhile: this copy has no name
            else:
                self.references[key] = 1
                published.append(key)
            if i >= full - room:
                self._save(("state", key))

    def _save(self, state: tuple[str, int]) -> None:
        if state in self.unused:
            self.unused.move_to_end(state)
        elif self.free + self.evictable >= self.state:
            self._make_free(self.state)
            self.free -= self.state
            self.evictable += self.state
            self.unused[state] = self.state

    def _make_free(self, units: int) -> None:
        while self.free < units:
            (kind, key), size = self.unused.popitem(last=False)
            self.free += size
            self.evictable -= size
            if kind == "block":
                del self.references[key]

    def _key(self, item: Item, index: int) -> int:
        """Name of a block: its last token is enough, because the trace's blocks tell all that came before."""
        last = (index + 1) * self.block - 1
        if last < item.prompt:
            return item.blocks[last // TRACE_BLOCK] * TRACE_BLOCK + last % TRACE_BLOCK
        return ANSWERS + (item.id << 20) + last


def systems(names: Names, pool: int) -> Iterator[tuple[str, Memory]]:
    spec = CacheSpec.for_model(ModelSpec.from_config(QWEN_27B, name="Qwen3.8-27B"), pool, BLOCK_SIZE)
    yield "Tenfold", Tenfold(spec, names)
    yield f"every {BLOCK_SIZE}", Blockwise(spec.num_pages, BLOCK_SIZE, spec.slot_pages, spec.slot_pages)
    padded = pool // PADDED_BYTES, PADDED_BLOCK, PADDED_STATE, PADDED_RUNNING
    yield f"every {PADDED_BLOCK}", Blockwise(*padded)
    yield f"{PADDED_BLOCK}, ends of chunks", Blockwise(*padded, sparse=True)


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--mooncake-traces", type=Path, nargs="+", default=[], metavar="JSONL")
    parser.add_argument(
        "--pool-scales", type=int, nargs="+", default=list(SCALES), metavar="N", help="times the pool (default 1 4 16)"
    )


def main(args: argparse.Namespace) -> Result:
    rows: list[Row] = []
    notes: list[str] = []
    for path in args.mooncake_traces:
        if not path.is_file():
            notes.append(f"Not measured: {path} is not there.")
            continue
        items = read_trace(path)
        blocks, tokens = endless(items)
        notes.append(f"{path.name}: {len(items):,} requests; an infinite cache reuses {blocks:.1%} of the blocks.")
        names = Names(BLOCK_SIZE)
        for scale in args.pool_scales:
            row = {"trace": path.stem, "pool MiB": f"{scale * POOL_MIB:,}"}
            for name, memory in systems(names, scale * POOL_MIB * MIB):
                row[name] = f"{replay(items, memory):.2%}"
            rows.append(row | {"infinite": f"{tokens:.2%}"})
    if not args.mooncake_traces:
        return Result([], ["Not measured: --mooncake-traces is not given."])
    return Result(rows, notes + NOTES if rows else notes)
