"""A model made of hashes whose only memory is the arena, reached only through plans.

Its next token is a hash of what it reads back through block tables and state slots, so any aliasing, stale block,
lost copy or state of another sequence changes the text. ``reference`` is the same model without any of that.
"""

from __future__ import annotations

from collections import deque

from tenfold.core import CacheSpec, Request, StepOutcome, StepPlan

MODULUS = (1 << 61) - 1
VOCABULARY = 7
POISON = -(1 << 40)


def mix(h: int, token: int) -> int:
    return (h * 1000003 + token + 1) % MODULUS


class HashRunner:
    """Executes plans the way ``tenfold.core.plan`` says, over fake pages of integers."""

    def __init__(self, spec: CacheSpec, max_sequences: int) -> None:
        self.spec = spec
        self.pages = [[POISON] * spec.block_size for _ in range(spec.num_pages)]
        self.tables: list[list[int]] = [[] for _ in range(max_sequences)]
        self.last = [POISON] * max_sequences
        self.done: deque[StepOutcome] = deque()

    def submit(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            for i in range(copy.pages):
                self.pages[copy.target + i] = list(self.pages[copy.source + i])
        for entry in plan.entries:
            self.tables[entry.row] = []
        for w in plan.work:
            self.tables[w.row] += w.gained
            assert len(self.tables[w.row]) == self.spec.blocks_for(w.start + w.length)
        for entry in plan.entries:
            if entry.source >= 0:
                self.tables[entry.row] = list(self.tables[entry.source])
        for rewrite in plan.rewrites:
            self.tables[rewrite.row][rewrite.place] = rewrite.block
        sampled = []
        logits: dict[int, int] = {}
        inputs = [w.tokens if len(w.tokens) == w.length else (*w.tokens, self.last[w.row]) for w in plan.work]
        # As a layer does: everyone's keys and values are stored before anyone reads them.
        for w, tokens in zip(plan.work, inputs, strict=True):
            self.store(w, tokens)
        for w, tokens in zip(plan.work, inputs, strict=True):
            token = logits[w.row] = self.forward(w, tokens)
            if w.sample:
                sampled.append(token)
                self.last[w.row] = token
        for entry in plan.entries:
            if entry.source >= 0:
                sampled.append(logits[entry.source])
                self.last[entry.row] = logits[entry.source]
        self.done.append(StepOutcome(plan.step, sampled))

    def collect(self) -> StepOutcome:
        return self.done.popleft()

    def store(self, w, tokens) -> None:
        size, table = self.spec.block_size, self.tables[w.row]
        for position, token in enumerate(tokens, w.start):
            self.pages[table[position // size]][position % size] = token

    def forward(self, w, tokens) -> int:
        size, table = self.spec.block_size, self.tables[w.row]
        state = 0 if w.start == 0 else self.read_state(w.slot)
        for token in tokens:
            state = mix(state, token)
        self.write_state(w.slot, state)
        h = 0
        for position in range(w.start + w.length):
            h = mix(h, self.pages[table[position // size]][position % size])
        return (h + 31 * state * bool(self.spec.slot_pages)) % VOCABULARY

    def read_state(self, slot: int) -> int:
        if not self.spec.slot_pages:
            return 0
        first = self.spec.slot_page(slot)
        values = {self.pages[first + i][0] - i for i in range(self.spec.slot_pages)}
        return values.pop() if len(values) == 1 else POISON

    def write_state(self, slot: int, state: int) -> None:
        if self.spec.slot_pages:
            first = self.spec.slot_page(slot)
            for i in range(self.spec.slot_pages):
                self.pages[first + i] = [state + i] * self.spec.block_size


def reference(request: Request, recurrent: bool) -> list[int]:
    """The same model with no paging, no batching and no cache."""
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        h = 0
        for token in tokens:
            h = mix(h, token)
        tokens.append((h + 31 * h * recurrent) % VOCABULARY)
        if tokens[-1] in request.stop_token_ids and len(tokens) > len(request.prompt) + request.params.min_tokens:
            break
    return tokens[len(request.prompt) :]
