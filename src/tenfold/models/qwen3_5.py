"""Qwen3.5 and its successors of the same architecture, text only: Gated DeltaNet layers beside gated attention.

The arithmetic follows transformers step by step. Positions there are three streams, for text and for both directions of
an image; on text all three are equal, which leaves ordinary rotation of a part of each head.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tenfold.errors import ModelError
from tenfold.models.base import HeadNorm, Recorder, Step
from tenfold.models.layers import (
    EMBEDDING,
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    Rotary,
    activation_function,
    check_rope,
    head_width,
    output_head,
    rotate,
)
from tenfold.models.weights import Weights

logger = logging.getLogger(__name__)

_OTHER_PARTS = ("model.visual.", "visual.", "mtp.")


class ZeroCentredNorm:
    """Root mean square normalisation whose weight is stored as its offset from one; float32 up to the result."""

    def __init__(self, offset: Tensor, epsilon: float) -> None:
        """``offset`` is [width]."""
        self.weight = 1.0 + offset.float()
        self.epsilon = epsilon

    @classmethod
    def load(cls, config: Any, weights: Weights, name: str, width: int) -> ZeroCentredNorm:
        """Take ``name``, which lacks the ``.weight``."""
        return cls(weights.take(f"{name}.weight", (width,)), config.rms_norm_eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., width]; the result has the dtype of ``x``."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight).to(x.dtype)

    def record(self, step: Recorder, x: Any) -> Any:
        """Write the normalisation down."""
        return step.norm(x, self.weight, self.epsilon, rounded=False)

    def of_heads(self) -> HeadNorm:
        """The normalisation of heads as a part of recorded attention."""
        return HeadNorm(self.weight, self.epsilon, rounded=False)


class GatedNorm:
    """Root mean square normalisation, then a product with ``silu(gate)`` in float32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """``weight`` is [width]."""
        self.weight = weight
        self.epsilon = epsilon

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise [..., width] and gate it; the result has the dtype of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (self.weight * wide.to(x.dtype) * functional.silu(gate.float())).to(x.dtype)


class GatedAttention:
    """Grouped-query attention with normalised queries and keys, whose output passes a sigmoid gate."""

    def __init__(self, config: Any, weights: Weights, prefix: str, layer: int) -> None:
        """``prefix`` ends in ``self_attn``; ``layer`` counts the attention layers from 0."""
        self.layer = layer
        self.kv_heads = config.num_key_value_heads
        self.head_dim = head_width(config)
        self.scale = self.head_dim**-0.5
        inner, kv, bias = (
            config.num_attention_heads * self.head_dim,
            self.kv_heads * self.head_dim,
            config.attention_bias,
        )
        self.sizes = [2 * inner, kv, kv]
        self.qkv = Linear.load(
            weights, [f"{prefix}.{part}_proj" for part in "qkv"], config.hidden_size, self.sizes, bias
        )
        self.out = Linear.load(weights, [f"{prefix}.o_proj"], inner, [config.hidden_size], bias)
        self.query_norm = ZeroCentredNorm.load(config, weights, f"{prefix}.q_norm", self.head_dim)
        self.key_norm = ZeroCentredNorm.load(config, weights, f"{prefix}.k_norm", self.head_dim)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], step: Step) -> Tensor:
        """Map [T, width] to [T, width]."""
        query_gate, key, value = torch.split(self.qkv(x), self.sizes, dim=-1)
        query, gate = heads(query_gate, 2 * self.head_dim).chunk(2, dim=-1)
        query = rotate(self.query_norm(query), angles)
        key = rotate(self.key_norm(heads(key, self.head_dim)), angles)
        mixed = step.attend(self.layer, query, key, heads(value, self.head_dim), self.scale)
        return self.out((mixed * torch.sigmoid(gate)).flatten(-2))

    def record(self, step: Recorder, x: Any, add_to: Any) -> Any:
        """Write the map down, its result added to ``add_to``."""
        query_gate, key, value = step.linear(x, self.qkv.packed).split(self.sizes)
        stride = 2 * self.head_dim  # a head's query, then its gate
        mixed = step.attention(
            self.layer,
            query_gate,
            key,
            value,
            head_dim=self.head_dim,
            scale=self.scale,
            query_head_stride=stride,
            query_norm=self.query_norm.of_heads(),
            key_norm=self.key_norm.of_heads(),
        )
        mixed = step.sigmoid_gate(mixed, query_gate.after(self.head_dim), self.head_dim, stride)
        return step.linear(mixed, self.out.packed, add_to=add_to)


