"""GGUF files whose own quantisation is kept: values and scales to the bit, and the logits that come of them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from support.gguf_files import write_blocks, write_gguf
from support.programs import needs_compiler
from tenfold.assembly import assemble
from tenfold.errors import ModelError
from tenfold.models.gguf import GGUFSource
from tenfold.models.gguf_file import GGUFFile
from tenfold.models.layers import Linear
from tenfold.models.loader import load_model
from tenfold.models.quantise import Format, Quantised, dequantise
from tenfold.models.weights import Weights
from tenfold.runtime.kernels import packing

FORMATS = {Kind.Q8_0: Format.INT8_GROUPS, Kind.Q4_0: Format.INT4_GROUPS, Kind.Q4_1: Format.INT4_GROUPS}
WIDTH, INNER, KV, VOCABULARY = 64, 96, 32, 64
TOKENS = [3, 17, 5, 60, 2, 2, 41, 9, 33, 0, 12]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.fixture
def make(make_reference):
    """A function that makes a model whose heads the compiled kernels take."""
    return lambda architecture="LlamaForCausalLM", **changes: make_reference(architecture, hidden_size=WIDTH, **changes)


def keeping(path) -> Weights:
    """The weights of a file, to be kept by a packing that leaves them as they come."""
    return Weights(GGUFSource(GGUFFile(path)), pack=lambda weight, bias, gated: weight, keep_quantised=True)


def load(path, dtype="float32"):
    choose = lambda config, dtype: packing(config, dtype, torch.device("cpu"), 16, quantize="gguf")  # noqa: E731
    return load_model(path, dtype=dtype, progress=False, packing=choose, keep_quantised=True)


@pytest.mark.parametrize("kind", FORMATS)
def test_stacked_and_permuted(kind, path, make, monkeypatch):
    """The gguf package's own values, in the order of transformers' rows, read a row or two at a time."""
    monkeypatch.setattr("tenfold.models.gguf._PIECE_ELEMENTS", 100)
    reference = make()
    weights = keeping(write_gguf(path, reference, kind))
    prefix = "model.layers.1.self_attn"
    linear = Linear.load(weights, [f"{prefix}.{part}_proj" for part in "qkv"], WIDTH, [WIDTH, KV, KV], bias=False)
    assert linear.packed.format == FORMATS[kind]
    attention = reference.model.layers[1].self_attn
    expected = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(dequantise(linear.packed), expected)
    assert weights.kept == [f"blk.1.attn_{part}.weight" for part in "qkv"]


@pytest.mark.parametrize("kind", FORMATS)
def test_any_block(kind, path):
    """Whatever the bytes are, with scales from subnormal to the largest, of both signs."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(3).integers(0, 256, (40, 3, size), dtype=np.uint8)
    for high in (1, 3) if kind == Kind.Q4_1 else (1,):
        packed[..., high] = np.where(packed[..., high] & 0x7C == 0x7C, 0, packed[..., high])  # neither inf nor NaN
    packed = packed.reshape(40, 3 * size)
    write_blocks(path, packed, kind)
    found = keeping(path).quantised(["model.layers.0.mlp.up_proj.weight"], [(40, 3 * block)])
    assert found.values.max() <= (255 if kind == Kind.Q8_0 else 15)
    assert torch.equal(dequantise(found), torch.from_numpy(quants.dequantize(packed, kind)))


def test_parts_of_a_quantised_weight():
    whole = Quantised.empty(Format.INT4_GROUPS, 5, 64)
    whole.values.zero_(), whole.scales.zero_(), whole.least.zero_()
    first, second = whole.split([2, 3])
    second.values.fill_(7), second.scales.fill_(2.0), second.least.fill_(-1.0)
    assert (dequantise(whole)[2:] == 13).all() and (dequantise(first) == 0).all()
    assert Quantised.empty(Format.INT8, 5, 64).scales.shape == (5, 1)


