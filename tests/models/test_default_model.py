"""The default model itself, out of its real wheel (cached for the user), against transformers reading the same file."""

from __future__ import annotations

import torch

from tenfold.models.hub import DEFAULT_MODEL, resolve
from tenfold.models.loader import load_model


def test_first_prompt(assert_same_logits):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = resolve(DEFAULT_MODEL)
    loaded = load_model(DEFAULT_MODEL, dtype="float32", progress=False)
    assert (loaded.name, loaded.path, loaded.max_context) == (DEFAULT_MODEL, path, 8192)
    tokenizer = loaded.require_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    assert tokenizer.decode(tokens) == prompt
    assert loaded.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    # What from_pretrained(gguf_file=...) does, which insists on the accelerate package without needing it here.
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    unpacked = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    missing, unexpected = reference.load_state_dict(unpacked, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    assert_same_logits(loaded, reference, tokens)
