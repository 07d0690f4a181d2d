"""How many parameters a model has: from its configuration, or from the headers of its weight files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenfold.core import ModelSpec, RecurrentLayer
from tenfold.errors import ModelError

OTHER_PARTS = ("model.visual.", "visual.", "mtp.")
"""Tensors that serving text does not load: the vision tower and the layers for multi-token prediction."""
_MOST_HEADER_BYTES = 2**28


def from_config(config: Mapping[str, Any]) -> int | None:
    """Parameters of the text model that a Hugging Face ``config.json`` describes; None for a family not known here.

    The formulas are those of the Llama, Mistral, Qwen2, Qwen3 and Qwen3.5 modules in transformers, without mixtures of
    experts.
    """
    text = config.get("text_config") or config
    kind = str(text.get("model_type", "")).removesuffix("_text")
    if kind not in ("llama", "mistral", "qwen2", "qwen3", "qwen3_5"):
        return None
    try:
        hidden, inner, vocabulary = (int(text[key]) for key in ("hidden_size", "intermediate_size", "vocab_size"))
        heads = int(text["num_attention_heads"])
        layers = ModelSpec.from_config(config).layers
    except (KeyError, ModelError):
        return None
    mlp = 3 * hidden * inner
    if text.get("mlp_bias"):
        mlp += 2 * inner + hidden
    total = hidden  # the last norm
    for layer in layers:
        total += mlp + 2 * hidden
        if isinstance(layer, RecurrentLayer):
            total += _recurrent(layer, hidden)
        else:
            total += _attention(kind, text, hidden, heads * layer.head_dim, layer.kv_heads * layer.head_dim)
            total += 2 * layer.head_dim if kind in ("qwen3", "qwen3_5") else 0  # norms of queries and keys
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return total + vocabulary * hidden * (1 if tied else 2)


def _attention(kind: str, text: Mapping[str, Any], hidden: int, queries: int, keys: int) -> int:
    gated = 2 if kind == "qwen3_5" else 1  # the query projection of a gated attention also makes the gate
    found = hidden * (gated * queries + 2 * keys + queries)
    if kind == "qwen2":
        found += queries + 2 * keys
    elif text.get("attention_bias"):
        found += gated * queries + 2 * keys + hidden
    return found


def _recurrent(layer: RecurrentLayer, hidden: int) -> int:
    values = layer.value_heads * layer.value_dim
    projections = hidden * (layer.convolution_channels + values + 2 * layer.value_heads) + values * hidden
    return projections + layer.convolution_channels * layer.convolution_width + 2 * layer.value_heads + layer.value_dim


def from_safetensors(folder: Path) -> int | None:
    """Parameters in the safetensors files of ``folder``, counted from their headers; None where there are none.

    Raises:
        ModelError: a header is cut short or damaged.
    """
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
    return sum(map(_in_file, files)) if files else None


def _in_file(path: Path) -> int:
    """A safetensors file starts with the length of its header, 8 bytes, and the header, a JSON object."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"its header claims {length:,} bytes")
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return sum(math.prod(entry["shape"]) for name, entry in tensors.items() if not name.startswith(OTHER_PARTS))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a readable safetensors file, perhaps cut short or damaged ({error})") from error
