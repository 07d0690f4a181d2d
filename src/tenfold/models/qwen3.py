"""Qwen3: the Llama decoder with queries and keys normalised head by head."""

from __future__ import annotations

from typing import Any

from tenfold.models.layers import refuse_sliding_window
from tenfold.models.llama import Llama, Traits


class Qwen3(Llama):
    """Qwen3ForCausalLM."""

    @classmethod
    def traits(cls, config: Any) -> Traits:
        """Head norms always; biases on all attention projections when the configuration says so."""
        bias = bool(config.attention_bias)
        return Traits(input_bias=bias, output_bias=bias, head_norms=True)

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ModelError as Llama does, and for sliding-window attention."""
        super().check(config)
        refuse_sliding_window(config)
