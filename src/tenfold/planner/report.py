"""A capacity as one screen of text, and as plain data for programs."""

from __future__ import annotations

from typing import Any

from tenfold.planner.budget import Pool, decimal
from tenfold.planner.capacity import Capacity, PaddedBlocks
from tenfold.units import format_bytes


def as_data(capacity: Capacity, pool: Pool, dtype: str, parameters: int | None) -> dict[str, Any]:
    """Everything the text says, in bytes, pages and tokens."""
    model, cache, padded = capacity.model, capacity.cache, capacity.padded_blocks()
    token = model.kv_bytes_per_token
    return {
        "model": model.name,
        "dtype": dtype,
        "parameters": parameters,
        "layers": {"attention": len(model.attention), "recurrent": len(model.recurrent)},
        "native_context": capacity.native,
        "context": capacity.context,
        "pool": {"bytes": capacity.pool_bytes, "pages": cache.num_pages, "origin": pool.origin},
        "token_bytes": token,
        "block": {"tokens": cache.block_size, "bytes": cache.page_bytes},
        "state": {
            "bytes": model.state_bytes,
            "pages": cache.slot_pages,
            "padding_bytes": capacity.slot_padding,
        },
        "reserved": {"session_bytes": capacity.reserved_bytes, "sessions": capacity.reserved_sessions},
        "paged": {
            "session_bytes": capacity.session_bytes,
            "session_pages": capacity.session_pages,
            "sessions": capacity.paged_sessions,
        },
        "tail_waste": {
            "mean_tokens": capacity.mean_tail_tokens,
            "mean_bytes": int(capacity.mean_tail_tokens * token),
            "worst_tokens": capacity.worst_tail_tokens,
            "worst_bytes": capacity.worst_tail_tokens * token,
        },
        "every_layer_as_kv": {"token_bytes": capacity.naive_bytes_per_token, "sessions": capacity.naive_sessions},
        "padded_blocks": _padded_data(padded, token) if padded else None,
    }


def _padded_data(padded: PaddedBlocks, token: int) -> dict[str, Any]:
    return {
        "block_tokens": padded.block_tokens,
        "block_bytes": padded.block_bytes,
        "blocks": padded.blocks,
        "session_blocks": padded.session_blocks,
        "sessions": padded.sessions,
        "session_blocks_prefix_caching": padded.session_blocks_caching,
        "sessions_prefix_caching": padded.sessions_caching,
        "mean_tail_tokens": padded.mean_tail_tokens,
        "mean_tail_bytes": int(padded.mean_tail_tokens * token),
    }


def as_text(capacity: Capacity, pool: Pool, dtype: str) -> str:
    """One screen for people."""
    return "\n\n".join(
        "\n".join(part)
        for part in (
            _heading(capacity, pool, dtype),
            _sizes(capacity),
            _sessions(capacity),
            _tails(capacity),
            _comparisons(capacity),
        )
    )


def size(count: float) -> str:
    """As ``format_bytes``, without a decimal that says nothing: ``"64 KiB"``, ``"23.3 GiB"``."""
    return format_bytes(count).replace(".0 ", " ")


def _heading(capacity: Capacity, pool: Pool, dtype: str) -> list[str]:
    model = capacity.model
    kinds = f"{len(model.attention)} of full attention, {len(model.recurrent)} recurrent"
    layers = f"{len(model.layers)} layers ({kinds})" if model.recurrent else f"{len(model.layers)} attention layers"
    return [
        f"{model.name} in {dtype}: {layers}, native context {capacity.native:,} tokens",
        f"pool of {size(capacity.pool_bytes)} = {pool.origin}",
    ]


def _sizes(capacity: Capacity) -> list[str]:
    model, cache = capacity.model, capacity.cache
    state = f"{cache.slot_pages:,}"
    rows = [
        ("memory", "bytes", "", "pages"),
        _row("token", model.kv_bytes_per_token, ""),
        _row(f"block of {cache.block_size} tokens", cache.page_bytes, "1"),
        *([_row("state slot", model.state_bytes, state)] if model.recurrent else []),
        _row(f"session of {capacity.context:,} tokens", capacity.session_bytes, f"{capacity.session_pages:,}"),
        _row("pool", capacity.pool_bytes, f"{cache.num_pages:,}"),
    ]
    return _aligned(rows)


def _row(name: str, count: int, pages: str) -> tuple[str, str, str, str]:
    return name, f"{count:,}", size(count), pages


def _sessions(capacity: Capacity) -> list[str]:
    paged, reserved = capacity.paged_sessions, capacity.reserved_sessions
    each = f"{size(capacity.reserved_bytes)} each"
    times = f"{paged / reserved:,.4g} times as many" if paged > reserved > 0 else ""
    lines = _aligned(
        [
            ("sessions at once", "", "", ""),
            (f"reserved for {capacity.native:,} tokens", f"{reserved:,}", each, ""),
            (f"paged at {capacity.context:,} tokens", f"{paged:,}", f"{size(capacity.session_bytes)} each", times),
        ]
    )
    if not paged:
        lines.append(f"  the longest session that fits has {capacity.cache.max_length:,} tokens")
    return lines


def _tails(capacity: Capacity) -> list[str]:
    token = capacity.model.kv_bytes_per_token
    mean, worst = capacity.mean_tail_tokens, capacity.worst_tail_tokens
    share = mean * token / capacity.session_bytes
    lines = [
        f"unused in a session's last block: {mean:g} tokens = {size(mean * token)} on average "
        f"({share:.2%} of a session), {worst} = {size(worst * token)} at worst"
    ]
    if capacity.slot_padding:
        lines.append(f"unused in a state slot, to make it whole pages: {size(capacity.slot_padding)}")
    return lines


def _comparisons(capacity: Capacity) -> list[str]:
    lines = [f"for comparison, at {capacity.context:,} tokens"]
    padded = capacity.padded_blocks()
    if padded is None:
        return [*lines, "  every layer is a KV layer: the usual calculators agree on the bytes per token"]
    naive, token = capacity.naive_bytes_per_token, capacity.model.kv_bytes_per_token
    lines.append(
        f"  every layer taken for a KV layer: {size(naive)} per token, {naive / token:g} times too much; "
        f"{_count(capacity.naive_sessions)} instead of {capacity.paged_sessions:,}"
    )
    mean = padded.mean_tail_tokens
    lines += [
        f"  blocks padded to the size of a layer's state: {padded.block_tokens:,} tokens, "
        f"{decimal(padded.block_bytes)}; {padded.session_blocks:,} blocks a session: {_count(padded.sessions)}",
        f"    ({padded.session_blocks_caching:,} and {padded.sessions_caching:,} with prefix caching); "
        f"{mean:g} tokens = {size(mean * token)} of a last block unused on average",
    ]
    return lines


def _count(sessions: int) -> str:
    return f"{sessions:,} session" + ("" if sessions == 1 else "s")


def _aligned(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """Columns of common width: names to the left, numbers to the right."""
    name, count, third = 34, 16, 16
    return [
        f"{row[0] if i == 0 else '  ' + row[0]:<{name}}{row[1]:>{count}}{row[2]:>{third}}   {row[3]:>8}".rstrip()
        for i, row in enumerate(rows)
    ]
