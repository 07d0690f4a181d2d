"""The header of a GGUF file: its metadata and where its tensors lie. Standard library only.

The gguf package has a reader too; it takes seconds for a vocabulary of ordinary size, because it wraps every string
in an array, where this one takes tenths of a second. It also says plainly what is wrong with a damaged file.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenfold.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SUPPORTED_VERSIONS = (2, 3)


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies: ``shape`` outermost dimension first, ``kind`` the number of its ggml type.

    ``offset`` counts bytes from the start of the tensor data, ``size`` is in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


class GGUFFile:
    """The parsed header of one file; tensor data is left on disk."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises ModelError for a file that is not GGUF, is cut short, or is one of several shards."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._parse(_Cursor(data))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
        except (struct.error, TypeError, ValueError, RecursionError) as error:
            raise ModelError(f"{path}: not a readable GGUF file, perhaps cut short or damaged ({error})") from error

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the model's family, such as "llama" or "qwen3"."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata ``key`` of the file's own architecture, such as ``block_count`` for ``llama.block_count``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """As ``get``, but raises ModelError when the key is absent."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: metadata {self.architecture}.{key} is missing")
        return value

    def _parse(self, cursor: _Cursor) -> None:
        if cursor.take(4) != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file, it does not start with the letters GGUF")
        version = cursor.scalar("I")
        if version not in _SUPPORTED_VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not supported; known are 2 and 3, little-endian")
        tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(key_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        if int(self.metadata.get("split.count", 1)) > 1:
            raise ModelError(f"{self.path}: one of several shards; join them with llama-gguf-split --merge")
        entries = [self._tensor(cursor) for _ in range(tensor_count)]
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-cursor.position // alignment) * alignment
        for entry in entries:
            end = start + entry.offset + entry.size
            if end > len(cursor.data):
                raise ModelError(
                    f"{self.path}: cut short: tensor {entry.name!r} ends at byte {end:,} and the file at "
                    f"{len(cursor.data):,}; fetch it again"
                )
        self.data_start = start
        self.tensors = {entry.name: entry for entry in entries}

    def _tensor(self, cursor: _Cursor) -> GGUFTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = cursor.string()
        dimensions = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        kind, offset = cursor.scalar("I"), cursor.scalar("Q")
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ModelError(f"{self.path}: tensor {name!r} has ggml type {kind}, which is not known here") from None
        if dimensions and dimensions[0] % block:
            raise ValueError(
                f"rows of {dimensions[0]} elements in tensor {name!r} do not divide into blocks of {block}"
            )
        # ggml lists the innermost dimension first
        return GGUFTensor(name, tuple(reversed(dimensions)), kind, offset, math.prod(dimensions) // block * size)


class _Cursor:
    """Reads little-endian values one after the other, never beyond the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise ValueError(f"the header continues past the end at byte {len(self.data):,}")
        found = self.data[self.position : end]
        self.position = end
        return found

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"metadata of unknown type {kind}")
        element, count = self.scalar("I"), self.scalar("Q")
        if element in _SCALARS:
            code = _SCALARS[element]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        return [self.value(element) for _ in range(count)]
