"""How much of a device is left for keys, values and states."""

from __future__ import annotations

from dataclasses import dataclass

from tenfold.errors import TenfoldError
from tenfold.planner.models import Description
from tenfold.units import format_bytes

DEFAULT_RESERVE = 10**9
"""About half for the device's context and libraries, and half for what a step of a few thousand tokens needs beside the
pool: activations of two MLPs' width per token, and float32 logits of the tokens that are sampled."""


@dataclass(frozen=True)
class Pool:
    """``bytes`` for keys, values and states, and a sentence on where that number is from."""

    bytes: int
    origin: str


def pool_on_device(
    device: int, description: Description, element_bytes: int, weights: int | None = None, reserve: int | None = None
) -> Pool:
    """What ``device`` bytes leave beside the weights and a reserve.

    Without ``weights`` they are the parameters at ``element_bytes`` each: the engine unpacks packed checkpoints
    unless it is told to keep them or to round weights (``--quantize``); give ``weights`` then.

    Raises:
        TenfoldError: the number of parameters is not known either, or nothing is left.
    """
    counted = ""
    if weights is None:
        if description.parameters is None:
            raise TenfoldError(f"the parameters of {description.name} cannot be counted: give --weights")
        weights = description.parameters * element_bytes
        counted = f" ({description.parameters:,} parameters, {description.counted})"
    reserve = DEFAULT_RESERVE if reserve is None else reserve
    left = device - weights - reserve
    origin = f"{decimal(device)} - {decimal(weights)} weights{counted} - {decimal(reserve)} reserve"
    if left <= 0:
        raise TenfoldError(f"nothing is left for a pool: {origin} is {format_bytes(-left)} short")
    return Pool(left, origin)


def decimal(count: int) -> str:
    """``count`` bytes in GB as devices are sold, 1 GB = 1e9 bytes; MB below one."""
    unit, power = ("GB", 10**9) if count >= 10**9 else ("MB", 10**6)
    return f"{count / power:,.2f}".rstrip("0").rstrip(".") + f" {unit}"
