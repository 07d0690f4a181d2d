"""Attention, recurrence and products over the arena.

``reference``, ``convolution`` and ``delta_rule`` are the readable forms in plain torch, which run on every device and
which faster ones are held against. ``native`` is the compiled C++ of the CPU backend, which runs recorded programs
(``tenfold.runtime.program``). ``packing`` decides between the two before a model's weights are read.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from tenfold.errors import ModelError
from tenfold.models.quantise import GROUP, Format, Quantised, quantise
from tenfold.models.weights import Packing
from tenfold.runtime.kernels import native

__all__ = ["CHOICES", "KEEP", "QUANTISATIONS", "check_choices", "obstacle", "packing"]

logger = logging.getLogger(__name__)

CHOICES = ("auto", "reference", "native")
QUANTISATIONS = {"int8": Format.INT8, "int8-groups": Format.INT8_GROUPS, "int4": Format.INT4_GROUPS}
"""The choices of ``quantize`` that round weights, each with the format that it rounds them to."""
KEEP = "gguf"
"""The choice of ``quantize`` that rounds nothing, and keeps what a GGUF file has quantised as it is."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu")
"""Those of gated layers, in the order of ``Activation`` in ``native.cpp``."""
SUB_BLOCK = 16
"""Tokens that the kernels keep side by side: blocks must be multiples of it."""
LARGEST_HEAD = 1024


def packing(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    *,
    choice: str = "auto",
    quantize: str | None = None,
) -> Packing | None:
    """Return what packs a model's weights for the compiled kernels, or None where plain torch is to run it.

    ``choice`` "auto" takes the kernels where they can be used, and a warning says why not; "reference" and "native"
    take what they say. ``quantize`` is one of QUANTISATIONS, by which float weights are rounded, or KEEP; weights that
    arrive quantised are packed as they are.

    Raises:
        ModelError: another choice, or kernels that are asked for, themselves or for quantised weights, and cannot be.
    """
    check_choices(choice, quantize)
    needed = choice == "native" or quantize is not None
    if choice == "reference":
        return None
    reason = obstacle(config, dtype, device, block_size)
    if reason is None:
        try:
            native.library()
        except native.NativeError as error:
            reason = str(error)
    if reason is not None:
        if needed:
            raise ModelError(f"the native kernels cannot run this model: {reason}")
        if device.type == "cpu":
            logger.warning("the fast CPU kernels are not used, and the slow reference is: %s", reason)
        return None
    format = QUANTISATIONS.get(quantize) if quantize is not None else None

    def pack(weight: Tensor | Quantised, bias: Tensor | None, gated: bool) -> native.PackedWeight:
        if isinstance(weight, Quantised):
            return native.pack_quantised(weight, bias, gated=gated)
        if format is None or weight.shape[1] % (4 if format is Format.INT8 else GROUP):
            return native.pack(weight, bias, gated=gated)
        return native.pack_quantised(quantise(weight, format), bias, gated=gated)

    return pack


def check_choices(choice: str, quantize: str | None) -> None:
    """Raise ModelError for choices that no model could be packed by, before one is looked for."""
    if choice not in CHOICES:
        raise ModelError(f"kernels must be one of {', '.join(CHOICES)}, not {choice!r}")
    if quantize not in (None, *QUANTISATIONS, KEEP):
        raise ModelError(f"quantize must be one of {', '.join((*QUANTISATIONS, KEEP))}, not {quantize!r}")
    if choice == "reference" and quantize is not None:
        raise ModelError("quantised weights need the native kernels: leave out kernels='reference'")


def obstacle(config: Any, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
    """Why the compiled kernels cannot run a model of this configuration, in a few words; None if they can."""
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if device.type != "cpu" or dtype not in native.DTYPES:
        return f"they run on a CPU in bfloat16 or float32, not on {device} in {dtype}"
    if block_size % SUB_BLOCK:
        return f"blocks must have a multiple of {SUB_BLOCK} tokens, not {block_size}"
    if width % SUB_BLOCK or width > LARGEST_HEAD:
        return f"attention heads must have a multiple of {SUB_BLOCK} features, not {width}"
    if config.hidden_act not in ACTIVATIONS:
        return f"the activation {config.hidden_act!r} is not among {', '.join(ACTIVATIONS)}"
    widths = [config.hidden_size, config.intermediate_size]
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        if config.hidden_act != "silu":
            return f"convolutions of recurrent layers are followed by silu, not by {config.hidden_act!r}"
        widths.append(config.linear_num_value_heads * config.linear_value_head_dim)
    if any(width % 2 for width in widths):
        return "layers must have even widths"
    return None
