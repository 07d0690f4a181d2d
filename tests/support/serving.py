"""A server without a model: the runner reads its answer off the prompt, and uvicorn runs on a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from support.byte_tokenizer import END, VOCABULARY, ByteTokenizer
from tenfold.core import CacheSpec, Scheduler, StepOutcome, StepPlan, TokenLogprobs
from tenfold.engine.engine import Engine
from tenfold.server import ServerSettings, create_app

MODEL = "scripted"
ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


class ScriptedRunner:
    """Answers with what stands between [[ and ]] in the prompt, then ends; without it, with the alphabet for ever.

    ``seconds`` is how long a step takes. ``broken``: every step fails while it is set. ``likelihoods`` are the log
    probabilities of every token of the samples of a prompt, one after the other and again from the first.
    """

    def __init__(self, max_sequences: int, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.broken = False
        self.likelihoods = [-0.5]
        self.prompts: list[bytearray] = [bytearray() for _ in range(max_sequences)]
        self.entries: list[Any] = [None] * max_sequences
        self.done: deque[StepOutcome] = deque()

    def submit(self, plan: StepPlan) -> None:
        for entry in plan.entries:
            self.entries[entry.row] = entry
            self.prompts[entry.row] = bytearray(token for token in entry.reused if token < 256)
        tokens, logprobs = [], []
        for work in plan.work:
            entry, prompt = self.entries[work.row], self.prompts[work.row]
            left = max(0, entry.prompt_length - work.start)
            prompt += bytes(token for token in work.tokens[:left] if token < 256)
            if work.sample:
                token = self.next_token(bytes(prompt), work.start + work.length - entry.prompt_length)
                tokens.append(token)
                logprobs.append(self.logprobs(token, entry))
        for entry in plan.entries:
            if entry.source >= 0:
                token = self.next_token(bytes(self.prompts[entry.row]), 0)
                tokens.append(token)
                logprobs.append(self.logprobs(token, entry))
        wanted = any(values is not None for values in logprobs)
        self.done.append(StepOutcome(plan.step, tokens, tuple(logprobs) if wanted else None, self.seconds))

    def collect(self) -> StepOutcome:
        if self.seconds:
            time.sleep(self.seconds)
        if self.broken:
            raise RuntimeError("the device is on fire")
        return self.done.popleft()

    def reset(self) -> None:
        self.done.clear()

    @staticmethod
    def next_token(prompt: bytes, place: int) -> int:
        if b"[[" not in prompt:
            return ALPHABET[place % len(ALPHABET)]
        script = prompt.rpartition(b"[[")[2].partition(b"]]")[0]
        return script[place] if place < len(script) else END

    def logprobs(self, token: int, entry: Any) -> TokenLogprobs | None:
        asked = entry.candidates or entry.params.logprobs
        if asked is None:
            return None
        likelihood = self.likelihoods[entry.sequence % len(self.likelihoods)]
        others = [(token, likelihood), *((other, float("-inf")) for other in range(asked - 1))]
        return TokenLogprobs(likelihood, tuple(others[:asked]))


@dataclass
class Live:
    """A server that answers at ``url``."""

    url: str
    engine: Engine
    runner: ScriptedRunner
    app: Any
    errors: list[BaseException] = field(default_factory=list)

    @property
    def stats(self) -> dict[str, Any]:
        return self.engine.metrics.stats()

    def wait_until(self, true: Callable[[dict[str, Any]], bool], seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not true(self.stats):
            assert time.monotonic() < deadline, self.stats
            time.sleep(0.005)


def make_engine(
    *,
    seconds: float = 0.0,
    pages: int = 4096,
    max_context: int = 2048,
    max_sequences: int = 64,
    max_queue: int | None = None,
) -> tuple[Engine, ScriptedRunner]:
    scheduler = Scheduler(CacheSpec(block_size=16, num_pages=pages, slot_pages=0), 512, max_sequences)
    runner = ScriptedRunner(scheduler.max_sequences, seconds)
    engine = Engine(
        scheduler,
        runner,
        vocab_size=VOCABULARY,
        max_context=max_context,
        eos_token_ids=frozenset({END}),
        max_queue=max_queue,
    )
    return engine, runner


@contextmanager
def serving(settings: ServerSettings | None = None, tokenizer: Any = None, **options: Any) -> Iterator[Live]:
    """A live server on a free port; nothing may be left in its arena when it ends."""
    engine, runner = make_engine(**options)
    app = create_app(engine, tokenizer or ByteTokenizer(), MODEL, settings)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server does not start"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    live = Live(f"http://127.0.0.1:{port}", engine, runner, app)
    try:
        yield live
        live.wait_until(lambda stats: stats["requests_running"] == stats["requests_waiting"] == 0)
        assert live.stats["blocks"]["referenced"] == 0, "everything is given back"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
