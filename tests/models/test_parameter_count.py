"""The planner's count of parameters against transformers' own models of the same configurations."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from support.checkpoints import BASE, CONFIGS, HYBRIDS
from tenfold.planner import parameters

ALL = {
    **CONFIGS,
    **HYBRIDS,
    "qwen2": lambda: Qwen2Config(**BASE),
    "qwen2-tied": lambda: Qwen2Config(**BASE, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**BASE, sliding_window=None),
}


@pytest.mark.parametrize("kind", sorted(ALL))
def test_the_count(kind: str) -> None:
    config = ALL[kind]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert parameters.from_config(config.to_dict()) == sum(each.numel() for each in model.parameters())