class GatedDeltaNet:
    """The recurrent layer of arXiv:2412.06464: a short convolution, the gated delta rule, and a gated norm."""

    def __init__(self, config: Any, weights: Weights, prefix: str, layer: int) -> None:
        """``prefix`` ends in ``linear_attn``; ``layer`` counts the recurrent layers from 0."""
        self.layer = layer
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = key_heads * self.key_dim, value_heads * self.value_dim
        channels = 2 * keys + values
        self.parts = [keys, keys, values]
        self.sizes = [channels, values, value_heads, value_heads]
        names = [f"{prefix}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        self.inputs = Linear.load(weights, names, config.hidden_size, self.sizes, bias=False)
        self.out = Linear.load(weights, [f"{prefix}.out_proj"], values, [config.hidden_size], bias=False)
        self.taps = weights.take(f"{prefix}.conv1d.weight", (channels, 1, config.linear_conv_kernel_dim)).squeeze(1)
        self.activation = activation_function(config.hidden_act)
        self.rate = weights.take(f"{prefix}.A_log", (value_heads,), torch.float32).exp()
        self.step_bias = weights.take(f"{prefix}.dt_bias", (value_heads,), torch.float32)
        self.norm = GatedNorm(weights.take(f"{prefix}.norm.weight", (self.value_dim,)), config.rms_norm_eps)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Map [T, width] to [T, width]."""
        mixed, gate, beta, step_size = torch.split(self.inputs(x), self.sizes, dim=-1)
        mixed = self.activation(step.convolve(self.layer, mixed, self.taps))
        query, key, value = torch.split(mixed, self.parts, dim=-1)
        read = step.delta_rule(
            self.layer,
            heads(query, self.key_dim),
            heads(key, self.key_dim),
            heads(value, self.value_dim),
            -self.rate * functional.softplus(step_size.float() + self.step_bias),
            beta.sigmoid(),
        )
        return self.out(self.norm(read, heads(gate, self.value_dim)).flatten(-2))

    def record(self, step: Recorder, x: Any, add_to: Any) -> Any:
        """Write the map down, its result added to ``add_to``."""
        mixed, gate, beta, step_size = step.linear(x, self.inputs.packed).split(self.sizes)
        query, key, value = step.convolve(self.layer, mixed, self.taps).split(self.parts)
        read = step.delta_rule(self.layer, query, key, value, beta, step_size, self.rate, self.step_bias)
        read = step.gated_norm(read, gate, self.norm.weight, self.norm.epsilon)
        return step.linear(read, self.out.packed, add_to=add_to)


class Layer:
    """One pre-normalised decoder layer: attention or DeltaNet, then MLP, each added to its input."""

    def __init__(self, config: Any, weights: Weights, layer: int) -> None:
        prefix, width, inner = f"model.layers.{layer}", config.hidden_size, config.intermediate_size
        kind = config.layer_types[layer]
        place = config.layer_types[:layer].count(kind)
        self.attention: GatedAttention | None = None
        self.delta_net: GatedDeltaNet | None = None
        if kind == "full_attention":
            self.attention = GatedAttention(config, weights, f"{prefix}.self_attn", place)
        else:
            self.delta_net = GatedDeltaNet(config, weights, f"{prefix}.linear_attn", place)
        self.input_norm = ZeroCentredNorm.load(config, weights, f"{prefix}.input_layernorm", width)
        self.mlp_norm = ZeroCentredNorm.load(config, weights, f"{prefix}.post_attention_layernorm", width)
        gate_up = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        self.mlp = GatedMLP(
            Linear.load(weights, gate_up, width, [inner, inner], bias=False, gated=True),
            Linear.load(weights, [f"{prefix}.mlp.down_proj"], inner, [width], bias=False),
            config.hidden_act,
        )

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], step: Step) -> Tensor:
        """Map [T, width] to [T, width]."""
        normed = self.input_norm(x)
        if self.attention is not None:
            x = x + self.attention(normed, angles, step)
        elif self.delta_net is not None:
            x = x + self.delta_net(normed, step)
        return x + self.mlp(self.mlp_norm(x))

    def record(self, step: Recorder, x: Any, last: bool) -> Any:
        """Write the layer down; behind the mixer of the last one, only what is sampled from matters."""
        mixer = self.attention or self.delta_net
        assert mixer is not None
        x = mixer.record(step, self.input_norm.record(step, x), add_to=x)
        x = step.select_sampled(x) if last else x
        return self.mlp.record(step, self.mlp_norm.record(step, x), add_to=x)


class Qwen3_5(Decoder):
    """Qwen3_5ForCausalLM, and the text part of Qwen3_5ForConditionalGeneration."""

    def __init__(self, config: Any, weights: Weights) -> None:
        """Take every tensor the configuration asks for; raises ModelError as ``check`` and ``Weights.take`` do."""
        self.check(config)
        skip_other_parts(weights)
        table = (config.vocab_size, config.hidden_size)
        self.rotary = Rotary.load(config, weights)
        self.embedding = Embedding(weights.take(EMBEDDING, table))
        self.layers = [Layer(config, weights, layer) for layer in range(config.num_hidden_layers)]
        self.norm = ZeroCentredNorm.load(config, weights, "model.norm", config.hidden_size)
        self.head = output_head(config, weights, self.embedding)

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ModelError for anything the configuration asks for that this family would not run exactly."""
        activation_function(config.hidden_act)
        check_rope(config)
        unknown = set(config.layer_types) - {"full_attention", "linear_attention"}
        if unknown:
            raise ModelError(f"layers of type {', '.join(sorted(unknown))} are not supported in this family")
        if config.linear_num_value_heads % config.linear_num_key_heads:
            raise ModelError(
                f"{config.linear_num_value_heads} value heads cannot be shared out among "
                f"{config.linear_num_key_heads} key heads: linear_num_value_heads must be a multiple"
            )
        if not getattr(config, "attn_output_gate", True):
            raise ModelError("attention without an output gate (attn_output_gate) is not supported in this family")


def heads(x: Tensor, size: int) -> Tensor:
    """[T, heads * size] as [T, heads, size]."""
    return x.reshape(len(x), -1, size)


def skip_other_parts(weights: Weights) -> None:
    """Declare vision and multi-token prediction weights as left out, and say so if there are any."""
    skipped = [name for name in weights.unused() if name.startswith(_OTHER_PARTS)]
    for name in skipped:
        weights.ignore(name)
    if skipped:
        logger.warning("%d vision and multi-token prediction weights are skipped: text is all that runs", len(skipped))
