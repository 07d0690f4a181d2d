"""Tiny random checkpoints, and a step that attends densely, so that models are tested without the runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support import recurrence

torch.set_num_threads(1)


class DenseStep:
    """One whole sequence, from position 0, attended in full; nothing is cached."""

    def __init__(self, tokens: list[int], sampled: list[int] | None = None) -> None:
        self.token_ids = torch.tensor(tokens)
        self.positions = torch.arange(len(tokens))
        self.sampled = torch.tensor(list(range(len(tokens))) if sampled is None else sampled)
        self.layers: list[int] = []
        self.recurrent_layers: list[int] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.layers.append(layer)
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return mixed[0].transpose(0, 1)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        self.recurrent_layers.append(layer)
        return recurrence.convolution(x, weight, torch.zeros(x.shape[1], weight.shape[1] - 1))[0].to(x.dtype)

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        assert self.recurrent_layers[-1] == layer and decay.dtype == torch.float32
        state = torch.zeros(value.shape[1], key.shape[2], value.shape[2])
        return recurrence.delta_rule(query, key, value, decay, beta, state)[0].to(value.dtype)


TOKENS = [3, 17, 5, 60, 2, 2, 41, 9, 33, 0, 12]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def dense_step() -> type[DenseStep]:
    return DenseStep


@pytest.fixture
def make_reference() -> Callable[..., Any]:
    """A function that makes a random transformers model of an architecture, biases and norms random too."""

    def make(architecture: str, **changes: Any) -> Any:
        import transformers

        torch.manual_seed(7)
        kind = getattr(transformers, architecture)
        model = kind(kind.config_class(**{**SIZES, **changes})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.uniform_(0.2, 1.5)
        return model

    return make


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """A function that saves a transformers model and returns its folder."""

    def save(model: Any, **options: Any) -> Path:
        folder = tmp_path / "tiny"
        model.save_pretrained(folder, **options)
        return folder

    return save


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected magnitude."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture
def assert_same_logits() -> Callable[..., None]:
    """A function that compares a loaded model's logits with a transformers model's, all rows and sampled ones."""

    def check(loaded: Any, reference: Any, tokens: list[int] = TOKENS, tolerance: float = 1e-4) -> None:
        expected = reference_logits(reference, tokens)
        step = DenseStep(tokens)
        assert difference(loaded.model.forward(step), expected) < tolerance
        assert step.layers == list(range(len(step.layers)))
        assert step.recurrent_layers == list(range(len(step.recurrent_layers)))
        assert len(step.layers) + len(step.recurrent_layers) == loaded.config.num_hidden_layers
        few = [len(tokens) - 1, 0]
        assert difference(loaded.model.forward(DenseStep(tokens, sampled=few)), expected[few]) < tolerance

    return check
