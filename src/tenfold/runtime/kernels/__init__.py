"""Attention and recurrence over the arena, behind one seam.

``reference`` is the readable form that runs on every device and that faster kernels are held against; ``native`` is
compiled C++ for a CPU. ``select`` decides which of them a runner uses.
"""

from __future__ import annotations

import logging

import torch

from tenfold.errors import ModelError
from tenfold.runtime.kernels import native
from tenfold.runtime.kernels.interface import Kernels, Recurrent
from tenfold.runtime.kernels.native_kernels import NativeKernels
from tenfold.runtime.kernels.reference_kernels import ReferenceKernels

__all__ = ["CHOICES", "Kernels", "Recurrent", "select"]

logger = logging.getLogger(__name__)

CHOICES = ("auto", "reference", "native")


def select(device: torch.device, dtype: torch.dtype, choice: str = "auto") -> Kernels:
    """Return the kernels for a device and a compute dtype.

    ``"auto"`` takes native ones on a CPU where they compile and know the dtype, otherwise the reference, and a warning
    says why; ``"reference"`` and ``"native"`` take what they say. Raises ModelError for another choice, and for
    ``"native"`` where it cannot be.
    """
    if choice not in CHOICES:
        raise ModelError(f"kernels must be one of {', '.join(CHOICES)}, not {choice!r}")
    if choice == "reference":
        return ReferenceKernels()
    if choice == "native":
        if device.type != "cpu" or dtype not in native.DTYPES:
            raise ModelError(f"native kernels run on a CPU in bfloat16 or float32, not on {device} in {dtype}")
        try:
            native.library()
        except native.NativeError as error:
            raise ModelError(f"native kernels cannot be used: {error}") from error
        return NativeKernels()
    if device.type != "cpu":
        return ReferenceKernels()
    if dtype not in native.DTYPES:
        logger.warning("there are no fast CPU kernels for %s: with dtype bfloat16 or float32 it would be faster", dtype)
        return ReferenceKernels()
    return NativeKernels() if native.available() else ReferenceKernels()
