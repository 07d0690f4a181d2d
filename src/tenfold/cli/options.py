"""Options that several commands share, as annotated types, and what they turn into."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from tenfold.core.types import SamplingParams
from tenfold.models.hub import DEFAULT_MODEL

MODEL_HELP = "A folder, a .gguf file, a short name (see `tenfold models`) or a Hugging Face id."
MODEL_PANEL = "Model and memory"
SAMPLING_PANEL = "Sampling"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _engine(help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MODEL_PANEL, **settings)


def sampling_option(help: str, *names: str) -> Any:
    """An option whose default is the model's or the engine's own."""
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING_PANEL, show_default=False)


def _engine_options(
    memory: Annotated[str, _engine("Memory for keys, values and states, for example 512MiB or 2GiB.")] = "2GiB",
    dtype: Annotated[str, _engine("Numbers to compute in: auto, float32, bfloat16 or float16.")] = "auto",
    quantize: Annotated[
        str | None,
        _engine(
            "Round weights to int8 (a scale for each output), int8-groups or int4 (one for every 32 inputs), or keep "
            "those of a GGUF file as they are in it: gguf. CPU only.",
            show_default="none, in the numbers of --dtype",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str, _engine("Numbers to keep keys and values in: auto is the dtype, int8 fits nearly twice the tokens.")
    ] = "auto",
    device: Annotated[str, _engine("Where to compute: cpu, cuda or another torch device.")] = "cpu",
    threads: Annotated[
        int | None,
        _engine(
            "Threads to compute with. Beside a busy neighbour, two on two cores are slower than one.",
            show_default="what torch chooses",
        ),
    ] = None,
    block_size: Annotated[int, _engine("Tokens in a block of memory.", min=1)] = 16,
    max_batch_tokens: Annotated[
        int, _engine("Tokens of one step at most; longer prompts come in chunks.", min=1)
    ] = 512,
    max_sequences: Annotated[int, _engine("Sequences that run at once at most.", min=1)] = 256,
    prefix_caching: Annotated[
        bool,
        _engine(
            "Keep what was computed, so that later prompts with the same beginning need not compute it again.",
            "--prefix-caching/--no-prefix-caching",
        ),
    ] = True,
) -> None:
    """Only its signature counts: the options of every command that makes an engine."""


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of ``_engine_options``, which it takes all together as ``engine: dict[str, Any]``.

    typer reads a command's options from its signature: this makes the signature that it reads.
    """
    shared = inspect.signature(_engine_options, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(engine={name: given.pop(name) for name in shared}, **given)

    parameters = [*(each for name, each in own.parameters.items() if name != "engine"), *shared.values()]
    by_name = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = own.replace(parameters=by_name)  # type: ignore[attr-defined]
    return run


Level = Annotated[LogLevel, typer.Option("--log-level", help="How much to log on standard error.")]

MaxTokens = Annotated[int | None, sampling_option("Tokens to generate at most.")]
Temperature = Annotated[
    float | None, sampling_option("0 always takes the likeliest token; 1 samples as the model learnt.")
]
TopP = Annotated[float | None, sampling_option("Sample from the likeliest tokens that together have this probability.")]
TopK = Annotated[int | None, sampling_option("Sample from this many likeliest tokens; 0 is all of them.")]
MinP = Annotated[float | None, sampling_option("Leave out tokens less likely than this share of the likeliest one.")]
RepetitionPenalty = Annotated[
    float | None, sampling_option("Above 1, tokens that occurred already become less likely.")
]
Seed = Annotated[int | None, sampling_option("The same seed gives the same text.")]
Stop = Annotated[list[str] | None, sampling_option("End the text where this string appears; may be repeated.")]

DEFAULT = DEFAULT_MODEL


def sampling_params(**given: Any) -> SamplingParams:
    """Parameters from options; what was not given has its usual default. Raises RequestError for bad values."""
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def configure_logging(level: LogLevel) -> None:
    """Log to standard error. The HTTP library's own messages about its life are for debugging only."""
    logging.basicConfig(
        level=level.value.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if level is not LogLevel.DEBUG:
        logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))
        for name in ("httpx", "filelock", "asyncio"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
