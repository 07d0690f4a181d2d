"""The arithmetic of memory, with the figures of a published hybrid model as plain numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tenfold.core import Cache, CacheSpec, ModelSpec, Request, Sequence
from tenfold.core.cache import NOTHING
from tenfold.errors import ModelError

MIB = 2**20
POOL = 23_859 * MIB
"""What an 80 GB device has left for the cache beside the weights of the model below."""

QWEN_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
}
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_the_bytes_of_a_27b_hybrid() -> None:
    model = ModelSpec.from_config(QWEN_27B)
    assert (len(model.attention), len(model.recurrent)) == (16, 48)
    assert model.kv_bytes_per_token == 65_536
    assert model.recurrent[0].convolution_channels == 10_240
    assert 4 * model.recurrent[0].state_elements * 48 == 144 * MIB
    assert 2 * model.recurrent[0].convolution_elements * 48 == 2_949_120
    assert model.state_bytes == 153_944_064 == 48 * 3_207_168
    assert model.max_context == 262_144
    assert model.kv_bytes_per_token * model.max_context == 16 * 2**30


def test_the_pages_of_a_27b_hybrid() -> None:
    spec = CacheSpec.for_model(ModelSpec.from_config(QWEN_27B), POOL)
    assert (spec.block_size, spec.num_pages, spec.slot_pages, spec.page_bytes) == (16, 23_859, 147, MIB)
    assert spec.pages_for(32_768) == 2_048 + 147
    assert spec.num_slots == 162


def test_ten_sessions_fit_where_reservation_fits_one() -> None:
    spec = CacheSpec.for_model(ModelSpec.from_config(QWEN_27B), POOL)
    assert spec.num_pages // spec.pages_for(262_144) == 1
    cache = Cache(spec)
    sessions = [Sequence.of(Request(i, (0,), 1)) for i in range(11)]
    assert [cache.admit(seq, NOTHING, 32_768) for seq in sessions] == [True] * 10 + [False]


def test_a_cache_in_a_wider_type_takes_more_but_the_matrix_state_is_float32_already() -> None:
    narrow, wide = ModelSpec.from_config(QWEN_27B), ModelSpec.from_config(QWEN_27B, element_bytes=4)
    assert wide.kv_bytes_per_token == 2 * narrow.kv_bytes_per_token
    assert wide.state_bytes - narrow.state_bytes == 2_949_120


def test_layers_are_read_from_a_list_as_from_an_interval() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16
    listed = without(QWEN_27B, "full_attention_interval") | {"layer_types": kinds}
    assert ModelSpec.from_config(listed) == ModelSpec.from_config(QWEN_27B)
    assert ModelSpec.from_config(without(QWEN_27B, "full_attention_interval")) == ModelSpec.from_config(QWEN_27B)


def test_the_text_part_of_a_multimodal_configuration_counts() -> None:
    nested = {"model_type": "qwen3_5", "vision_config": {"num_hidden_layers": 27}, "text_config": QWEN_27B}
    assert ModelSpec.from_config(nested) == ModelSpec.from_config(QWEN_27B)


def test_a_dense_model_has_no_slots() -> None:
    model = ModelSpec.from_config(DENSE, name="small")
    assert (model.name, len(model.attention), model.recurrent) == ("small", 30, ())
    assert model.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert model.state_bytes == 0
    spec = CacheSpec.for_model(model, 256 * MIB)
    assert (spec.slot_pages, spec.num_slots) == (0, 0)
    assert spec.pages_for(17) == spec.blocks_for(17) == 2
    assert spec.max_length == spec.num_pages * 16


def test_every_head_is_a_kv_head_unless_the_configuration_says_otherwise() -> None:
    model = ModelSpec.from_config(without(DENSE, "num_key_value_heads"))
    assert model.attention[0].kv_heads == 9


def test_blocks_round_up_and_slots_count_from_the_top() -> None:
    spec = CacheSpec(block_size=4, num_pages=11, slot_pages=3)
    assert [spec.blocks_for(length) for length in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert [spec.slot_page(slot) for slot in range(spec.num_slots)] == [8, 5, 2]
    assert spec.max_length == 32
    assert spec.pages_for(spec.max_length) == spec.num_pages


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=f"small has no '{name}'"):
        ModelSpec.from_config(without(DENSE, name), name="small")


@pytest.mark.parametrize("name", ["linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim"])
def test_a_missing_field_of_recurrent_layers_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        ModelSpec.from_config(without(QWEN_27B, name))


def test_an_unknown_layer_type_is_named() -> None:
    with pytest.raises(ModelError, match="'sliding_attention'"):
        ModelSpec.from_config(DENSE | {"layer_types": ["sliding_attention"] * 30})


def test_layer_types_must_agree_with_the_count() -> None:
    with pytest.raises(ModelError, match="names 2 layers and num_hidden_layers says 30"):
        ModelSpec.from_config(DENSE | {"layer_types": ["full_attention"] * 2})


def test_a_pool_below_one_block_and_one_slot_is_refused() -> None:
    model = ModelSpec.from_config(QWEN_27B)
    assert CacheSpec.for_model(model, 148 * MIB).max_length == 16
    with pytest.raises(ModelError, match="155,189,248 bytes"):
        CacheSpec.for_model(model, 148 * MIB - 1)


def test_a_model_without_full_attention_is_refused() -> None:
    model = ModelSpec.from_config(QWEN_27B | {"layer_types": ["linear_attention"] * 64})
    with pytest.raises(ModelError, match="no full-attention layer"):
        CacheSpec.for_model(model, POOL)


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_an_impossible_cache_is_a_value_error(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="impossible cache"):
        CacheSpec(*sizes)
