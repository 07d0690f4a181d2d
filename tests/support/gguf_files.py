"""GGUF files written with the gguf package, of transformers models."""

from __future__ import annotations

import re

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def permuted(tensor, heads):
    """llama.cpp's order of query and key rows, as its convert_hf_to_gguf.py makes it."""
    shape = tensor.shape
    return tensor.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_metadata(writer, config, architecture):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        writer.add_key_length(head_dim)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)


def write_blocks(path, packed, kind):
    """Write a file with one tensor, ``model.layers.0.mlp.up_proj.weight``, of which the bytes are given."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=kind)
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path, model, kind=Kind.F32, extra=lambda writer: None, others=None):
    """Write ``model``, its matrices as ``kind``, or as ``others`` says for a part of their name.

    Leaves in ``model`` the values that unpacking gives back.
    """
    config = model.config
    architecture = ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, config, architecture)
    extra(writer)
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = next((other for part, other in (others or {}).items() if part in name), kind)
        own = own if tensor.ndim == 2 else Kind.F32
        packed = quants.quantize(tensor.numpy(), own)
        tensor.copy_(torch.from_numpy(quants.dequantize(packed, own).copy()))
        if architecture == "llama" and (match := re.search(r"([qk])_proj", name)):
            packed = permuted(packed, config.num_attention_heads if match[1] == "q" else config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=own)
    finish(writer)
    return path
