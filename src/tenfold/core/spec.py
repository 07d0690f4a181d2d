"""What a model keeps per token and per sequence, and how that divides an arena into pages.

This is the only module that knows which kinds of layers exist: everything else sees bytes per token, pages per block
(one) and pages per state slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenfold.errors import ModelError

FLOAT32_BYTES = 4
"""The matrix state of a recurrent layer is float32 whatever the compute dtype: it sums over the whole context."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A full-attention layer: its keys and values grow by one row per token."""

    kv_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """A Gated DeltaNet layer: a matrix state per value head, and the tail of a causal convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution_width: int

    @property
    def state_elements(self) -> int:
        """Elements of the float32 matrix state: ``value_heads x key_dim x value_dim``."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def convolution_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def convolution_elements(self) -> int:
        """The last ``width - 1`` inputs of every channel, in the compute dtype."""
        return self.convolution_channels * (self.convolution_width - 1)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The memory of a model: its layers in order, and the bytes of one cached element (2 for bfloat16)."""

    name: str
    layers: tuple[AttentionLayer | RecurrentLayer, ...]
    element_bytes: int = 2
    max_context: int = 0
    kv_quantized: bool = False
    """Keys and values are bytes, with a float32 scale for every token and head."""
    attention_cost: float = 0.0
    """Operations of attention per token and position before it, over those of all else per token."""

    @property
    def attention(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, AttentionLayer))

    @property
    def recurrent(self) -> tuple[RecurrentLayer, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, RecurrentLayer))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds over all full-attention layers."""
        if self.kv_quantized:
            return sum(layer.elements_per_token + 2 * FLOAT32_BYTES * layer.kv_heads for layer in self.attention)
        return self.element_bytes * sum(layer.elements_per_token for layer in self.attention)

    @property
    def state_bytes(self) -> int:
        """Bytes that one sequence holds over all recurrent layers, whatever its length."""
        return sum(
            FLOAT32_BYTES * layer.state_elements + self.element_bytes * layer.convolution_elements
            for layer in self.recurrent
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, element_bytes: int = 2, name: str = "", kv_quantized: bool = False
    ) -> ModelSpec:
        """Read the layers from a Hugging Face ``config.json`` (its ``text_config`` where there is one).

        Raises:
            ModelError: a field that decides memory is missing, or a layer type is unknown.
        """
        text = config.get("text_config") or config
        try:
            count = int(text["num_hidden_layers"])
            heads = int(text["num_attention_heads"])
            head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
            attention = AttentionLayer(int(text.get("num_key_value_heads") or heads), head_dim)
            kinds = _layer_kinds(text, count)
            recurrent = None
            if "linear_attention" in kinds:
                recurrent = RecurrentLayer(
                    key_heads=int(text["linear_num_key_heads"]),
                    value_heads=int(text["linear_num_value_heads"]),
                    key_dim=int(text["linear_key_head_dim"]),
                    value_dim=int(text["linear_value_head_dim"]),
                    convolution_width=int(text["linear_conv_kernel_dim"]),
                )
        except KeyError as error:
            raise ModelError(
                f"model configuration {name or ''} has no {error}: it decides the size of the cache"
            ) from None
        layers: list[AttentionLayer | RecurrentLayer] = []
        for kind in kinds:
            if kind == "full_attention":
                layers.append(attention)
            elif kind == "linear_attention" and recurrent is not None:
                layers.append(recurrent)
            else:
                raise ModelError(
                    f"model configuration {name or ''} has a layer of type {kind!r}: "
                    "known are full_attention and linear_attention"
                )
        return cls(
            name=name or str(text.get("model_type", "")),
            layers=tuple(layers),
            element_bytes=element_bytes,
            max_context=int(text.get("max_position_embeddings") or 0),
            kv_quantized=kv_quantized,
            attention_cost=_attention_cost(text, kinds, attention, heads, recurrent),
        )


