"""The torch runner: executes plans with a real model."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from tenfold.core import CacheSpec, ModelSpec, StepOutcome, StepPlan
from tenfold.models.base import Model
from tenfold.runtime.batch import Rows
from tenfold.runtime.kernels import native
from tenfold.runtime.memory import ArenaMemory
from tenfold.runtime.program import Program
from tenfold.runtime.sampler import Sampler
from tenfold.runtime.step import ForwardStep


class TorchRunner:
    """Runs plans in the order they are submitted: at once, or on a thread of its own.

    Args:
        model: the forward pass.
        spec, model_spec: the arena's division and what the model keeps in it.
        max_sequences: rows of the batch.
        max_context: tokens of the longest sequence.
        vocab_size: width of the logits.
        dtype, device: what the model computes in, and where.
        packed: whether the model's weights were packed for the compiled kernels, which then run it.
        overlap: whether ``submit`` returns before a step is done, so that the next one can be planned meanwhile.
    """

    def __init__(
        self,
        model: Model,
        spec: CacheSpec,
        model_spec: ModelSpec,
        *,
        max_sequences: int,
        max_context: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        packed: bool = False,
        overlap: bool = False,
    ) -> None:
        self.model = model
        self.model_spec = model_spec
        self.memory = ArenaMemory(spec, model_spec, dtype, device)
        self.rows = Rows(spec, max_sequences, max_context, device)
        self.program: Program | None = None
        if packed:
            self.program = Program(self.memory, dtype)
            model.record(self.program)
            native.large_pages(self.memory.data)
        self.sampler = Sampler(max_sequences, vocab_size, device, argmax=native.argmax if packed else None)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tenfold-runner") if overlap else None
        self._steps: deque[Future[StepOutcome]] = deque()

    def submit(self, plan: StepPlan) -> None:
        if self._worker is not None:
            self._steps.append(self._worker.submit(self._run, plan))
            return
        outcome = self._run(plan)
        done: Future[StepOutcome] = Future()
        done.set_result(outcome)
        self._steps.append(done)

    def collect(self) -> StepOutcome:
        return self._steps.popleft().result()

    def reset(self) -> None:
        wait(self._steps)  # what was submitted after the step that failed runs all the same
        self._steps.clear()

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepOutcome:
        started = time.perf_counter()
        self.memory.copy(plan.copies)
        for entry in plan.entries:
            self.sampler.enter(entry)
        batch = self.rows.apply(plan)
        self.sampler.observe(plan, batch)
        if self.program is not None:
            logits = self.program.forward(batch)
        else:
            logits = self.model.forward(ForwardStep(batch, self.memory))
        tokens, logprobs = self.sampler.sample(logits, batch.drawn)
        self.rows.latest[batch.drawn.rows] = tokens
        seconds = time.perf_counter() - started
        return StepOutcome(plan.step, tokens, logprobs, seconds)