@needs_compiler
@pytest.mark.parametrize(
    ("architecture", "kind", "changes"),
    [
        ("LlamaForCausalLM", Kind.Q8_0, {}),
        ("LlamaForCausalLM", Kind.Q4_0, {"attention_bias": True}),
        ("LlamaForCausalLM", Kind.Q4_1, {"tie_word_embeddings": True}),
        ("Qwen2ForCausalLM", Kind.Q4_1, {}),
        ("Qwen3ForCausalLM", Kind.Q8_0, {"head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_logits(architecture, kind, changes, path, make, caplog):
    """Those of transformers on the unpacked weights, with activations rounded to a byte as the kernels do."""
    reference = make(architecture, **changes)
    tied = bool(changes.get("tie_word_embeddings"))
    with caplog.at_level(logging.INFO):
        loaded = load(write_gguf(path, reference, kind))
    head = loaded.model.head.packed
    assert (head.format, head.outputs) == (FORMATS[kind], VOCABULARY)
    assert f"all {14 + 1} weights are kept as the file quantises them" in caplog.text
    assert loaded.model.embedding.weight.dtype == torch.float32
    assert tied == ("output.weight" not in GGUFFile(path).tensors)
    assert_close(loaded, reference)


@needs_compiler
def test_mixed_types(path, make, caplog):
    """What cannot be kept, or not beside what it is stacked with, is unpacked, and counted in one line."""
    others = {"layers.1.self_attn.v_proj": Kind.Q8_0, "layers.0.mlp.down": Kind.F16, "lm_head": Kind.Q5_1}
    reference = make()
    with caplog.at_level(logging.INFO):
        loaded = load(write_gguf(path, reference, Kind.Q4_0, others=others))
    layers = loaded.model.layers
    assert layers[0].attention.qkv.packed.format == Format.INT4_GROUPS
    assert layers[1].attention.qkv.packed.format == Format.FLOAT
    assert layers[0].mlp.down.packed.format == loaded.model.head.packed.format == Format.FLOAT
    (record,) = (record for record in caplog.records if record.name.startswith("tenfold"))
    assert record.levelname == "WARNING"
    assert record.getMessage().endswith(
        "tiny.gguf: 10 weights are kept as the file quantises them, 5 are not and become float32, among them "
        "blk.0.ffn_down.weight, blk.1.attn_q.weight, blk.1.attn_k.weight"
    )
    unpacked = [f"layers.1.self_attn.{part}_proj" for part in "qkv"] + ["layers.0.mlp.down_proj", "lm_head"]
    assert_close(loaded, reference, unpacked=unpacked)


@needs_compiler
def test_formats_of_one_kind_are_stacked(path, make):
    """Q4_0 and Q4_1 differ in how the file states the least value, and not once it is read."""
    reference = make()
    loaded = load(write_gguf(path, reference, Kind.Q4_1, others={"up_proj": Kind.Q4_0}), "bfloat16")
    assert {layer.mlp.gate_up.packed.format for layer in loaded.model.layers} == {Format.INT4_GROUPS}
    assert_close(loaded, reference, tolerance=0.05)  # in bfloat16


def assert_close(loaded, reference, tolerance=0.015, unpacked=()) -> None:
    """The logits of the packed model are those of transformers whose products, but for ``unpacked``, round alike.

    All but the last digits, mostly; but then those may turn a rounded activation over, which is worth a hundredth.
    """
    from tenfold.core import CacheSpec, ModelSpec
    from tenfold.runtime.batch import Batch, Draws
    from tenfold.runtime.memory import ArenaMemory
    from tenfold.runtime.program import Program

    model = ModelSpec.from_config(loaded.config.to_dict(), element_bytes=loaded.dtype.itemsize)
    memory = ArenaMemory(CacheSpec(16, 4, 0, 16 * model.kv_bytes_per_token), model, loaded.dtype, torch.device("cpu"))
    program = Program(memory, loaded.dtype)
    loaded.model.record(program)
    count = len(TOKENS)
    one = np.array([0], dtype=np.int64)
    every = torch.arange(count)
    batch = Batch(
        token_ids=torch.tensor(TOKENS), positions=every, places=every, sampled=every, rows=one, slots=one, starts=one,
        contexts=one + count, bounds=np.array([0, count], dtype=np.int64), tables=np.zeros((1, 1), dtype=np.int32),
        drawn=Draws([], [], []),
    )  # fmt: skip
    found = program.forward(batch)
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(tuple(unpacked)):
            module.register_forward_pre_hook(lambda module, given: in_bytes(given[0]))
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    assert float((found - expected).norm() / expected.norm()) < tolerance


def in_bytes(x):
    """Activations as products of quantised weights round them: to signed bytes, with a scale for every 32."""
    groups = x.unflatten(-1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scales).round() * scales).flatten(-2)


def test_without_keeping_it_is_unpacked(path, make):
    weights = Weights(GGUFSource(GGUFFile(write_gguf(path, make(), Kind.Q8_0))), keep_quantised=True)
    assert weights.quantised(["model.layers.0.mlp.up_proj.weight"], [(INNER, WIDTH)]) is None  # nothing packs it
    assert weights.not_kept == []
    with pytest.raises(TypeError, match="has to be packed"):
        Linear(Quantised.empty(Format.INT8, 2, 4))


def test_misshapen(path, make):
    weights = keeping(write_gguf(path, make(), Kind.Q8_0))
    with pytest.raises(ModelError, match=r"'blk.0.ffn_up.weight' has shape \[96, 64\], but .* asks for \[64, 96\]"):
        weights.quantised(["model.layers.0.mlp.up_proj.weight"], [(WIDTH, INNER)])


def test_cut_short_while_read(path, make):
    weights = keeping(write_gguf(path, make(), Kind.Q8_0))
    path.write_bytes(path.read_bytes()[: weights.source.file.data_start + 40])
    with pytest.raises(ModelError, match=r"tiny\.gguf: cut short while it was read, at tensor 'blk.0.ffn_up.weight'"):
        weights.quantised(["model.layers.0.mlp.up_proj.weight"], [(INNER, WIDTH)])


def test_safetensors_are_refused(make, save):
    folder = save(make())
    with pytest.raises(
        ModelError, match=r"tiny: only GGUF files hold .* \(quantize 'gguf'\); .* of safetensors"
    ) as bad:
        assemble(folder, quantize="gguf", progress=False)
    assert "\n" not in str(bad.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int2"}, "quantize must be one of int8, int8-groups, int4, gguf, not 'int2'"),
        ({"quantize": "gguf", "kernels": "reference"}, "quantised weights need the native kernels"),
        ({"quantize": "gguf", "block_size": 8}, "the native kernels cannot run this model: blocks must have"),
    ],
)
def test_what_cannot_be_had(options, message, path, make):
    with pytest.raises(ModelError, match=message):
        assemble(write_gguf(path, make(), Kind.Q8_0), progress=False, **options)


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of peak memory")
def test_peak_memory_is_about_the_packed_weights(tmp_path):
    """8 weights of 8 million values: 48 MB packed, 67 MB with one of them as bytes beside it; 134 MB in bfloat16."""
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    writer.add_block_count(8)
    blocks = np.ones((2048, 4096 // 32 * 18), dtype=np.uint8)
    for layer in range(8):
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", blocks, raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code = """if True:
        import pathlib, re, sys, torch
        from tenfold.models.gguf import GGUFSource
        from tenfold.models.gguf_file import GGUFFile
        from tenfold.models.layers import Linear
        from tenfold.models.weights import Weights
        from tenfold.runtime.kernels import native
        native.library()
        pack = lambda weight, bias, gated: native.pack_quantised(weight, bias, gated=gated)
        weights = Weights(GGUFSource(GGUFFile(pathlib.Path(sys.argv[1]))), pack=pack, keep_quantised=True)
        status = pathlib.Path("/proc/self/status")
        peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) / 1000
        before = peak()
        names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(8)]
        kept = [Linear.load(weights, [name], 4096, [2048], bias=False) for name in names]
        print(peak() - before, sum(each.packed.nbytes for each in kept) / 1e6)
    """
    arguments = [sys.executable, "-c", code, tmp_path / "large.gguf"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    peak, packed = map(float, done.stdout.split())
    assert 45 < packed < 55
    assert peak < packed + 40
