"""Weights and configuration out of a GGUF file: tensors unpacked to floats as they are read, or kept quantised."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tenfold.errors import ModelError
from tenfold.models.files import first_line
from tenfold.models.gguf_file import GGUFFile, GGUFTensor
from tenfold.models.quantise import GROUP, Format, Quantised

if TYPE_CHECKING:
    import numpy as np

_PIECE_ELEMENTS = 4 * 2**20
"""Elements unpacked at once, in float32: 16 MiB beside the weights."""
_FORMATS = {"Q8_0": Format.INT8_GROUPS, "Q4_0": Format.INT4_GROUPS, "Q4_1": Format.INT4_GROUPS}
"""ggml's types that have the values and scales of a format."""
_PERMUTED = re.compile(r"attn_([qk])\.(weight|bias)$")

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""llama.cpp's architecture to transformers' model type and architecture."""

_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
_OPTIONAL_KEYS = ("vocab_size", "attention.head_count_kv", "attention.key_length")


class GGUFSource:
    """A TensorSource over one GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises ModelError for an architecture that is not in ARCHITECTURES."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        check_architecture(file)
        architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
        self.file = file
        self._names = get_tensor_name_map(architecture, int(file.require("block_count")))

    def names(self) -> Collection[str]:
        """Every tensor of the file."""
        return self.file.tensors

    def locate(self, name: str) -> str | None:
        """Translate with the gguf package's table; GGUF's own names are accepted too."""
        own = self._names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        return own if own in self.file.tensors else None

    def where(self, own: str) -> Path:
        """Always the one file."""
        return self.file.path

    def shape(self, own: str) -> tuple[int, ...]:
        """As the header states it."""
        return self.file.tensors[own].shape

    def dtype(self, own: str) -> torch.dtype | None:
        """None for everything packed; the caller chooses what to unpack to."""
        from gguf import GGMLQuantizationType as Kind

        plain = {Kind.F64: torch.float64, Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
        return plain.get(Kind(self.file.tensors[own].kind))

    def read_into(self, own: str, out: Tensor) -> None:
        """Unpack a few rows at a time. Raises ModelError for a type that the gguf package cannot unpack."""
        from gguf import GGMLQuantizationType, dequantize

        tensor = self.file.tensors[own]
        kind = GGMLQuantizationType(tensor.kind)
        for rows, packed in self._pieces(tensor):
            try:
                piece = torch.from_numpy(dequantize(packed, kind).copy())
            except NotImplementedError:
                raise ModelError(
                    f"{self.file.path}: tensor {own!r} is packed as {kind.name}, which cannot be unpacked here"
                ) from None
            out.view(-1, piece.shape[1])[rows.to(out.device)] = piece.to(out.device, out.dtype)

    def format(self, own: str) -> Format | None:
        """Of matrices in Q8_0, Q4_0 and Q4_1."""
        from gguf import GGMLQuantizationType

        tensor = self.file.tensors[own]
        return _FORMATS.get(GGMLQuantizationType(tensor.kind).name) if len(tensor.shape) == 2 else None

    def read_quantised(self, own: str, out: Quantised) -> None:
        """Bring the blocks of a few rows at a time into their places, exactly: float16 scales become float32."""
        from gguf import GGMLQuantizationType

        tensor = self.file.tensors[own]
        kind = GGMLQuantizationType(tensor.kind).name
        for rows, packed in self._pieces(tensor):
            for to, part in zip((out.values, out.scales, out.least), _parts(packed, kind), strict=True):
                if to is not None and part is not None:
                    to[rows] = torch.from_numpy(part)

    def _pieces(self, tensor: GGUFTensor) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Read a tensor a few rows at a time: which rows they are, int64 [n], and their bytes, uint8 [n, row bytes]."""
        import numpy as np

        order = self._row_order(tensor)
        # A permuted bias is permuted element by element; any other vector is one row.
        width = 1 if order is not None and len(tensor.shape) == 1 else tensor.shape[-1]
        count = math.prod(tensor.shape) // width
        if order is None:
            order = torch.arange(count)
        row_bytes = tensor.size // count
        with tensor_data(self.file, tensor) as data:
            for rows in torch.split(order, max(1, _PIECE_ELEMENTS // width)):
                raw = data.read(len(rows) * row_bytes)
                if len(raw) < len(rows) * row_bytes:
                    raise ModelError(f"{self.file.path}: cut short while it was read, at tensor {tensor.name!r}")
                yield rows, np.frombuffer(raw, dtype=np.uint8).reshape(len(rows), row_bytes)

    def _row_order(self, tensor: GGUFTensor) -> Tensor | None:
        """The row of the Hugging Face layout that each row of the file belongs to, or None when they agree.

        llama.cpp interleaves the two halves of each query and key head in files of architecture "llama", because it
        rotates neighbouring pairs where Hugging Face rotates halves.
        """
        match = _PERMUTED.search(tensor.name)
        if self.file.architecture != "llama" or match is None:
            return None
        heads = int(self.file.require("attention.head_count"))
        if match[1] == "k":
            heads = int(self.file.get("attention.head_count_kv", heads))
        return torch.arange(tensor.shape[0]).view(heads, 2, -1).transpose(1, 2).reshape(-1)


def _parts(packed: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Rows of blocks, uint8 [rows, bytes] of a type in _FORMATS, as the values, scales and least of ``Quantised``.

    A block is a float16 scale, in Q4_1 a float16 least value, then signed bytes in Q8_0, or else halves of bytes, the
    low ones of which come first. Halves in Q4_0 are 8 above what they stand for.
    """
    import numpy as np

    rows, header = len(packed), 4 if kind == "Q4_1" else 2
    blocks = packed.reshape(rows, -1, header + (GROUP if kind == "Q8_0" else GROUP // 2))
    numbers = blocks[..., :header].copy().view("<f2").astype(np.float32)
    scales, values = numbers[..., 0], blocks[..., header:]
    if kind == "Q8_0":
        return (values ^ 128).reshape(rows, -1), scales, None  # flipping its sign bit adds 128 to a byte
    halves = np.concatenate((values & 15, values >> 4), axis=-1)
    return halves.reshape(rows, -1), scales, numbers[..., 1] if kind == "Q4_1" else -8 * scales


def check_architecture(file: GGUFFile) -> None:
    """Raise ModelError for an architecture without a translation, or a mixture of experts under a dense one's name."""
    if file.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: GGUF architecture {file.architecture!r} is not supported; known are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    if file.get("expert_count", 0):
        raise ModelError(f"{file.path}: mixtures of experts are not supported")


def gguf_config(file: GGUFFile) -> Any:
    """Build the transformers configuration from the metadata, without touching tensor data.

    transformers builds one too, but takes seconds for it, ignores rotary scaling and, for Qwen3, the head size.
    Raises ModelError for a missing key, an unsupported architecture or an unsupported rotary scaling.
    """
    from transformers import AutoConfig

    check_architecture(file)
    model_type, architecture = ARCHITECTURES[file.architecture]
    values: dict[str, Any] = {}
    for key, ours in _CONFIG_KEYS.items():
        value = file.get(key) if key in _OPTIONAL_KEYS else file.require(key)
        if isinstance(value, list):
            raise ModelError(f"{file.path}: {key} differs from layer to layer, which is not supported")
        if value is not None:
            values[ours] = _positive(file, key, value)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing")
    values["vocab_size"] = embedding.shape[0]
    # Stated, because the defaults of the configuration classes are those of one particular checkpoint.
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    values["rope_parameters"] = _rope_parameters(file, values["head_dim"])
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        values[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    try:
        return AutoConfig.for_model(model_type, architectures=[architecture], **values)
    except Exception as error:  # transformers raises many kinds for a bad configuration; its user needs the one line
        raise ModelError(f"{file.path}: {first_line(error)}") from error


def _positive(file: GGUFFile, key: str, value: Any) -> Any:
    """Return ``value``; raises ModelError when it is not a number above zero."""
    if not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{file.path}: metadata {key} is {str(value)[:40]!r} instead of a number above zero")
    return value


def _rope_parameters(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Rotary parameters in transformers' terms.

    Llama 3's scaling arrives as the tensor ``rope_freqs.weight`` instead, which ``Rotary.load`` applies.
    """
    if file.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path}: rotation of a part of each head is not supported for {file.architecture}")
    theta = float(file.get("rope.freq_base", 10000.0))
    kind = file.get("rope.scaling.type", "none")
    factor = file.get("rope.scaling.factor", file.get("rope.scale_linear"))
    if kind == "none" and factor in (None, 0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
    if kind == "yarn":
        original = int(file.require("rope.scaling.original_context_length"))
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": float(factor),
            "original_max_position_embeddings": original,
        }
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; known are none, linear and yarn")


def tensor_data(file: GGUFFile, tensor: GGUFTensor) -> Any:
    """Open the file at the first byte of ``tensor``; reading, unlike mapping, leaves no pages resident."""
    handle = file.path.open("rb")
    handle.seek(file.data_start + tensor.offset)
    return handle
