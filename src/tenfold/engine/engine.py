"""The engine: submit and finish requests, and ``step`` until there is nothing left to do.

    while engine.busy:
        for event in engine.step(): ...

Single-threaded. ``EngineThread`` in ``tenfold.engine.service`` runs it beside an asyncio loop.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Sequence as Tokens
from dataclasses import replace

from tenfold.core import FinishReason, Request, SamplingParams, Scheduler, TokenEvent
from tenfold.core.admission import refuse_impossible
from tenfold.engine.metrics import Metrics
from tenfold.engine.ports import Clock, Instrument, ModelRunner
from tenfold.engine.profile import Profile
from tenfold.errors import QueueFullError, RequestError

logger = logging.getLogger(__name__)

NO_TOKEN = -1
"""The token of an event that only says that a sequence ended."""
COLLECTOR = (50_000, 10, 10)
"""Thresholds of Python's garbage collector for a process that serves. Plans and events are freed by their reference
counts, but there are some objects of them for every sequence: with the default of 700, collections in the middle of a
step take them for lasting ones, and soon walk all that lasts."""


class Engine:
    """One scheduler, one runner, one loop.

    Args:
        scheduler: what runs when, and where it lives.
        runner: executes the plans.
        vocab_size: token ids are 0 to ``vocab_size - 1``.
        max_context: tokens of the longest sequence that the model's positions allow.
        eos_token_ids: tokens that end a text unless the request says ``ignore_eos``.
        depth: steps under way at once; 2 lets the host plan a step while the device computes the one before.
        max_queue: requests that may wait at once; None is unbounded.
        instrument: one more observer beside the metrics.
        profile: where to trace the engine, if at all.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        vocab_size: int,
        max_context: int,
        eos_token_ids: frozenset[int] = frozenset(),
        depth: int = 1,
        max_queue: int | None = None,
        clock: Clock = time.monotonic,
        instrument: Instrument | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.vocab_size = vocab_size
        self.max_context = min(max_context, scheduler.spec.max_length + 1)
        self.eos_token_ids = eos_token_ids
        self.depth = depth
        self.max_queue = max_queue
        self.clock = clock
        self.metrics = Metrics(scheduler)
        self.profile = profile
        # The profile is last, so that what it notes of a step is next to the step itself.
        self.instruments: list[Instrument] = [self.metrics]
        if instrument is not None:
            self.instruments.append(instrument)
        if profile is not None:
            self.instruments.append(profile)
            profile.watch(scheduler, runner)
        self._ids = itertools.count()
        self._requests: dict[int, Request] = {}  # of every live sequence

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.live or self.scheduler.inflight)

    def request(self, prompt: Tokens[int], params: SamplingParams) -> Request:
        """Check a prompt against the model and the arena, and resolve what the parameters leave open.

        Does not touch the scheduler: it may be called from any thread.

        Raises:
            RequestError: the prompt is empty, too long or holds unknown tokens, or it could never fit the arena.
        """
        prompt = tuple(prompt)
        if not prompt:
            raise RequestError("the prompt is empty: send at least one token", "prompt")
        for name, tokens in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens:
                if token >= self.vocab_size:
                    raise RequestError(f"{name} names token id {token}: ids are 0 to {self.vocab_size - 1}", name)
        room = self.max_context - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.max_context}, output included: "
                "shorten the prompt",
                "prompt",
                "context_length_exceeded",
            )
        # After the length, because a long prompt would stall others; and all at once, because it is usually right.
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= self.vocab_size:
            for token in prompt:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                    raise RequestError(
                        f"token id {token!r} is not in the vocabulary: ids are 0 to {self.vocab_size - 1}", "prompt"
                    )
        if params.max_tokens is not None and params.max_tokens > room:
            refuse_impossible(Request(-1, prompt, params.max_tokens), self.scheduler.spec)
            raise RequestError(
                f"{len(prompt)} prompt tokens plus max_tokens {params.max_tokens} exceed the context of "
                f"{self.max_context} tokens: lower max_tokens to at most {room}",
                "max_tokens",
                "context_length_exceeded",
            )
        stop = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop |= self.eos_token_ids
        if params.use_beam_search and params.beam_width > min(self.vocab_size, self.scheduler.max_sequences):
            most = min(self.vocab_size, self.scheduler.max_sequences)
            raise RequestError(f"beam_width is at most {most} here, not {params.beam_width}", "beam_width")
        request = Request(-1, prompt, params.max_tokens or room, params, stop)
        refuse_impossible(request, self.scheduler.spec)
        return request

    def submit(
        self, prompt: Tokens[int], params: SamplingParams, *, cache_salt: str = "", breakpoints: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Queue ``params.samples`` sequences for one prompt and return their ids; all or none.

        Only requests with the same ``cache_salt`` share prefixes. ``breakpoints`` are positions in the prompt from
        which later requests are likely to go on differently. With ``best_of`` above ``n``, events have the log
        probability of their token whether or not the parameters ask for it, because texts are ranked by it.

        Raises:
            RequestError: as ``request``.
            QueueFullError: ``max_queue`` requests wait already.
        """
        template = self.request(prompt, params)
        waiting = len(self.scheduler.waiting)
        if self.max_queue is not None and waiting + params.samples > self.max_queue:
            raise QueueFullError(
                f"{waiting} requests are waiting and the queue holds {self.max_queue}: try again later",
                self.retry_after(),
            )
        now = self.clock()
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        if params.samples > params.n and params.logprobs is None:
            params = replace(params, logprobs=0)
        samples = [
            replace(
                template,
                id=next(self._ids),
                arrival=now,
                params=replace(params, seed=_sample_seed(seed, sample)),
                cache_salt=cache_salt,
                breakpoints=breakpoints,
            )
            for sample in range(params.beam_width if params.use_beam_search else params.samples)
        ]
        self.scheduler.submit(*samples)
        del samples[params.samples :]  # a beam search reports its texts under the first ids
        for request in samples:
            self._requests[request.id] = request
            for instrument in self.instruments:
                instrument.submitted(request, now)
        return tuple(request.id for request in samples)

    def finish(self, sequence: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a sequence from outside: its client left, or a stop string appeared. Its memory is free at once."""
        dropped = self.scheduler.cancel(sequence)
        now = self.clock()
        for each in dropped:
            request = self._requests.pop(each, None)
            if request is not None:
                for instrument in self.instruments:
                    instrument.ended(request, reason, now)
        return bool(dropped)

    def step(self) -> list[TokenEvent]:
        """Run one iteration: fill the pipeline, wait for the oldest step, fold it in.

        A step that fails ends all running sequences with ``FinishReason.ERROR``, because any of them may have been
        waiting for a copy that it did not make, and empties the prefix cache. Waiting ones go on.
        """
        scheduler, runner = self.scheduler, self.runner
        try:
            while len(scheduler.inflight) < self.depth and (plan := scheduler.plan()) is not None:
                now = self.clock()
                for instrument in self.instruments:
                    instrument.planned(plan, now)
                runner.submit(plan)
            if not scheduler.inflight:
                return []
            plan = scheduler.inflight[0]
            outcome = runner.collect()
        except Exception:
            logger.exception("a step failed; all running sequences end")
            return self._abandon()
        events = scheduler.commit(outcome)
        now = self.clock()
        for instrument in self.instruments:
            instrument.stepped(plan, outcome, events, now)
        for event in events:
            if event.finish_reason is not None:
                for instrument in self.instruments:
                    instrument.ended(self._requests[event.sequence], event.finish_reason, now)
                del self._requests[event.sequence]
        return events

    def retry_after(self) -> float:
        """Seconds after which a refused client may try again: the queue's length at the recent rate of completion."""
        return self.metrics.expected_wait(self.clock())

    def _abandon(self) -> list[TokenEvent]:
        scheduler = self.scheduler
        struck = list(scheduler.running)
        scheduler.inflight.clear()
        self.runner.reset()
        for sequence in struck:
            self.finish(sequence, FinishReason.ERROR)
        scheduler.cache.flush()
        return [TokenEvent(sequence, NO_TOKEN, FinishReason.ERROR, None) for sequence in struck]


def _sample_seed(seed: int, sample: int) -> int:
    """Sample 0 of a request draws as a request with n = 1 does; the others draw from streams of their own."""
    return (seed + sample * 0x9E3779B97F4A7C15) % 2**64
