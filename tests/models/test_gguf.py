"""GGUF files written with the gguf package, read back, and compared with transformers on the unpacked weights."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from support.gguf_files import write_blocks, write_gguf
from tenfold.errors import ModelError
from tenfold.models.gguf import GGUFSource, gguf_config
from tenfold.models.gguf_file import GGUFFile
from tenfold.models.loader import choose_dtype, load_model

CPU = torch.device("cpu")


@pytest.fixture
def tiny(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_llama_packed_as(kind, tiny, make_reference, assert_same_logits):
    reference = make_reference("LlamaForCausalLM")
    loaded = load_model(write_gguf(tiny, reference, kind), dtype="float32", progress=False)
    assert_same_logits(loaded, reference)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", {"attention_bias": True}),
        ("LlamaForCausalLM", {"num_key_value_heads": 4}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"head_dim": 16}),
        ("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_families(architecture, changes, tiny, make_reference, assert_same_logits, caplog):
    reference = make_reference(architecture, **changes)
    loaded = load_model(write_gguf(tiny, reference), progress=False)
    assert_same_logits(loaded, reference)
    assert loaded.dtype == torch.float32
    assert loaded.eos_token_ids == {2, 5}
    assert (loaded.name, loaded.vocab_size, loaded.max_context) == ("tiny", 64, 128)
    assert not caplog.records


def test_llama_3_scaling_arrives_as_a_tensor(tiny, make_reference, assert_same_logits, caplog):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    reference = make_reference("LlamaForCausalLM", rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference.config)
    divisors = 1.0 / (1e4 ** (torch.arange(0, 8, 2) / 8)) / scaled
    assert divisors.max() > 2
    extra = lambda writer: writer.add_tensor("rope_freqs.weight", divisors.numpy())  # noqa: E731
    assert_same_logits(load_model(write_gguf(tiny, reference, extra=extra), progress=False), reference)
    assert not caplog.records


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_in_the_metadata(kind, tiny, make_reference, assert_same_logits):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 32
    reference = make_reference("Qwen3ForCausalLM", head_dim=16, rope_parameters=rope)

    def extra(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    assert_same_logits(load_model(write_gguf(tiny, reference, extra=extra), progress=False), reference)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS])
def test_blocks_that_python_cannot_pack(kind, tiny):
    """Random bytes are a valid packing: reading in pieces must agree with unpacking the whole at once."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = max(block, 256)
    packed = np.random.default_rng(3).integers(0, 100, (40, columns // block * size), dtype=np.uint8)
    write_blocks(tiny, packed, kind)
    source = GGUFSource(GGUFFile(tiny))
    name = source.locate("model.layers.0.mlp.up_proj.weight")
    out = torch.empty(source.shape(name))
    source.read_into(name, out)
    assert torch.equal(out, torch.from_numpy(quants.dequantize(packed, kind).copy()))


def test_pieces(tiny, make_reference, assert_same_logits, monkeypatch):
    monkeypatch.setattr("tenfold.models.gguf._PIECE_ELEMENTS", 100)
    reference = make_reference("LlamaForCausalLM", attention_bias=True)
    assert_same_logits(load_model(write_gguf(tiny, reference), progress=False), reference)


def test_dtype_choice(tiny, make_reference, monkeypatch):
    write_gguf(tiny, make_reference("LlamaForCausalLM"), Kind.Q8_0)
    source = GGUFSource(GGUFFile(tiny))
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("tenfold.models.loader._cpu_computes_bfloat16", lambda native=native: native)
        assert choose_dtype("auto", source, CPU) == expected
        assert choose_dtype("auto", source, torch.device("cuda")) == torch.bfloat16


def test_header_agrees_with_the_gguf_package(tiny, make_reference):
    write_gguf(tiny, make_reference("Qwen3ForCausalLM", head_dim=16), Kind.Q4_0)
    ours, theirs = GGUFFile(tiny), gguf.GGUFReader(tiny)
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert {t.name: ours.data_start + t.offset for t in ours.tensors.values()} == {
        t.name: t.data_offset for t in theirs.tensors
    }


def test_truncated_anywhere(tiny, make_reference):
    whole = write_gguf(tiny, make_reference("LlamaForCausalLM")).read_bytes()
    for keep in [0, 3, 10, 23, 24, 100, *range(200, len(whole) - 1, 997), len(whole) - 1]:
        tiny.write_bytes(whole[:keep])
        with pytest.raises(ModelError, match=r"tiny\.gguf: (not a readable GGUF file|cut short|cannot be read)"):
            load_model(tiny, progress=False)


def test_damaged_header_is_a_model_error_or_harmless(tiny, make_reference):
    """Any byte of the header may be wrong: no error but ModelError, and no endless loop or huge allocation."""
    whole = bytearray(write_gguf(tiny, make_reference("LlamaForCausalLM")).read_bytes())
    header = GGUFFile(tiny).data_start
    for place in range(0, header, 13):
        damaged = whole.copy()
        damaged[place] ^= 0xFF
        tiny.write_bytes(damaged)
        try:
            gguf_config(GGUFFile(tiny))
        except ModelError as error:
            assert str(tiny) in str(error)


def test_refusals(tiny, make_reference):
    reference = make_reference("LlamaForCausalLM")
    cases = {
        "mixtures of experts": lambda writer: writer.add_expert_count(8),
        "one of several shards": lambda writer: writer.add_uint16("split.count", 3),
        "rope scaling 'longrope'": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "rotation of a part of each head": lambda writer: writer.add_rope_dimension_count(4),
    }
    for message, extra in cases.items():
        with pytest.raises(ModelError, match=message):
            load_model(write_gguf(tiny, reference, extra=extra), progress=False)


def test_unknown_architecture(tiny):
    writer = gguf.GGUFWriter(tiny, "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="GGUF architecture 'falcon' is not supported; known are llama, qwen2, qwen3"):
        load_model(tiny, progress=False)


def test_not_gguf_at_all(tiny):
    tiny.write_bytes(b"<html>not found</html>" * 10)
    with pytest.raises(ModelError, match="does not start with the letters GGUF"):
        load_model(tiny, progress=False)
    tiny.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    with pytest.raises(ModelError, match="GGUF version 50331648 is not supported"):
        load_model(tiny, progress=False)
