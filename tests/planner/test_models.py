"""What a model is called, where its configuration is found and how its parameters are counted."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tenfold.core import ModelSpec
from tenfold.errors import ModelError
from tenfold.planner import describe, known_names

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA_PARAMETERS = 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 2 * 8) + 8 + 2 * 10 * 8


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """The header of a file; nobody reads further."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    header |= {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed)


def test_known_models() -> None:
    assert known_names() == ["qwen3.8-27b", "smollm2-135m-instruct"]
    assert describe("qwen3.8-27b").parameters == 26_895_998_464
    assert describe("smollm2-135m-instruct").parameters == 134_515_008


def test_a_configuration_file_and_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "small" / "config.json", LLAMA)
    for source in (file, file.parent):
        found = describe(str(source))
        assert (found.name, found.parameters) == ("small", LLAMA_PARAMETERS)
        assert found.counted == "counted from the configuration"


def test_the_text_part_of_a_multimodal_configuration(tmp_path: Path) -> None:
    text = dict(describe("qwen3.8-27b").config)
    tied = text.pop("tie_word_embeddings")
    nested = {"model_type": "qwen3_5", "vision_config": {}, "tie_word_embeddings": tied, "text_config": text}
    found = describe(str(write(tmp_path / "config.json", nested)))
    assert found.parameters == 26_895_998_464
    assert ModelSpec.from_config(found.config).state_bytes == 153_944_064


def test_parameters_come_from_the_files_where_there_are_some(tmp_path: Path) -> None:
    write(tmp_path / "config.json", LLAMA)
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": [3, 4], "model.visual.b": [100]})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": [5], "mtp.d": [100], "e": []})
    write_safetensors(tmp_path / "consolidated.safetensors", {"a": [3, 4]})
    found = describe(str(tmp_path))
    assert found.parameters == 3 * 4 + 5 + 1
    assert found.counted == "counted in the headers of its safetensors files"


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"[{}]", struct.pack("<Q", 90) + b"{"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "config.json", LLAMA)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        describe(str(tmp_path))


def test_an_unknown_family_has_no_count(tmp_path: Path) -> None:
    found = describe(str(write(tmp_path / "config.json", LLAMA | {"model_type": "new"})))
    assert found.parameters is None


def test_a_gguf_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(2)
    writer.add_embedding_length(8)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_context_length(64)
    writer.add_tensor("token_embd.weight", numpy.zeros((10, 8), dtype=numpy.float32))
    writer.add_tensor("output_norm.weight", numpy.zeros(8, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for source in (path, tmp_path):
        found = describe(str(source))
        assert (found.name, found.parameters) == ("tiny", 88)
        spec = ModelSpec.from_config(found.config)
        assert (spec.kv_bytes_per_token, spec.max_context) == (2 * 2 * 2 * 16 * 2, 64)


def test_a_model_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--name"
    write(folder / "snapshots" / "abc" / "config.json", LLAMA)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    found = describe("owner/name")
    assert (found.name, found.parameters) == ("owner/name", LLAMA_PARAMETERS)
    with pytest.raises(ModelError, match=r"'owner/other' is no file or folder here, no model in the hub's cache"):
        describe("owner/other")


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "config.json").write_text("[]")
    for source, message in (
        ("nothing", "none of the names: qwen3.8-27b, smollm2-135m-instruct"),
        ("../../etc/nothing", "is no file or folder"),
        ("a b/c d", "is no file or folder"),
        (str(tmp_path / "notes.txt"), "a model is a folder, a config.json or a .gguf file"),
        (str(tmp_path / "config.json"), "holds a JSON list"),
    ):
        with pytest.raises(ModelError, match=message):
            describe(source)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"holds no config\.json$"):
        describe(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"several \.gguf files: name one"):
        describe(str(tmp_path))
