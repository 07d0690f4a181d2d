"""From a path, a known name or a hub id to a model that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tenfold.errors import ModelError
from tenfold.models import family
from tenfold.models.base import Model
from tenfold.models.files import first_line, read_json
from tenfold.models.gguf import GGUFSource, gguf_config
from tenfold.models.gguf_file import GGUFFile
from tenfold.models.hub import resolve
from tenfold.models.layers import EMBEDDING
from tenfold.models.tokenizer import load_tokenizer
from tenfold.models.weights import Packing, SafetensorsSource, TensorSource, Weights

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The compute dtypes, by the names that users give them."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with everything that is known about it."""

    model: Model
    config: Any
    """transformers configuration of the language model (of the text part, where there are others)."""
    tokenizer: Any
    """transformers tokenizer, or None: then ``tokenizer_error`` says why."""
    tokenizer_error: str | None
    name: str
    path: Path
    """The model's folder, or its GGUF file."""
    dtype: torch.dtype
    vocab_size: int
    """Rows of the head; a tokenizer may know fewer tokens."""
    max_context: int
    """Tokens of the longest sequence that the positions allow."""
    eos_token_ids: frozenset[int]
    """Tokens that end a text, from the generation configuration, the configuration and the tokenizer."""
    packed: bool = False
    """The weights were packed for a backend that runs recorded forward passes."""

    def require_tokenizer(self) -> Any:
        """Return the tokenizer. Raises ModelError with the reason when there is none."""
        if self.tokenizer is None:
            raise ModelError(self.tokenizer_error or f"{self.path}: holds no tokenizer")
        return self.tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, before its weights are read."""

    path: Path
    architecture: str
    config: Any
    source: TensorSource
    file: GGUFFile | None
    """The header, when the model is a GGUF file."""
    stop_ids: frozenset[int]
    """Tokens that end a text, as far as the checkpoint itself says."""


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    progress: bool = True,
    packing: Callable[[Any, torch.dtype], Packing | None] = lambda config, dtype: None,
    keep_quantised: bool = False,
) -> LoadedModel:
    """Find the model that ``source`` names, fetching it if need be, and read its weights onto ``device``.

    ``dtype`` is the compute dtype: "float32", "bfloat16", "float16", a torch dtype, or "auto" (see ``choose_dtype``).
    ``packing``, given the configuration and the chosen dtype, decides what weights are packed by, if they are. With
    ``keep_quantised`` it gets the matrices of a GGUF file that are in Q8_0, Q4_0 or Q4_1 as the file has them.
    Progress bars go to standard error. Raises ModelError with one line naming the file and the reason.
    """
    path = resolve(source, progress=progress)
    checkpoint = open_checkpoint(path)
    if keep_quantised and checkpoint.file is None:
        raise ModelError(
            f"{path}: only GGUF files hold quantised weights that can be kept (quantize 'gguf'); this is a folder of "
            "safetensors"
        )
    chosen_family = family(checkpoint.architecture)
    chosen_family.check(checkpoint.config)
    device = torch.device(device)
    chosen = choose_dtype(dtype, checkpoint.source, device)
    pack = packing(checkpoint.config, chosen)
    name = _display_name(source, path)
    tensors = checkpoint.source
    with tqdm(total=len(tensors.names()), desc=f"Loading {name}", unit=" tensors", disable=not progress) as bar:
        weights = Weights(tensors, device, chosen, lambda: _advance(bar), pack, keep_quantised)
        model = chosen_family(checkpoint.config, weights)
        unused = weights.unused()
        bar.update(bar.total - bar.n)
    if unused:
        logger.warning("%s: %d tensors are not used, among them %s", path, len(unused), ", ".join(unused[:3]))
    if keep_quantised:
        _report_kept(path, weights)
    tokenizer, tokenizer_error = None, None
    try:
        tokenizer = load_tokenizer(path, checkpoint.file)
    except ModelError as error:
        tokenizer_error = str(error)
    stop_ids = checkpoint.stop_ids | _ids(getattr(tokenizer, "eos_token_id", None))
    return LoadedModel(
        model=model,
        config=checkpoint.config,
        tokenizer=tokenizer,
        tokenizer_error=tokenizer_error,
        name=name,
        path=path,
        dtype=chosen,
        vocab_size=int(checkpoint.config.vocab_size),
        max_context=int(checkpoint.config.max_position_embeddings),
        eos_token_ids=stop_ids,
        packed=pack is not None,
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the configuration and the headers of the weights in ``path``, a folder or a GGUF file.

    Raises ModelError for anything missing, damaged or of an unknown architecture.
    """
    if path.is_dir():
        return _open_folder(path)
    file = GGUFFile(path)
    config = gguf_config(file)
    ends = ("eos_token_id", "eot_token_id", "eom_token_id")
    stop_ids = frozenset().union(*(_ids(file.metadata.get(f"tokenizer.ggml.{end}")) for end in ends))
    return Checkpoint(path, config.architectures[0], config, GGUFSource(file), file, stop_ids)


