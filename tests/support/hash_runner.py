"""A model made of hashes whose only memory is the arena, reached only through plans.

Its next token is a hash of what it reads back through block tables and state slots, so any aliasing, stale block,
lost copy or state of another sequence changes the text. ``reference`` is the same model without any of that.
"""

from __future__ import annotations

from collections import deque

from tenfold.core import CacheSpec, Request, StepOutcome, StepPlan, TokenLogprobs

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
        self.candidates = [0] * max_sequences
        self.done: deque[StepOutcome] = deque()

    def submit(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            for i in range(copy.pages):
                self.pages[copy.target + i] = list(self.pages[copy.source + i])
        for entry in plan.entries:
            self.tables[entry.row] = []
            self.candidates[entry.row] = entry.candidates
        for w in plan.work:
            self.tables[w.row] += w.gained
            assert len(self.tables[w.row]) == self.spec.blocks_for(w.start + w.length)
        for entry in plan.entries:
            if entry.source >= 0:
                self.tables[entry.row] = list(self.tables[entry.source])
        for rewrite in plan.rewrites:
            self.tables[rewrite.row][rewrite.place] = rewrite.block
        sampled, logprobs = [], []
        logits: dict[int, int] = {}
        inputs = [w.tokens if len(w.tokens) == w.length else (*w.tokens, self.last[w.row]) for w in plan.work]
        # As a layer does: everyone's keys and values are stored before anyone reads them.
        for w, tokens in zip(plan.work, inputs, strict=True):
            self.store(w, tokens)
        for w, tokens in zip(plan.work, inputs, strict=True):
            h = self.forward(w, tokens)
            token = logits[w.row] = h % VOCABULARY
            if w.sample:
                sampled.append(token)
                count = self.candidates[w.row]
                logprobs.append(TokenLogprobs(0.0, candidates(h)[:count]) if count else None)
                self.last[w.row] = token
        for entry in plan.entries:
            if entry.source >= 0:
                sampled.append(logits[entry.source])
                logprobs.append(None)
                self.last[entry.row] = logits[entry.source]
        self.done.append(StepOutcome(plan.step, sampled, tuple(logprobs)))

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
        return h + 31 * state * bool(self.spec.slot_pages)

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


def candidates(h: int) -> tuple[tuple[int, float], ...]:
    """Log probabilities of all tokens after a prefix of hash ``h``, most likely first, no two alike."""
    scores = [(token, -0.01 * (1 + mix(h, token) % 997) - 1e-6 * token) for token in range(VOCABULARY)]
    return tuple(sorted(scores, key=lambda score: -score[1]))


def beam_reference(request: Request, recurrent: bool) -> list[tuple[float, list[int]]]:
    """Beam search over the same model, with whole texts instead of shared memory: best first, (score, tokens)."""
    params, stop, prompt = request.params, request.stop_token_ids, len(request.prompt)
    width = params.beam_width
    alive, ended = [(0.0, list(request.prompt))], []
    for generated in range(1, request.max_tokens + 1):
        grown = []
        for score, tokens in alive:
            h = 0
            for token in tokens:
                h = mix(h, token)
            likely = candidates(h + 31 * h * recurrent)[: max(2, 1 + len(stop)) * width]
            grown += [(score + logprob, [*tokens, token]) for token, logprob in likely]
        grown = sorted(grown, key=lambda growth: -growth[0])[: max(2, 1 + len(stop)) * width]
        last = generated == request.max_tokens
        for score, tokens in grown[:width]:
            if last or tokens[-1] in stop:
                ended.append((score / generated**params.length_penalty, tokens[prompt:]))
        ended = sorted(ended, key=lambda end: -end[0])[:width]
        alive = [growth for growth in grown if growth[1][-1] not in stop][:width]
        full = len(ended) == width
        longest = request.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else generated
        if last or (full and params.early_stopping is True) or all(growth[1][-1] in stop for growth in grown):
            break
        if full and alive[0][0] / longest**params.length_penalty <= ended[-1][0]:
            break
    return ended[: params.n]


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
