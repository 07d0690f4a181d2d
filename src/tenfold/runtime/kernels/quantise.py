"""Weights of fewer bits: which formats there are, and how a weight is brought into one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale in grouped formats, as in GGUF's."""


class Format(IntEnum):
    """How a packed weight is stored; the numbers are those of ``native.cpp``."""

    FLOAT = 0
    BFLOAT16 = 1
    INT8 = 2
    """Signed bytes, one scale for each output."""
    INT8_GROUPS = 3
    """Signed bytes, one scale for every GROUP inputs of an output: GGUF's Q8_0."""
    INT4_GROUPS = 4
    """Halves of bytes, a scale and a least value for every GROUP inputs: GGUF's Q4_0 and Q4_1."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight [outputs, inputs]: ``w = scales * (values - 128)``, or ``scales * values + least`` in INT4_GROUPS.

    ``values`` is uint8 [outputs, inputs], ``scales`` and ``least`` are float32 [outputs, groups], of one group where
    a whole output shares its scale.
    """

    format: Format
    values: Tensor
    scales: Tensor
    least: Tensor | None = None


def quantise(weight: Tensor, format: Format) -> Quantised:
    """Round a float weight [outputs, inputs] to the nearest values of a format, group by group.

    Bytes are symmetric about zero, halves of bytes run from the least to the greatest of a group. ``inputs`` must be a
    multiple of GROUP for the grouped formats.
    """
    outputs, inputs = weight.shape
    groups = weight.float().reshape(outputs, 1 if format is Format.INT8 else inputs // GROUP, -1)
    if format is Format.INT4_GROUPS:
        least, greatest = groups.aminmax(dim=-1, keepdim=True)
        scales = (greatest - least) / 15
        values = ((groups - least) / _divisor(scales)).round_()
        return Quantised(format, values.to(torch.uint8).view(outputs, inputs), scales.squeeze(-1), least.squeeze(-1))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    values = (groups / _divisor(scales)).round_() + 128
    return Quantised(format, values.to(torch.uint8).view(outputs, inputs), scales.squeeze(-1))


def dequantise(weight: Quantised) -> Tensor:
    """The float32 weight [outputs, inputs] that ``weight`` stands for."""
    outputs, groups = weight.scales.shape
    values = weight.values.float().view(outputs, groups, -1)
    scales = weight.scales[..., None]
    if weight.least is not None:
        return (values * scales + weight.least[..., None]).view(outputs, -1)
    return ((values - 128) * scales).view(outputs, -1)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)
