"""The torch runner: executes plans with a real model."""

from __future__ import annotations

import time
from collections import deque
from functools import cached_property

import torch
from torch import Tensor

from tenfold.core import CacheSpec, ModelSpec, StepOutcome, StepPlan
from tenfold.models.base import Model
from tenfold.runtime.batch import Batch, Rows
from tenfold.runtime.kernels import Kernels, Recurrent, select
from tenfold.runtime.kernels.delta_rule import Inputs
from tenfold.runtime.memory import ArenaMemory
from tenfold.runtime.sampler import Sampler


class ForwardStep:
    """What a model sees of one forward pass (``tenfold.models.base.Step``)."""

    def __init__(self, batch: Batch, memory: ArenaMemory, kernels: Kernels) -> None:
        self._batch = batch
        self._memory = memory
        self._kernels = kernels
        self.token_ids = batch.token_ids
        self.positions = batch.positions
        self.sampled = batch.sampled

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        self._kernels.store(keys, values, key, value, self._batch)
        return self._kernels.attend(query, keys, values, self._batch, scale)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.convolve(x, weight, self._memory.tails[layer], self._recurrent)

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        inputs = Inputs(query, key, value, decay, beta)
        return self._kernels.delta_rule(inputs, self._memory.states[layer], self._recurrent)

    @cached_property
    def _recurrent(self) -> Recurrent:
        memory = self._memory
        return Recurrent(self._batch.bounds, memory.places(self._batch.slots), memory.states[0], memory.tails[0])


class TorchRunner:
    """Runs each plan as it is submitted.

    Args:
        model: the forward pass.
        spec, model_spec: the arena's division and what the model keeps in it.
        max_sequences: rows of the batch.
        max_context: tokens of the longest sequence.
        vocab_size: width of the logits.
        dtype, device: what the model computes in, and where.
        kernels: ``"auto"``, ``"reference"`` or ``"native"`` (``tenfold.runtime.kernels.select``).
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
        kernels: str = "auto",
    ) -> None:
        self.model = model
        self.kernels = select(device, dtype, kernels)
        self.spec = spec
        self.memory = ArenaMemory(spec, model_spec, dtype, device)
        self.rows = Rows(spec, max_sequences, max_context, device)
        self.sampler = Sampler(max_sequences, vocab_size, device)
        self._done: deque[StepOutcome] = deque()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        self.memory.copy(plan.copies)
        for entry in plan.entries:
            self.sampler.enter(entry)
        batch = self.rows.apply(plan)
        self.sampler.observe(plan, batch)
        if self.spec.slot_pages:
            # A slot is handed on as its former owner left it.
            self.memory.clear(batch.slots[batch.starts == 0].tolist())
        logits = self.model.forward(ForwardStep(batch, self.memory, self.kernels))
        tokens, logprobs = self.sampler.sample(logits, batch.drawn)
        self.rows.latest[batch.drawn.rows] = tokens
        seconds = time.perf_counter() - started
        self._done.append(StepOutcome(plan.step, tokens, logprobs, seconds))

    def collect(self) -> StepOutcome:
        return self._done.popleft()

    def reset(self) -> None:
        self._done.clear()
