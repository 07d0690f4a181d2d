"""Tokenizers beside the weights, and models that have none."""

from __future__ import annotations

import json

import pytest

from tenfold.errors import ModelError
from tenfold.models.loader import load_model


@pytest.fixture
def folder(make_reference, save):
    return save(make_reference("LlamaForCausalLM"))


def add_tokenizer(folder):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<end>": 3, "hello": 4, "world": 5}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<unk>")), eos_token="<end>")
    wrapped.save_pretrained(folder)


def test_tokenizer_and_stop_ids(folder):
    add_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 4]}))
    loaded = load_model(folder, progress=False)
    assert loaded.require_tokenizer().convert_tokens_to_ids(["hello", "world"]) == [4, 5]
    assert loaded.tokenizer_error is None
    assert loaded.eos_token_ids == {2, 3, 4, 5}


def test_stop_ids_are_stated_not_defaults(folder):
    """Configuration classes fill in token 2 as the end of text, which is any word in another vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    assert load_model(folder, progress=False).eos_token_ids == frozenset()


def test_missing_tokenizer_is_an_error_only_when_needed(folder):
    loaded = load_model(folder, progress=False)
    assert loaded.tokenizer is None
    with pytest.raises(ModelError, match=r"tiny: holds no tokenizer \(looked for tokenizer.json"):
        loaded.require_tokenizer()


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "nonsense"}}'])
def test_damaged_tokenizer(content, folder):
    add_tokenizer(folder)
    (folder / "tokenizer.json").write_text(content)
    loaded = load_model(folder, progress=False)
    with pytest.raises(ModelError, match="tiny: its tokenizer cannot be read") as caught:
        loaded.require_tokenizer()
    assert "\n" not in str(caught.value)
