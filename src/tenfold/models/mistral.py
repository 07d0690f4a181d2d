"""Mistral without a sliding window (since 7B v0.2): the Llama decoder, never with biases."""

from __future__ import annotations

from typing import Any

from tenfold.models.layers import refuse_sliding_window
from tenfold.models.llama import Llama, Traits


class Mistral(Llama):
    """MistralForCausalLM."""

    @classmethod
    def traits(cls, config: Any) -> Traits:
        """The same for every Mistral."""
        return Traits()

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ModelError as Llama does, and for sliding-window attention."""
        super().check(config)
        refuse_sliding_window(config)
