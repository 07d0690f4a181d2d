"""Putting an engine together: model, arena, scheduler and runner."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tenfold.core import CacheSpec, ModelSpec, Scheduler
from tenfold.engine.engine import Engine
from tenfold.engine.profile import DEFAULT_LIMIT, Profile
from tenfold.errors import ModelError
from tenfold.models.hub import DEFAULT_MODEL
from tenfold.models.loader import LoadedModel, load_model
from tenfold.models.weights import Packing
from tenfold.runtime.kernels import packing
from tenfold.runtime.runner import TorchRunner
from tenfold.units import parse_bytes

KV_CACHE_DTYPES = ("auto", "int8")


@dataclass(frozen=True)
class Assembly:
    """An engine and the model it runs."""

    engine: Engine
    loaded: LoadedModel


def assemble(
    model: str | Path = DEFAULT_MODEL,
    *,
    memory: str | int = "2GiB",
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    block_size: int = 16,
    max_batch_tokens: int = 512,
    max_sequences: int = 256,
    max_queue: int | None = None,
    depth: int = 1,
    prefix_caching: bool = True,
    kernels: str = "auto",
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    threads: int | None = None,
    profile: str | Path | None = None,
    profile_limit: str | int = DEFAULT_LIMIT,
    progress: bool = True,
) -> Assembly:
    """Load a model and build an engine around it.

    Args:
        model: a folder, a GGUF file, a known name or a hub id.
        memory: size of the arena, for example ``"2GiB"``; it holds KV blocks and recurrent states alike.
        dtype: compute dtype, or ``"auto"`` for the checkpoint's own.
        device: a torch device.
        block_size: tokens of a KV block.
        max_batch_tokens: tokens of one step at most; long prompts are prefilled in chunks of what decodes leave of it.
        max_sequences: sequences that run at once at most.
        max_queue: sequences that may wait at once; None is unbounded.
        depth: steps under way at once, 1 to 3.
        prefix_caching: whether prompts may reuse what earlier ones left in the arena.
        kernels: ``"native"`` for the compiled CPU kernels, ``"reference"`` for plain torch, ``"auto"`` for the fastest
            that can be used here.
        quantize: how to round the weights of matrix products, on a CPU: ``"int8"`` keeps a scale for every output,
            ``"int8-groups"`` for every 32 inputs of it, ``"int4"`` too; None keeps them as they are.
        kv_cache_dtype: what keys and values are kept in: ``"auto"`` for the compute dtype, or ``"int8"``, with a scale
            for every token and head, which fits nearly twice the tokens. Needs the native kernels.
        threads: threads that torch computes with, in the whole process; None leaves it what it is. They wait for each
            other in every operation: beside a busy neighbour, two on two cores are slower than one.
        profile: a file to trace every step to (``tenfold.engine.profile``); one that exists is overwritten.
        profile_limit: size of that file at most; the trace ends there.
        progress: whether to draw progress bars on standard error.

    Raises:
        TenfoldError: an option makes no sense, the profile cannot be written, or the model cannot be found, read or
            fitted.
    """
    for name, value in (("block_size", block_size), ("max_batch_tokens", max_batch_tokens)):
        if value < 1:
            raise ModelError(f"{name} must be at least 1, not {value}")
    if max_sequences < 1:
        raise ModelError(f"max_sequences must be at least 1, not {max_sequences}")
    if not 1 <= depth <= 3:
        raise ModelError(f"depth must be 1, 2 or 3, not {depth}")
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ModelError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {kv_cache_dtype!r}")
    kv_quantized = kv_cache_dtype == "int8"
    pool_bytes = parse_bytes(memory)
    if threads is not None:
        _set_threads(threads)
    target = _device(device)

    def choose(config: Any, chosen: torch.dtype) -> Packing | None:
        found = packing(config, chosen, target, block_size, choice=kernels, quantize=quantize)
        if kv_quantized and found is None:
            raise ModelError("kv_cache_dtype int8 needs the native kernels, which cannot run this model here")
        return found

    trace = Profile(profile, profile_limit) if profile is not None else None
    loaded = load_model(model, dtype=dtype, device=target, progress=progress, packing=choose)
    model_spec = ModelSpec.from_config(
        loaded.config.to_dict(), element_bytes=loaded.dtype.itemsize, name=loaded.name, kv_quantized=kv_quantized
    )
    spec = CacheSpec.for_model(model_spec, pool_bytes, block_size)
    scheduler = Scheduler(spec, max_batch_tokens, max_sequences, prefix_caching=prefix_caching)
    max_context = min(loaded.max_context, spec.max_length + 1)
    runner = TorchRunner(
        loaded.model,
        spec,
        model_spec,
        max_sequences=scheduler.max_sequences,
        max_context=max_context,
        vocab_size=loaded.vocab_size,
        dtype=loaded.dtype,
        device=target,
        packed=loaded.packed,
        overlap=depth > 1,
    )
    engine = Engine(
        scheduler,
        runner,
        vocab_size=loaded.vocab_size,
        max_context=max_context,
        eos_token_ids=loaded.eos_token_ids,
        depth=depth,
        max_queue=max_queue,
        profile=trace,
    )
    return Assembly(engine, loaded)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _set_threads(threads: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise ModelError(f"threads must be from 1 to {cores}, the cores this process may use, not {threads}")
    torch.set_num_threads(threads)
