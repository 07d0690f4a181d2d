"""Weights as a model asks for them: one named tensor at a time, on the target device, in the target dtype.

Tensors stream from the file straight into their final place, so the peak is the weights themselves plus one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tenfold.errors import ModelError
from tenfold.models.files import read_json
from tenfold.models.quantise import Format, Quantised

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_REMAP_BYTES = 64 * 2**20
_PREFIXES = ("model.language_model.", "language_model.model.", "")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


Packing = Callable[[Tensor | Quantised, Tensor | None, bool], Any]
"""Makes what a backend multiplies with of a weight [outputs, inputs], its bias, and whether it is gated."""


class TensorSource(Protocol):
    """A checkpoint on disk: tensors by the checkpoint's own names, with the translation from the models' names.

    Models use the names of Hugging Face causal language models: ``model.layers.0.mlp.up_proj.weight``.
    """

    def names(self) -> Collection[str]:
        """Every tensor of the checkpoint, by the checkpoint's own names."""

    def locate(self, name: str) -> str | None:
        """The checkpoint's own name for what models call ``name``, or None when it has no such tensor."""

    def where(self, own: str) -> Path:
        """The file that holds tensor ``own``, or the one that would when there is none of that name."""

    def shape(self, own: str) -> tuple[int, ...]:
        """The shape of tensor ``own``, outermost dimension first, as torch sees it."""

    def dtype(self, own: str) -> torch.dtype | None:
        """The floating dtype that ``own`` is stored in, or None when it is packed and has to be unpacked to be used."""

    def read_into(self, own: str, out: Tensor) -> None:
        """Fill ``out`` (any device, any floating dtype, the tensor's shape) with tensor ``own``."""

    def format(self, own: str) -> Format | None:
        """The format that ``own`` has in the file, where ``read_quantised`` reads it; None for all other tensors."""

    def read_quantised(self, own: str, out: Quantised) -> None:
        """Fill ``out``, of the tensor's shape and format, with the file's own values and scales."""


