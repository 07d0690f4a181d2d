"""Logits of tiny random checkpoints against transformers, in float32."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tenfold.errors import ModelError
from tenfold.models import FAMILIES, family
from tenfold.models.loader import load_model


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


CASES = {
    "llama grouped heads": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama one kv head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama head size": ("LlamaForCausalLM", {"head_dim": 24}),
    "llama gelu": ("LlamaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama linear rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama dynamic rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama 3 rope": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama yarn": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2 tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3 tied, biases": ("Qwen3ForCausalLM", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case, make_reference, save, assert_same_logits):
    architecture, changes = CASES[case]
    reference = make_reference(architecture, **changes)
    loaded = load_model(save(reference), progress=False)
    assert loaded.dtype == torch.float32
    assert_same_logits(loaded, reference)


def test_sharded(make_reference, save, assert_same_logits):
    reference = make_reference("LlamaForCausalLM")
    folder = save(reference, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same_logits(load_model(folder, progress=False), reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_round_no_worse_than_transformers(dtype, make_reference, save, dense_step):
    reference = make_reference("Qwen3ForCausalLM", head_dim=16)
    loaded = load_model(save(reference), dtype=dtype, progress=False)
    tokens = list(range(64))
    exact = reference_logits(reference, tokens)
    theirs = reference_logits(reference.to(getattr(torch, dtype)), tokens)
    ours = loaded.model.forward(dense_step(tokens))
    assert ours.dtype == theirs.dtype == loaded.dtype
    assert (ours - exact).norm() < 1.3 * (theirs - exact).norm()


@pytest.mark.parametrize("rope_type", ["longrope", "proportional"])
def test_refused_rope(rope_type, make_reference):
    reference = make_reference("LlamaForCausalLM")
    reference.config.rope_parameters["rope_type"] = rope_type
    with pytest.raises(ModelError, match=f"rope type '{rope_type}' is not supported"):
        family("LlamaForCausalLM").check(reference.config)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": 16}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ],
)
def test_refused_sliding_window(architecture, changes, make_reference, save):
    with pytest.raises(ModelError, match=r"sliding-window attention \(window 16\)"):
        load_model(save(make_reference(architecture, **changes)), progress=False)


def test_window_as_long_as_the_context_is_no_window(make_reference, save, assert_same_logits):
    reference = make_reference("MistralForCausalLM", sliding_window=128)
    assert_same_logits(load_model(save(reference), progress=False), reference)


def test_unknown_activation(make_reference, save):
    with pytest.raises(ModelError, match="activation 'tanh' is not supported; known are silu"):
        load_model(save(make_reference("LlamaForCausalLM", hidden_act="tanh")), progress=False)


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ModelError, match="'GPT2LMHeadModel' is not supported; known are LlamaForCausalLM, Mistral"):
        family("GPT2LMHeadModel")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_registered_family_imports(architecture):
    assert callable(family(architecture))


@pytest.mark.parametrize("module", ["tenfold.models", "tenfold.models.hub", "tenfold.models.gguf_file"])
def test_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
