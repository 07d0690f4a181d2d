"""The Llama decoder (SmolLM2, TinyLlama, Llama 2 and 3), which its relatives reuse by stating how they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tenfold.models.base import Recorder, Step
from tenfold.models.layers import (
    EMBEDDING,
    Decoder,
    Embedding,
    GatedMLP,
    Linear,
    RMSNorm,
    Rotary,
    activation_function,
    check_rope,
    head_width,
    output_head,
    rotate,
)
from tenfold.models.weights import Weights


@dataclass(frozen=True)
class Traits:
    """How one family's decoder differs from another's."""

    input_bias: bool = False
    """The query, key and value projections have a bias."""
    output_bias: bool = False
    """The attention's output projection has a bias."""
    mlp_bias: bool = False
    """All projections of the MLP have a bias."""
    head_norms: bool = False
    """Queries and keys are normalised head by head before rotation."""


class Attention:
    """Grouped-query attention over the step's cache, with query, key and value as one projection."""

    def __init__(self, config: Any, traits: Traits, weights: Weights, prefix: str, layer: int) -> None:
        """``prefix`` ends in ``self_attn``; ``layer`` counts the attention layers from 0."""
        self.layer = layer
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = head_width(config)
        self.scale = self.head_dim**-0.5
        self.sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        self.qkv = Linear.load(weights, names, config.hidden_size, self.sizes, traits.input_bias)
        self.out = Linear.load(weights, [f"{prefix}.o_proj"], self.sizes[0], [config.hidden_size], traits.output_bias)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if traits.head_norms:
            self.query_norm = RMSNorm(weights.take(f"{prefix}.q_norm.weight", (self.head_dim,)), config.rms_norm_eps)
            self.key_norm = RMSNorm(weights.take(f"{prefix}.k_norm.weight", (self.head_dim,)), config.rms_norm_eps)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], step: Step) -> Tensor:
        """Map [T, width] to [T, width]."""
        query, key, value = torch.split(self.qkv(x), self.sizes, dim=-1)
        query = query.view(-1, self.heads, self.head_dim)
        key = key.view(-1, self.kv_heads, self.head_dim)
        value = value.view(-1, self.kv_heads, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = step.attend(self.layer, rotate(query, angles), rotate(key, angles), value, self.scale)
        return self.out(mixed.flatten(-2))

    def record(self, step: Recorder, x: Any, add_to: Any) -> Any:
        """Write the map down, its result added to ``add_to``."""
        query, key, value = step.linear(x, self.qkv.packed).split(self.sizes)
        mixed = step.attention(
            self.layer,
            query,
            key,
            value,
            head_dim=self.head_dim,
            scale=self.scale,
            query_norm=self.query_norm.of_heads() if self.query_norm else None,
            key_norm=self.key_norm.of_heads() if self.key_norm else None,
        )
        return step.linear(mixed, self.out.packed, add_to=add_to)


class Layer:
    """One pre-normalised decoder layer: attention, then MLP, each added to its input."""

    def __init__(self, config: Any, traits: Traits, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        width, inner = config.hidden_size, config.intermediate_size

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.take(f"{prefix}.{name}.weight", (width,)), config.rms_norm_eps)

        def linear(names: list[str], inputs: int, outputs: list[int], gated: bool = False) -> Linear:
            paths = [f"{prefix}.mlp.{name}" for name in names]
            return Linear.load(weights, paths, inputs, outputs, traits.mlp_bias, gated=gated)

        self.input_norm = norm("input_layernorm")
        self.attention = Attention(config, traits, weights, f"{prefix}.self_attn", layer)
        self.mlp_norm = norm("post_attention_layernorm")
        self.mlp = GatedMLP(
            linear(["gate_proj", "up_proj"], width, [inner, inner], gated=True),
            linear(["down_proj"], inner, [width]),
            config.hidden_act,
        )

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], step: Step) -> Tensor:
        """Map [T, width] to [T, width]."""
        x = x + self.attention(self.input_norm(x), angles, step)
        return x + self.mlp(self.mlp_norm(x))

    def record(self, step: Recorder, x: Any, last: bool) -> Any:
        """Write the layer down; behind the attention of the last one, only what is sampled from matters."""
        x = self.attention.record(step, self.input_norm.record(step, x), add_to=x)
        x = step.select_sampled(x) if last else x
        return self.mlp.record(step, self.mlp_norm.record(step, x), add_to=x)


class Llama(Decoder):
    """LlamaForCausalLM."""

    def __init__(self, config: Any, weights: Weights) -> None:
        """Take every tensor the configuration asks for; raises ModelError as ``check`` and ``Weights.take`` do."""
        self.check(config)
        traits = self.traits(config)
        table = (config.vocab_size, config.hidden_size)
        self.rotary = Rotary.load(config, weights)
        self.embedding = Embedding(weights.take(EMBEDDING, table))
        self.layers = [Layer(config, traits, weights, layer) for layer in range(config.num_hidden_layers)]
        self.norm = RMSNorm(weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        self.head = output_head(config, weights, self.embedding)

    @classmethod
    def traits(cls, config: Any) -> Traits:
        """What the configuration says about biases."""
        attention_bias = bool(config.attention_bias)
        return Traits(input_bias=attention_bias, output_bias=attention_bias, mlp_bias=bool(config.mlp_bias))

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ModelError for an activation or a kind of rotary scaling that is not supported."""
        activation_function(config.hidden_act)
        check_rope(config)
