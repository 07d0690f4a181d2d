"""Layers bit for bit against transformers', and what the models build out of them."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tenfold.models.layers import GatedMLP, Linear, RMSNorm, Rotary, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype):
    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data.uniform_(0.5, 1.5)
    x = (torch.randn(5, 3, 48) * 4).to(dtype)
    assert torch.equal(RMSNorm(theirs.weight, 1e-5)(x), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype, make_reference):
    config = make_reference("LlamaForCausalLM").config
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 7, 100, 31, 31])
    query, key = torch.randn(6, 4, 8).to(dtype), torch.randn(6, 2, 8).to(dtype)
    cosines, sines = theirs(query, positions[None])
    expected = apply_rotary_pos_emb(query[None].transpose(1, 2), key[None].transpose(1, 2), cosines, sines)
    angles = Rotary(theirs.inv_freq, theirs.attention_scaling, dtype).angles(positions)
    for ours, part in zip((query, key), expected, strict=True):
        assert torch.equal(rotate(ours, angles), part[0].transpose(0, 1))


def test_partial_rotation_passes_the_rest_through():
    rotary = Rotary(torch.tensor([1.0, 0.1]), 1.0, torch.float32)
    x = torch.randn(3, 2, 10)
    angles = rotary.angles(torch.tensor([0, 1, 2]))
    turned = rotate(x, angles)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], rotate(x[..., :4], angles))
    assert torch.equal(turned[0], x[0])


def test_gated_mlp_takes_the_gate_first():
    gate, up, down = torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6)
    x = torch.randn(3, 4)
    mlp = GatedMLP(Linear(torch.cat((gate, up))), Linear(down), "silu")
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp(x), expected)


def test_a_packed_weight_is_for_recorded_passes_only():
    weight, bias = torch.randn(6, 4), torch.randn(6)
    packed = Linear(weight, bias, pack=lambda *given: given, gated=True)
    assert packed.packed == (weight, bias, True)
    with pytest.raises(RuntimeError, match="in recorded forward passes only"):
        packed(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="was not packed when it was loaded"):
        _ = Linear(weight).packed
