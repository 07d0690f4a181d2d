"""``tenfold plan``."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenfold.cli import options
from tenfold.errors import TenfoldError
from tenfold.units import parse_bytes

if TYPE_CHECKING:
    from tenfold.planner import Capacity, Description, Pool

MODEL_HELP = (
    "qwen3.8-27b, smollm2-135m-instruct, a config.json, a model's folder, a .gguf file, or a Hugging Face id whose "
    "config.json is in the hub's cache. Weights are not read."
)
POOL_HELP = "Memory for keys, values and states, for example 23859MiB."
DEVICE_HELP = "Instead of --pool: memory of the device, for example 80GB; the pool is what weights and reserve leave."
WEIGHTS_HELP = (
    "With --device: size of the weights. By default the model's parameters, counted in the headers of its files or "
    "else from its configuration, in --dtype."
)
RESERVE_HELP = (
    "With --device: bytes kept for everything but weights and pool. The default, 1GB, is about 0.5 GB for the device's "
    "context and libraries and 0.5 GB for the activations and logits of a step of a few thousand tokens: give more for "
    "larger steps, 0 for none."
)
CONTEXT_HELP = "Tokens of a session, prompt and output; by default 32768, or the native context if that is less."
NATIVE_HELP = "The longest context served, which reservation holds for every session; by default the model's own."
DTYPE_HELP = "Type of keys, values and weights; the state of a recurrent layer is float32 with any of them."
VERIFY_HELP = "Let the real allocator admit sessions until one does not fit, and exit with 1 if it counts differently."


class ElementType(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def bytes(self) -> int:
        return 4 if self is ElementType.FLOAT32 else 2


class CacheType(StrEnum):
    AUTO = "auto"
    INT8 = "int8"


def _size(help: str) -> Any:
    return typer.Option(help=help, metavar="SIZE", show_default=False)


def _tokens(help: str, default: bool = False) -> Any:
    return typer.Option(help=help, metavar="TOKENS", show_default=default, min=1)


def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = options.DEFAULT,
    pool: Annotated[str | None, _size(POOL_HELP)] = None,
    device: Annotated[str | None, _size(DEVICE_HELP)] = None,
    weights: Annotated[str | None, _size(WEIGHTS_HELP)] = None,
    reserve: Annotated[str | None, _size(RESERVE_HELP)] = None,
    context: Annotated[int | None, _tokens(CONTEXT_HELP)] = None,
    native_context: Annotated[int | None, _tokens(NATIVE_HELP)] = None,
    block_size: Annotated[int, _tokens("Tokens in a block of memory.", default=True)] = 16,
    dtype: Annotated[
        ElementType, typer.Option(help=DTYPE_HELP, metavar="bfloat16|float16|float32")
    ] = ElementType.BFLOAT16,
    kv_cache_dtype: Annotated[
        CacheType, typer.Option(help="What keys and values are kept in: the same, or bytes with scales (on a CPU).")
    ] = CacheType.AUTO,
    verify: Annotated[bool, typer.Option("--verify", help=VERIFY_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Say how many sessions of a model fit, and what each costs: exact bytes and pages, without loading the model."""
    from tenfold.core import ModelSpec
    from tenfold.planner import describe, plan_capacity
    from tenfold.planner.report import as_data, as_text

    description = describe(model)
    found = chosen_pool(description, dtype, pool, device, weights, reserve)
    spec = ModelSpec.from_config(
        description.config,
        element_bytes=dtype.bytes,
        name=description.name,
        kv_quantized=kv_cache_dtype is CacheType.INT8,
    )
    capacity = plan_capacity(spec, found.bytes, context, block_size, native_context)
    admitted = verified(capacity) if verify else None
    if as_json:
        data = as_data(capacity, found, dtype.value, description.parameters)
        data["kv_cache_dtype"] = kv_cache_dtype.value
        typer.echo(json.dumps(data if admitted is None else {**data, "verified_sessions": admitted}, indent=2))
        return
    kinds = dtype.value if kv_cache_dtype is CacheType.AUTO else f"{dtype.value}, keys and values in int8"
    typer.echo(as_text(capacity, found, kinds))
    if admitted is not None:
        typer.echo(
            f"\nverified: the allocator admitted {admitted:,} sessions of {capacity.context:,} tokens and no more"
        )


def chosen_pool(
    description: Description,
    dtype: ElementType,
    pool: str | None,
    device: str | None,
    weights: str | None,
    reserve: str | None,
) -> Pool:
    """The pool that the options name. Raises TenfoldError when they name none, or two."""
    from tenfold.planner import Pool, pool_on_device

    if (pool is None) == (device is None):
        raise TenfoldError("give either --pool, the memory for the cache, or --device, the memory of the whole device")
    if pool is not None:
        if weights is not None or reserve is not None:
            raise TenfoldError("--weights and --reserve go with --device: --pool is what is left beside them")
        return Pool(parse_bytes(pool), f"--pool {pool}")
    return pool_on_device(
        parse_bytes(device or ""),
        description,
        dtype.bytes,
        None if weights is None else parse_bytes(weights),
        None if reserve is None else 0 if reserve == "0" else parse_bytes(reserve),
    )


def verified(capacity: Capacity) -> int:
    """The allocator's own count. Raises TenfoldError when it is another than the arithmetic's."""
    from tenfold.planner import sessions_admitted

    admitted = sessions_admitted(capacity.cache, capacity.context)
    if admitted != capacity.paged_sessions:
        raise TenfoldError(
            f"the arithmetic says {capacity.paged_sessions:,} sessions of {capacity.context:,} tokens and the "
            f"allocator admitted {admitted:,}"
        )
    return admitted
