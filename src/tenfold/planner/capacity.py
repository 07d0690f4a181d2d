"""The arithmetic of memory: what a session takes, and how many fit under which discipline.

All sizes are whole bytes, all lengths tokens. The bytes themselves are those of ``tenfold.core.spec``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenfold.core import CacheSpec, ModelSpec
from tenfold.core.spec import FLOAT32_BYTES, RecurrentLayer
from tenfold.errors import TenfoldError


@dataclass(frozen=True)
class PaddedBlocks:
    """The same pool where an attention block is padded until it is as large as the state of a recurrent layer.

    This is how vLLM serves hybrids, with one kind of block: ``block_tokens`` is ``step * ceil(layer_state / (step *
    layer_kv))`` with a step of 16 tokens, the bytes of a recurrent layer's state and those that a token adds to an
    attention layer. A session takes a block for every ``block_tokens`` of its text, and one, or two with prefix
    caching, for each group of as many recurrent layers as there are attention layers.
    """

    block_tokens: int
    block_bytes: int
    blocks: int
    session_blocks: int
    session_blocks_caching: int

    @property
    def sessions(self) -> int:
        return self.blocks // self.session_blocks

    @property
    def sessions_caching(self) -> int:
        return self.blocks // self.session_blocks_caching

    @property
    def mean_tail_tokens(self) -> float:
        return (self.block_tokens - 1) / 2


@dataclass(frozen=True)
class Capacity:
    """A model in a pool: ``context`` tokens a session, ``native`` what reservation has to hold for each."""

    model: ModelSpec
    cache: CacheSpec
    pool_bytes: int
    context: int
    native: int

    @property
    def session_pages(self) -> int:
        """Pages of one session of ``context`` tokens: its blocks and its state slot."""
        return self.cache.pages_for(self.context)

    @property
    def session_bytes(self) -> int:
        return self.session_pages * self.cache.page_bytes

    @property
    def paged_sessions(self) -> int:
        return self.cache.num_pages // self.session_pages

    @property
    def reserved_bytes(self) -> int:
        """One session under reservation: KV of the native context and the state, contiguous, so without rounding."""
        return self.native * self.model.kv_bytes_per_token + self.model.state_bytes

    @property
    def reserved_sessions(self) -> int:
        return self.pool_bytes // self.reserved_bytes

    @property
    def slot_padding(self) -> int:
        """Bytes of a state slot that hold no state, because a slot is whole pages."""
        return self.cache.slot_pages * self.cache.page_bytes - self.model.state_bytes

    @property
    def mean_tail_tokens(self) -> float:
        """Token places of a last block that hold none, if every fill of it is equally likely."""
        return (self.cache.block_size - 1) / 2

    @property
    def worst_tail_tokens(self) -> int:
        """A last block that holds a single token."""
        return self.cache.block_size - 1

    @property
    def naive_bytes_per_token(self) -> int:
        """KV bytes if every layer were an attention layer like the model's own, which recurrent layers are not."""
        return self.model.kv_bytes_per_token // len(self.model.attention) * len(self.model.layers)

    @property
    def naive_sessions(self) -> int:
        """Sessions of ``context`` tokens if every layer were an attention layer."""
        return self.pool_bytes // (self.naive_bytes_per_token * self.context)

    def padded_blocks(self, step: int = 16) -> PaddedBlocks | None:
        """What padded attention blocks would give; None for models without recurrent layers."""
        if not self.model.recurrent:
            return None
        attention = len(self.model.attention)
        state = max(self._layer_state(layer) for layer in self.model.recurrent)
        per_token = self.model.kv_bytes_per_token // attention
        tokens = step * -(-state // (step * per_token))
        size = tokens * self.model.kv_bytes_per_token
        text, groups = -(-self.context // tokens), -(-len(self.model.recurrent) // attention)
        return PaddedBlocks(tokens, size, self.pool_bytes // size, text + groups, text + 2 * groups)

    def _layer_state(self, layer: RecurrentLayer) -> int:
        return FLOAT32_BYTES * layer.state_elements + self.model.element_bytes * layer.convolution_elements


def plan_capacity(
    model: ModelSpec, pool_bytes: int, context: int | None = None, block_size: int = 16, native: int | None = None
) -> Capacity:
    """Divide a pool among sessions of ``context`` tokens: 32,768 unless given, or the native context if that is less.

    Args:
        native: the longest context that the model serves, which reservation holds for every session; the
            configuration's unless given.

    Raises:
        TenfoldError: the context is not one that the model has, or the pool cannot hold one token of one session.
    """
    cache = CacheSpec.for_model(model, pool_bytes, block_size)
    native = native or model.max_context
    if not native:
        raise TenfoldError(f"the configuration of {model.name} has no max_position_embeddings: give --native-context")
    context = min(32_768, native) if context is None else context
    if not 1 <= context <= native:
        raise TenfoldError(f"{model.name} has contexts of 1 to {native:,} tokens, not {context:,}")
    return Capacity(model, cache, pool_bytes, context, native)
