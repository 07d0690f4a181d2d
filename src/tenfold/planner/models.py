"""From what a user calls a model to its configuration and its number of parameters, without loading weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenfold.errors import ModelError
from tenfold.models.files import read_json
from tenfold.models.gguf_file import GGUFFile
from tenfold.models.hub import DEFAULT_MODEL
from tenfold.planner import parameters

_SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_QWEN_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "vocab_size": 248_320,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
}
KNOWN: dict[str, dict[str, Any]] = {DEFAULT_MODEL: _SMOLLM2_135M, "qwen3.8-27b": _QWEN_27B}
"""Configurations that are known without any file, by name: what decides memory, and no more."""

_GGUF_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Description:
    """A model as the planner needs it.

    ``parameters`` are those that serving text loads, None when they cannot be told; ``counted`` says where the number
    is from.
    """

    name: str
    config: Mapping[str, Any]
    parameters: int | None
    counted: str = ""


def known_names() -> list[str]:
    """The names that ``describe`` knows without any file."""
    return sorted(KNOWN)


def describe(source: str) -> Description:
    """Find what ``source`` names: a known model, a ``config.json``, a folder, a GGUF file or a cached hub model.

    Nothing is fetched.

    Raises:
        ModelError: there is no such model here, or its files cannot be read.
    """
    if source in KNOWN:
        return _from_config(source, KNOWN[source])
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_folder(path, path.resolve().name)
    if path.is_file():
        if path.suffix == ".gguf":
            return _from_gguf(path)
        if path.suffix == ".json":
            return _from_config(path.resolve().parent.name, read_json(path))
        raise ModelError(f"{path}: a model is a folder, a config.json or a .gguf file")
    folder = _cached(source) if source.count("/") == 1 and not source.startswith((".", "/", "~")) else None
    if folder is None:
        raise ModelError(
            f"{source!r} is no file or folder here, no model in the hub's cache and none of the names: "
            f"{', '.join(known_names())}"
        )
    return _from_folder(folder, source)


def _from_config(name: str, config: Mapping[str, Any]) -> Description:
    count = parameters.from_config(config)
    return Description(name, config, count, "counted from the configuration" if count else "")


def _from_folder(folder: Path, name: str) -> Description:
    packed = sorted(folder.glob("*.gguf"))
    if not (folder / "config.json").exists():
        if len(packed) == 1:
            return _from_gguf(packed[0])
        raise ModelError(f"{folder}: holds no config.json" + (" and several .gguf files: name one" if packed else ""))
    config = read_json(folder / "config.json")
    count = parameters.from_safetensors(folder)
    if count is not None:
        return Description(name, config, count, "counted in the headers of its safetensors files")
    return _from_config(name, config)


def _from_gguf(path: Path) -> Description:
    file = GGUFFile(path)
    if file.architecture not in _GGUF_FAMILIES or file.get("expert_count", 0):
        raise ModelError(
            f"{path}: GGUF architecture {file.architecture!r} cannot be planned; known are "
            f"{', '.join(_GGUF_FAMILIES)}, without experts"
        )
    heads = file.require("attention.head_count")
    config = {
        "model_type": file.architecture,
        "num_hidden_layers": file.require("block_count"),
        "hidden_size": file.require("embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": file.get("attention.key_length"),
        "max_position_embeddings": file.get("context_length", 0),
    }
    count = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    return Description(path.stem, config, count, "counted in the file's header")


def _cached(repository: str) -> Path | None:
    """The folder of a hub model that is in the cache."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
