"""Qwen2 and Qwen2.5: the Llama decoder with biases on query, key and value alone."""

from __future__ import annotations

from typing import Any

from tenfold.models.layers import refuse_sliding_window
from tenfold.models.llama import Llama, Traits


class Qwen2(Llama):
    """Qwen2ForCausalLM."""

    @classmethod
    def traits(cls, config: Any) -> Traits:
        """The same for every Qwen2."""
        return Traits(input_bias=True)

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ModelError as Llama does, and for sliding-window attention."""
        super().check(config)
        refuse_sliding_window(config)
