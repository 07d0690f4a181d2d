"""Options that several commands share, as annotated types, and what they turn into."""

from __future__ import annotations

import logging
import sys
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


def _engine(help: str, **bounds: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=MODEL_PANEL, **bounds)


def sampling_option(help: str, *names: str) -> Any:
    """An option whose default is the model's or the engine's own."""
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING_PANEL, show_default=False)


Memory = Annotated[str, _engine("Memory for keys, values and states, for example 512MiB or 2GiB.")]
Dtype = Annotated[str, _engine("Numbers to compute in: auto, float32, bfloat16 or float16.")]
Device = Annotated[str, _engine("Where to compute: cpu, cuda or another torch device.")]
BlockSize = Annotated[int, _engine("Tokens in a block of memory.", min=1)]
MaxBatchTokens = Annotated[int, _engine("Tokens of one step at most; longer prompts come in chunks.", min=1)]
MaxSequences = Annotated[int, _engine("Sequences that run at once at most.", min=1)]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        help="Keep what was computed, so that later prompts with the same beginning need not compute it again.",
        rich_help_panel=MODEL_PANEL,
    ),
]
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
