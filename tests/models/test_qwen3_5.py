"""The hybrid family against transformers, in both layouts of its checkpoints."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

from tenfold.errors import ModelError
from tenfold.models import family
from tenfold.models.loader import load_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
TOKENS = [3, 17, 5, 60, 2, 2, 41, 9, 33, 0, 12]
CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "as many value heads": {"linear_num_value_heads": 2},
    "three times the value heads": {"linear_num_value_heads": 6},
    "stated layers": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
    },
    "interval": {"num_hidden_layers": 5, "full_attention_interval": 2},
    "narrow convolution": {"linear_conv_kernel_dim": 2},
    "other activation": {"hidden_act": "gelu_pytorch_tanh"},
    "half rotated": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mrope_section": [3, 3, 2],
        }
    },
}


def randomise(model):
    """What training would move: norms on both sides of one, decays from weak to strong, a convolution that matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                parameter.uniform_(0.2, 1.5)
            elif "norm" in name or name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-5, 2)
            elif name.endswith("conv1d.weight"):
                parameter.normal_(0, 0.5)
    return model.eval()


def make(**changes) -> Qwen3_5ForCausalLM:
    torch.manual_seed(7)
    return randomise(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SIZES, **changes})))


@pytest.mark.parametrize("case", CASES)
def test_logits(case, save, assert_same_logits):
    reference = make(**CASES[case])
    loaded = load_model(save(reference), progress=False)
    assert loaded.dtype == torch.float32
    assert_same_logits(loaded, reference)


def test_three_equal_streams_of_positions_are_plain_partial_rotation(save, dense_step):
    reference = make(**CASES["half rotated"])
    streams = torch.arange(len(TOKENS)).expand(3, 1, -1)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS]), position_ids=streams).logits[0]
    loaded = load_model(save(reference), progress=False)
    torch.testing.assert_close(loaded.model.forward(dense_step(TOKENS)), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_rounds_no_worse_than_transformers(save, dense_step):
    reference = make(num_hidden_layers=8)
    loaded = load_model(save(reference), dtype="bfloat16", progress=False)
    tokens = list(range(64))
    with torch.no_grad():
        exact = reference(torch.tensor([tokens])).logits[0]
        theirs = reference.bfloat16()(torch.tensor([tokens])).logits[0]
    ours = loaded.model.forward(dense_step(tokens))
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert (ours - exact).norm() < 1.3 * (theirs - exact).norm()


@pytest.mark.parametrize("tied", [False, True])
def test_text_part_of_a_model_with_vision(tied, save, assert_same_logits, caplog):
    torch.manual_seed(7)
    config = Qwen3_5Config(text_config=SIZES, vision_config=VISION, tie_word_embeddings=tied)
    reference = randomise(Qwen3_5ForConditionalGeneration(config))
    folder = save(reference)
    tensors = load_file(folder / "model.safetensors")
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in tensors
    assert any(name.startswith("model.visual.") for name in tensors)
    tensors |= {"mtp.fc.weight": torch.ones(32, 64), "mtp.layers.0.self_attn.q_proj.weight": torch.ones(256, 32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="tenfold"):
        loaded = load_model(folder, progress=False)
    (message,) = caplog.messages
    others = sum(name.startswith(("model.visual.", "mtp.")) for name in tensors)
    assert message == f"{others} vision and multi-token prediction weights are skipped: text is all that runs"
    assert (loaded.vocab_size, loaded.max_context) == (64, 128)
    assert_same_logits(loaded, reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layers of type sliding_attention are not supported",
        ),
        ({"linear_num_value_heads": 3}, "3 value heads cannot be shared out among 2 key heads"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "tanh"}, "activation 'tanh'"),
    ],
)
def test_refused(changes, message):
    config = Qwen3_5TextConfig(**SIZES)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=message):
        family("Qwen3_5ForCausalLM").check(config)


def test_missing_tensor(save):
    folder = save(make())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.linear_attn.A_log"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"A_log' of shape \[4\] is missing"):
        load_model(folder, progress=False)
