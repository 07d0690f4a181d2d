"""Small random checkpoints of real architectures, made with transformers, and what transformers itself generates."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

BASE = {
    "vocab_size": 211,
    "hidden_size": 48,
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


def make_checkpoint(kind: str, folder: Path, seed: int = 0) -> Path:
    """Save a random float32 model whose greedy text is not one repeated token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
    spread(model)
    model.save_pretrained(folder)
    return folder


def spread(model: torch.nn.Module) -> None:
    """Weights wider than the default, so that the largest logit stands out and the text varies."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
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
