"""Safetensors checkpoints: names, shapes, damage, and what the loader says about each."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tenfold.errors import ModelError
from tenfold.models.loader import choose_dtype, load_model
from tenfold.models.weights import SafetensorsSource, Weights


@pytest.fixture
def folder(make_reference, save):
    return save(make_reference("LlamaForCausalLM"))


def rewrite(folder, change):
    """Apply ``change`` to the dictionary of all tensors of a single-file checkpoint."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors) or tensors, file, metadata={"format": "pt"})


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_other_prefixes(prefix, folder, make_reference, assert_same_logits):
    rewrite(folder, lambda old: {name.replace("model.", prefix, 1): tensor for name, tensor in old.items()})
    assert_same_logits(load_model(folder, progress=False), make_reference("LlamaForCausalLM"))


def test_tied_head_ignores_a_stored_one(make_reference, save, assert_same_logits, caplog):
    reference = make_reference("LlamaForCausalLM", tie_word_embeddings=True)
    folder = save(reference)
    rewrite(folder, lambda old: old | {"lm_head.weight": torch.randn(64, 32)})
    assert_same_logits(load_model(folder, progress=False), reference)
    assert not caplog.records


def test_unused_tensors_are_named_once(folder, caplog):
    rewrite(
        folder, lambda old: old | {"model.vision.weight": torch.ones(2), "model.rotary_emb.inv_freq": torch.ones(2)}
    )
    with caplog.at_level(logging.WARNING):
        load_model(folder, progress=False)
    (record,) = caplog.records
    assert record.getMessage().endswith("1 tensors are not used, among them model.vision.weight")


def test_missing_tensor(folder):
    rewrite(folder, lambda old: old.pop("model.layers.1.mlp.up_proj.weight") is None)
    with pytest.raises(ModelError, match=r"tiny: tensor 'model.layers.1.mlp.up_proj.weight' .* \[96, 32\] is missing"):
        load_model(folder, progress=False)


def test_misshapen_tensor(folder):
    rewrite(folder, lambda old: old | {"model.norm.weight": torch.ones(31)})
    with pytest.raises(ModelError, match=r"model.safetensors: .*'model.norm.weight' has shape \[31\].*asks for \[32\]"):
        load_model(folder, progress=False)


def test_integer_weights(folder):
    rewrite(folder, lambda old: old | {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"'model.norm.weight' has dtype I8; quantised checkpoints"):
        load_model(folder, progress=False)


def test_quantised_configuration(folder):
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match=r"config.json: weights quantised with 'gptq' are not supported"):
        load_model(folder, progress=False)


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_truncated_safetensors(keep, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model.safetensors: not a readable safetensors file"):
        load_model(folder, progress=False)


def test_missing_shard(make_reference, save):
    folder = save(make_reference("LlamaForCausalLM"), max_shard_size="20KB")
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match=r"model-00002.*\.safetensors: missing, although model.safetensors.index.json"):
        load_model(folder, progress=False)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_bad_index(content, folder):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model.safetensors.index.json: holds no 'weight_map'|x.safetensors: missing"):
        load_model(folder, progress=False)


def test_pickles_are_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds neither model.safetensors nor"):
        load_model(folder, progress=False)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: pickled weights are not read, because unpickling runs"):
        load_model(folder, progress=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json: not valid JSON"),
        ("[]", "config.json: holds a JSON list"),
        ("{}", "config.json: names no architecture"),
        ('{"architectures": ["BertModel"]}', "architecture 'BertModel' is not supported; known are"),
        ('{"architectures": ["LlamaForCausalLM"], "model_type": "nonsense"}', "config.json: "),
        ('{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": "wide"}', "config.json: "),
    ],
)
def test_bad_configuration(content, message, folder):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder, progress=False)
    assert "\n" not in str(caught.value)


def test_no_configuration(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: cannot be read"):
        load_model(folder, progress=False)


def test_dtype_choice(folder):
    source = SafetensorsSource(folder)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_dtype("auto", source, cpu) == torch.float32
    assert choose_dtype("bfloat16", source, cpu) == choose_dtype(torch.bfloat16, source, cpu) == torch.bfloat16
    for stored, on_cpu in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        rewrite(folder, lambda old, stored=stored: {name: tensor.to(stored) for name, tensor in old.items()})
        source = SafetensorsSource(folder)
        assert choose_dtype("auto", source, cpu) == on_cpu
        assert choose_dtype("auto", source, cuda) == stored
    with pytest.raises(ModelError, match="dtype 'int8' is not supported; known are auto, float32"):
        choose_dtype("int8", source, cpu)


def test_weights_do_not_alias_the_file(folder):
    weights = Weights(SafetensorsSource(folder))
    taken = weights.take("model.norm.weight", (32,))
    before = taken.clone()
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(taken, before)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of peak memory")
def test_peak_memory_is_about_the_weights(tmp_path):
    """183 MiB: the peak may exceed them by the bound on mapped pages and one tensor, not by as much again."""
    save_file({f"t{i}": torch.ones(8, 10**6) for i in range(6)}, tmp_path / "model.safetensors")
    code = """if True:
        import pathlib, re, sys, torch, safetensors.torch
        from tenfold.models.weights import SafetensorsSource, Weights
        # Not getrusage: its peak is inherited from the parent process.
        status = pathlib.Path("/proc/self/status")
        peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) / 1024
        weights = Weights(SafetensorsSource(pathlib.Path(sys.argv[1])))
        before = peak()
        kept = [weights.take(f"t{i}", (8, 10**6)) for i in range(6)]
        print(peak() - before)
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert 170 < float(done.stdout) < 310
