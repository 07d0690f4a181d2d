"""Small random checkpoints of real architectures, made with transformers, and what transformers itself generates."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig, Qwen3Config

BASE = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**BASE),
    "llama-tied-biased": lambda: LlamaConfig(**BASE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-scaled-rope": lambda: LlamaConfig(
        **BASE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen3": lambda: Qwen3Config(**BASE, head_dim=16),
    "qwen3-tied": lambda: Qwen3Config(**BASE, head_dim=32, tie_word_embeddings=True),
}


def hybrid(key_heads: int, group: int, key_dim: int, value_dim: int, **changes) -> Qwen3_5TextConfig:
    """A small hybrid whose recurrent layers have ``group`` value heads for each key head."""
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * group,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }
    return Qwen3_5TextConfig(**{**BASE, **sizes, **changes})


HYBRIDS = {
    "hybrid-1x": lambda: hybrid(2, 1, 32, 32, num_hidden_layers=4),
    "hybrid-2x-tied": lambda: hybrid(1, 2, 64, 32, num_hidden_layers=5, tie_word_embeddings=True),
    "hybrid-3x": lambda: hybrid(2, 3, 32, 64, num_hidden_layers=3, full_attention_interval=2),
    "hybrid-1x-wide": lambda: hybrid(1, 1, 256, 128, num_hidden_layers=4, num_attention_heads=2, head_dim=256),
    "hybrid-2x-interval-2": lambda: hybrid(
        2, 2, 48, 96, num_hidden_layers=5, full_attention_interval=2, hidden_size=96, linear_conv_kernel_dim=3
    ),
    "hybrid-3x-tied": lambda: hybrid(
        1, 3, 128, 128, num_hidden_layers=4, full_attention_interval=2, hidden_size=128, tie_word_embeddings=True
    ),
}


def make_checkpoint(kind: str, folder: Path, seed: int = 0) -> Path:
    """Save a random float32 model whose greedy text is not one repeated token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config((CONFIGS | HYBRIDS)[kind](), dtype=torch.float32)
    spread(model)
    model.save_pretrained(folder)
    return folder


def spread(model: torch.nn.Module) -> None:
    """Weights wider than the default, so that the largest logit stands out, the text varies and states matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-6, 1)  # some heads remember hundreds of tokens, others a few
            elif parameter.ndim == 3:
                parameter.normal_(0, 0.5)  # the taps of a convolution: comparable inputs from every place
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.2)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """What transformers generates greedily, ``count`` tokens whatever they are."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def most_likely(model: torch.nn.Module, prompt: list[int], text: list[int]) -> list[int]:
    """The most likely token at each position of ``text``, given the prompt and the text before it, in one pass."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + text[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def load_reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def default_model_reference(path: Path) -> torch.nn.Module:
    """transformers' model of a GGUF file in float32.

    What ``from_pretrained(gguf_file=...)`` does, which insists on the accelerate package without needing it here.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    unpacked = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(unpacked, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model