def choose_dtype(requested: str | torch.dtype, source: TensorSource, device: torch.device) -> torch.dtype:
    """Return the compute dtype; raises ModelError for a name that is not in DTYPES.

    "auto" keeps the dtype the checkpoint is stored in, with two exceptions. Packed (quantised) weights become bfloat16
    where the device computes in it natively, and float32 elsewhere. On a CPU, where float16 is slow and overflows,
    float16 weights become float32, which holds them exactly.
    """
    if isinstance(requested, torch.dtype):
        requested = str(requested).removeprefix("torch.")
    if requested in DTYPES:
        return DTYPES[requested]
    if requested != "auto":
        raise ModelError(f"dtype {requested!r} is not supported; known are auto, {', '.join(DTYPES)}")
    own = source.locate(EMBEDDING)
    if own is None:
        raise ModelError(f"{source.where(EMBEDDING)}: tensor {EMBEDDING!r} is missing")
    stored = source.dtype(own)
    if stored is None:
        return torch.bfloat16 if device.type != "cpu" or _cpu_computes_bfloat16() else torch.float32
    if stored == torch.float64 or (stored == torch.float16 and device.type == "cpu"):
        return torch.float32
    return stored


def _cpu_computes_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself; torch emulates it slowly elsewhere."""
    # Private names, absent from some versions of torch and some processors.
    supports = (getattr(torch.cpu, f"_is_{unit}_supported", None) for unit in ("avx512_bf16", "amx_tile"))
    return any(check() for check in supports if check is not None)


def _open_folder(folder: Path) -> Checkpoint:
    """Read a Hugging Face model folder."""
    from transformers import AutoConfig

    stated = read_json(folder / "config.json")
    architectures = stated.get("architectures") or [None]
    architecture = architectures[0]
    if not isinstance(architecture, str):
        raise ModelError(f"{folder / 'config.json'}: names no architecture")
    family(architecture)
    quantization = stated.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(f"{folder / 'config.json'}: weights quantised with {method!r} are not supported")
    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a bad configuration; its user needs the one line
        raise ModelError(f"{folder / 'config.json'}: {first_line(error)}") from error
    config = whole.get_text_config()
    # The head belongs to the whole model, so its configuration decides whether the head is tied.
    config.tie_word_embeddings = stated.get("tie_word_embeddings", config.tie_word_embeddings)
    # Only what the files state: configuration classes fill in the ids of one particular checkpoint.
    text = stated.get("text_config")
    stop_ids = _ids(stated.get("eos_token_id")) | _ids(text.get("eos_token_id") if isinstance(text, dict) else None)
    generation = folder / "generation_config.json"
    if generation.is_file():
        stop_ids |= _ids(read_json(generation).get("eos_token_id"))
    return Checkpoint(folder, architecture, config, SafetensorsSource(folder), None, stop_ids)


def _report_kept(path: Path, weights: Weights) -> None:
    """Say how many matrices are kept quantised; a warning where some are not, since they take more memory and time."""
    kept, others = len(weights.kept), weights.not_kept
    if others:
        logger.warning(
            "%s: %d weights are kept as the file quantises them, %d are not and become %s, among them %s",
            path, kept, len(others), str(weights.dtype).removeprefix("torch."), ", ".join(others[:3])
        )  # fmt: skip
    else:
        logger.info("%s: all %d weights are kept as the file quantises them", path, kept)


def _ids(stated: Any) -> frozenset[int]:
    """A token id, a list of them or nothing, as a set."""
    if stated is None:
        return frozenset()
    return frozenset(stated) if isinstance(stated, list | tuple) else frozenset([int(stated)])


def _display_name(source: str | Path, path: Path) -> str:
    """What the user asked for when that is a name; the name of the folder or file when it is a path."""
    text = str(source)
    if Path(text).expanduser().exists():
        return path.resolve().stem if path.is_file() else path.resolve().name
    return text


def _advance(bar: Any) -> None:
    bar.update(1)