def _attention_cost(
    text: Mapping[str, Any], kinds: list[str], attention: AttentionLayer, heads: int, recurrent: RecurrentLayer | None
) -> float:
    """From the weights of every layer (two operations each) and 4 x heads x head_dim operations per position
    attended."""
    hidden = int(text.get("hidden_size") or 0)
    mlp = 3 * hidden * int(text.get("intermediate_size") or 0)
    dense = hidden * 2 * (heads + attention.kv_heads) * attention.head_dim
    linear = 0
    if recurrent is not None:
        values = recurrent.value_heads * recurrent.value_dim
        linear = hidden * (recurrent.convolution_channels + 2 * values) + 3 * recurrent.state_elements
    full = kinds.count("full_attention")
    weights = len(kinds) * mlp + full * dense + (len(kinds) - full) * linear
    return full * 4 * heads * attention.head_dim / (2 * weights) if weights else 0.0


def _layer_kinds(text: Mapping[str, Any], count: int) -> list[str]:
    if text.get("layer_types"):
        kinds = [str(kind) for kind in text["layer_types"]]
        if len(kinds) != count:
            raise ModelError(f"layer_types names {len(kinds)} layers and num_hidden_layers says {count}")
        return kinds
    if "linear_num_key_heads" in text:
        interval = int(text.get("full_attention_interval") or 4)
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    return ["full_attention"] * count


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """An arena of ``num_pages`` equal pages: a block is one page, a state slot ``slot_pages`` consecutive ones.

    ``page_bytes`` is the size of a page, which the core itself never needs: it decides in pages. Compute is counted in
    tokens without context: a token at position ``p`` costs ``1 + attention_cost * p``.
    """

    block_size: int
    num_pages: int
    slot_pages: int = 0
    page_bytes: int = 0
    attention_cost: float = 0.0

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_pages < 1 or self.slot_pages < 0:
            raise ValueError(f"impossible cache: {self}")

    @classmethod
    def for_model(cls, model: ModelSpec, pool_bytes: int, block_size: int = 16) -> CacheSpec:
        """Divide ``pool_bytes`` into pages that hold one block of this model each.

        Raises:
            ModelError: the model has no full-attention layer, or the pool cannot hold one token of one sequence.
        """
        page_bytes = block_size * model.kv_bytes_per_token
        if page_bytes == 0:
            raise ModelError(f"model {model.name} has no full-attention layer: blocks would be empty")
        spec_pages, slot_pages = pool_bytes // page_bytes, -(-model.state_bytes // page_bytes)
        if spec_pages < slot_pages + 1:
            raise ModelError(
                f"an arena of {pool_bytes:,} bytes is too small for {model.name}: one block and one state slot "
                f"take {(slot_pages + 1) * page_bytes:,} bytes"
            )
        return cls(block_size, spec_pages, slot_pages, page_bytes, model.attention_cost)

    @property
    def num_slots(self) -> int:
        """State slots on the grid, if no block took their pages; 0 for models without recurrent layers."""
        return self.num_pages // self.slot_pages if self.slot_pages else 0

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        return (self.num_pages - self.slot_pages) * self.block_size

    def cost(self, start: int, end: int) -> float:
        """Compute of tokens ``start`` to ``end``, in tokens without context."""
        return (end - start) * (1 + self.attention_cost * (start + end) / 2)

    @property
    def block_value(self) -> float:
        """What a cached block saves per page: at least its tokens, whatever its position. Blocks that carry others must
        not be worth less than those, so position does not count."""
        return float(self.block_size)

    def blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def pages_for(self, length: int) -> int:
        """Pages of a sequence of ``length`` tokens: its blocks and its state slot."""
        return self.blocks_for(length) + self.slot_pages

    def slot_page(self, slot: int) -> int:
        """First page of a slot. Slots are counted from the top of the arena: slot 0 ends at its last page."""
        return self.num_pages - (slot + 1) * self.slot_pages
