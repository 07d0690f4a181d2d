"""The planner's arithmetic, with the figures of a published 27B hybrid as plain numbers."""

from __future__ import annotations

import pytest

from tenfold.core import ModelSpec
from tenfold.errors import ModelError, TenfoldError
from tenfold.planner import Capacity, Description, describe, plan_capacity, pool_on_device, sessions_admitted

MIB, GIB = 2**20, 2**30
POOL = 23_859 * MIB


def planned(
    name: str = "qwen3.8-27b", pool: int = POOL, context: int | None = 32_768, block_size: int = 16, **options: int
) -> Capacity:
    model = ModelSpec.from_config(describe(name).config, name=name)
    return plan_capacity(model, pool, context, block_size, **options)


def test_ten_sessions_paged_where_reservation_fits_one() -> None:
    capacity = planned()
    assert (capacity.model.kv_bytes_per_token, capacity.cache.page_bytes) == (65_536, MIB)
    assert (capacity.cache.num_pages, capacity.cache.slot_pages) == (23_859, 147)
    assert (capacity.session_pages, capacity.session_bytes) == (2_195, 2_195 * MIB)
    assert capacity.reserved_bytes == 16 * GIB + 153_944_064
    assert (capacity.reserved_sessions, capacity.paged_sessions) == (1, 10)


def test_what_is_left_unused() -> None:
    capacity = planned()
    assert (capacity.mean_tail_tokens, capacity.worst_tail_tokens) == (7.5, 15)
    assert capacity.slot_padding == 147 * MIB - 153_944_064 == 192 * 1024


def test_counting_every_layer_as_a_kv_layer_is_wrong_by_four() -> None:
    capacity = planned()
    assert capacity.naive_bytes_per_token == 256 * 1024
    assert capacity.naive_sessions == 2


def test_blocks_padded_to_a_state() -> None:
    padded = planned().padded_blocks()
    assert padded is not None
    assert (padded.block_tokens, padded.block_bytes) == (784, 51_380_224)
    assert (padded.session_blocks, padded.session_blocks_caching) == (45, 48)
    assert (padded.blocks, padded.sessions, padded.sessions_caching) == (486, 10, 10)
    chat = planned(context=512).padded_blocks()
    assert chat is not None
    assert (chat.session_blocks, chat.session_blocks_caching) == (4, 7)
    assert (planned(context=512).paged_sessions, chat.sessions, chat.sessions_caching) == (133, 121, 69)


def test_one_published_count_of_padded_blocks() -> None:
    """A user's log of another engine: 1,487 blocks are 33.04 sessions of 32,768 tokens."""
    padded = planned(pool=1_487 * 51_380_224).padded_blocks()
    assert padded is not None
    assert padded.blocks / padded.session_blocks == pytest.approx(33.04, abs=0.005)


def test_a_dense_model() -> None:
    capacity = planned("smollm2-135m-instruct", GIB, None)
    assert capacity.model.kv_bytes_per_token == capacity.naive_bytes_per_token == 23_040
    assert (capacity.context, capacity.native) == (8_192, 8_192)
    assert (capacity.slot_padding, capacity.padded_blocks()) == (0, None)
    assert capacity.paged_sessions == capacity.reserved_sessions == GIB // (8_192 * 23_040)


@pytest.mark.parametrize("name", ["qwen3.8-27b", "smollm2-135m-instruct"])
@pytest.mark.parametrize("pool", [300 * MIB, POOL])
@pytest.mark.parametrize("context", [1, 100, 4_097, 8_192])
@pytest.mark.parametrize("block_size", [1, 16, 784])
def test_the_allocator_agrees(name: str, pool: int, context: int, block_size: int) -> None:
    capacity = planned(name, min(pool, 2 * GIB) if "smol" in name else pool, context, block_size)
    if capacity.paged_sessions < 5_000:
        assert sessions_admitted(capacity.cache, context) == capacity.paged_sessions


def test_a_context_that_the_model_does_not_have() -> None:
    with pytest.raises(TenfoldError, match="contexts of 1 to 262,144 tokens, not 262,145"):
        planned(context=262_145)
    with pytest.raises(TenfoldError, match="not 0"):
        planned(context=0)
    assert planned(context=262_145, native=1_000_000).reserved_sessions == 0


def test_an_unknown_native_context() -> None:
    config = dict(describe("qwen3.8-27b").config)
    del config["max_position_embeddings"]
    model = ModelSpec.from_config(config, name="m")
    with pytest.raises(TenfoldError, match="give --native-context"):
        plan_capacity(model, POOL, 1_000)
    assert plan_capacity(model, POOL, None, native=9_000).context == 9_000


def test_a_pool_that_holds_nothing() -> None:
    with pytest.raises(ModelError, match="too small"):
        planned(pool=MIB)


def test_the_pool_of_a_device() -> None:
    model = describe("qwen3.8-27b")
    pool = pool_on_device(80 * 10**9, model, 2)
    assert pool.bytes == 80 * 10**9 - 2 * 26_895_998_464 - 10**9
    assert "26,895,998,464 parameters, counted from the configuration" in pool.origin
    pool = pool_on_device(80 * 10**9, model, 2, weights=54 * 10**9, reserve=0)
    assert pool.bytes == 26 * 10**9
    assert pool.origin == "80 GB - 54 GB weights - 0 MB reserve"
    with pytest.raises(TenfoldError, match=r"nothing is left for a pool: .* is 28\.7 GiB short"):
        pool_on_device(24 * 10**9, model, 2)
    with pytest.raises(TenfoldError, match="cannot be counted: give --weights"):
        pool_on_device(24 * 10**9, Description("m", {}, None), 2)