class Weights:
    """The tensors of one checkpoint for one model, each taken on ``device`` in ``dtype``."""

    def __init__(
        self,
        source: TensorSource,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        on_read: Callable[[], None] = lambda: None,
        pack: Packing | None = None,
        keep_quantised: bool = False,
    ) -> None:
        """``on_read`` is called once for each tensor read, for a progress bar; ``pack`` is for ``layers.Linear``.

        With ``keep_quantised`` and a ``pack``, matrices that the file itself quantises are packed as they are.
        """
        self.pack = pack
        self.kept: list[str] = []
        """The checkpoint's own names of matrices that are packed as the file has them."""
        self.not_kept: list[str] = []
        """Those of matrices that were to be kept and are of no format that can be, or not of their neighbours'."""
        self._keep_quantised = keep_quantised and pack is not None
        self.source = source
        self.device = torch.device(device)
        self.dtype = dtype
        self._on_read = on_read
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.source.locate(name) is not None

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return tensor ``name``, in ``dtype`` where that is not the dtype of all weights.

        Raises ModelError, naming the file, when it is missing or not of ``shape``.
        """
        return self.stack([name], [shape], dtype)

    def stack(self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype | None = None) -> Tensor:
        """Return several tensors as one, stacked along the first dimension, without ever holding them twice.

        The shapes may differ in the first dimension only. Raises as ``take`` does.
        """
        own_names = [self._check(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True)]
        rows = [shape[0] for shape in shapes]
        out = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype or self.dtype, device=self.device)
        for own, part in zip(own_names, torch.split(out, rows), strict=True):
            self.source.read_into(own, part)
            self._took(own)
        return out

    def quantised(self, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> Quantised | None:
        """Return several matrices as one, stacked as ``stack`` does, in the values and scales of the file itself.

        None where they are not to be kept so, or do not share a format that can be. Raises as ``take`` does.
        """
        if not self._keep_quantised:
            return None
        own_names = [self._check(name, shape) for name, shape in zip(names, shapes, strict=True)]
        formats = {self.source.format(own) for own in own_names}
        format = formats.pop()
        if formats or format is None:
            self.not_kept += own_names
            return None
        rows = [shape[0] for shape in shapes]
        out = Quantised.empty(format, sum(rows), shapes[0][1])
        for own, part in zip(own_names, out.split(rows), strict=True):
            self.source.read_quantised(own, part)
            self._took(own)
        self.kept += own_names
        return out

    def ignore(self, name: str) -> None:
        """Declare that the model deliberately does without ``name``, which the checkpoint may or may not hold."""
        own = self.source.locate(name)
        if own is not None:
            self._taken.add(own)

    def unused(self) -> list[str]:
        """The checkpoint's own names of the tensors that nobody took, sorted."""
        return sorted(name for name in self.source.names() if name not in self._taken)

    def _took(self, own: str) -> None:
        """Note that ``own`` was read; a tied embedding may be read once for look-up and once as the head."""
        if own not in self._taken:
            self._taken.add(own)
            self._on_read()

    def _check(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the checkpoint's name for ``name`` once it is known to exist in the expected shape."""
        own = self.source.locate(name)
        if own is None:
            raise ModelError(f"{self.source.where(name)}: tensor {name!r} of shape {list(shape)} is missing")
        found = self.source.shape(own)
        if found != shape:
            raise ModelError(
                f"{self.source.where(own)}: tensor {own!r} has shape {list(found)}, but the configuration asks for "
                f"{list(shape)}"
            )
        return own


class SafetensorsSource:
    """A safetensors checkpoint: ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists."""

    def __init__(self, folder: Path) -> None:
        """Read all headers. Raises ModelError for a missing or damaged file, or for a pickled checkpoint."""
        self.folder = folder
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._open: dict[Path, Any] = {}
        self._mapped_bytes = 0
        for file in _safetensors_files(folder):
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle, not a dictionary
                part = handle.get_slice(name)
                self._files[name] = file
                self._shapes[name] = tuple(part.get_shape())
                self._dtypes[name] = part.get_dtype()

    def names(self) -> Collection[str]:
        """Every tensor but the rotary frequencies that old checkpoints store and nobody reads."""
        return [name for name in self._files if not name.endswith("rotary_emb.inv_freq")]

    def locate(self, name: str) -> str | None:
        """Accept checkpoints that carry, omit or nest the ``model.`` prefix."""
        if name in self._files:
            return name
        if not name.startswith("model."):
            return None
        rest = name.removeprefix("model.")
        return next((prefix + rest for prefix in _PREFIXES if prefix + rest in self._files), None)

    def where(self, own: str) -> Path:
        """The file of a tensor; the folder when no file has it."""
        return self._files.get(own, self.folder)

    def shape(self, own: str) -> tuple[int, ...]:
        """As the file's header states it."""
        return self._shapes[own]

    def dtype(self, own: str) -> torch.dtype | None:
        """As the file's header states it."""
        return _DTYPES.get(self._dtypes[own])

    def read_into(self, own: str, out: Tensor) -> None:
        """Copy out of the memory map. Raises ModelError for a dtype that is not a plain floating one."""
        file = self._files[own]
        if self.dtype(own) is None:
            raise ModelError(f"{file}: tensor {own!r} has dtype {self._dtypes[own]}; quantised checkpoints of this "
                             "kind are not supported")  # fmt: skip
        # A map's pages stay resident until it is closed: reopening now and then keeps the peak near the final weights.
        if self._mapped_bytes > _REMAP_BYTES:
            self._open.clear()
            self._mapped_bytes = 0
        tensor = self._handle(file).get_tensor(own)
        self._mapped_bytes += tensor.nbytes
        out.copy_(tensor)

    def format(self, own: str) -> None:
        """None: quantised safetensors are not supported."""

    def read_quantised(self, own: str, out: Quantised) -> None:
        """Never called, because no tensor has a format."""
        raise NotImplementedError

    def _handle(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: not a readable safetensors file, perhaps cut short ({error})") from error
        return self._open[file]


def _safetensors_files(folder: Path) -> Iterable[Path]:
    """The files of the checkpoint in ``folder``; raises ModelError when a listed one is missing or there is none."""
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index}: holds no 'weight_map' from tensor names to file names")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if file.parent != folder or not file.is_file():
                raise ModelError(f"{file}: missing, although {INDEX_NAME} lists it")
        return files
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    pickled = next((file for pattern in _PICKLED for file in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise ModelError(
            f"{pickled}: pickled weights are not read, because unpickling runs code; convert the model to safetensors"
        )
    raise ModelError(f"{folder}: holds neither {SINGLE_NAME} nor {INDEX_NAME}")
