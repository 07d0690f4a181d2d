"""Tokenizers, always through transformers; a model without one still runs on token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tenfold.errors import ModelError
from tenfold.models.files import first_line
from tenfold.models.gguf_file import GGUFFile

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def load_tokenizer(path: Path, file: GGUFFile | None = None) -> Any:
    """Return the transformers tokenizer of a model folder or of a GGUF file.

    ``file`` is the parsed header of the GGUF file, when the caller has it already. Raises ModelError, naming the file
    and the reason, when there is no tokenizer or it cannot be read.
    """
    if path.is_dir():
        return _from_folder(path)
    return _from_gguf(path, file or GGUFFile(path))


def _from_folder(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _FILES):
        raise ModelError(f"{folder}: holds no tokenizer (looked for {', '.join(_FILES)})")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a damaged or exotic tokenizer raises, its user needs the one line
        raise ModelError(f"{folder}: its tokenizer cannot be read ({first_line(error)})") from error


def _from_gguf(path: Path, file: GGUFFile) -> Any:
    # Not AutoTokenizer: that reads the model's whole configuration first, to choose this very class.
    from transformers import PreTrainedTokenizerFast

    if "tokenizer.ggml.tokens" not in file.metadata:
        raise ModelError(f"{path}: holds no tokenizer (metadata tokenizer.ggml.tokens is missing)")
    try:
        return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # whatever a damaged or exotic tokenizer raises, its user needs the one line
        raise ModelError(f"{path}: its tokenizer cannot be read ({first_line(error)})") from error
