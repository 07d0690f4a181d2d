"""Can it ever fit, may it start now: admission counts blocks before a request costs anything."""

from __future__ import annotations

from collections.abc import Iterable

from tenfold.core.cache import Cache, Match
from tenfold.core.policy import Policy
from tenfold.core.sequence import Sequence
from tenfold.core.spec import CacheSpec
from tenfold.core.types import Request
from tenfold.errors import RequestError


def positions(request: Request) -> int:
    """Positions that are ever computed: the last token of a full text is sampled but never an input."""
    return len(request.prompt) + request.max_tokens - 1


def refuse_impossible(request: Request, spec: CacheSpec) -> None:
    """Raise RequestError if the request could not run even alone in an empty arena."""
    if not request.prompt:
        raise RequestError("the prompt is empty: send at least one token", "prompt")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {request.max_tokens}", "max_tokens")
    length = positions(request)
    if request.params.use_beam_search and spec.pages_for(length) * request.params.beam_width > spec.num_pages:
        raise RequestError(
            f"{request.params.beam_width} beams of {length} tokens can need {spec.pages_for(length)} pages each and "
            f"the arena has {spec.num_pages}: lower beam_width or max_tokens, shorten the prompt or enlarge the arena",
            "beam_width",
            "context_length_exceeded",
        )
    if spec.pages_for(length) > spec.num_pages:
        slots = "" if not spec.slot_pages else f" and 1 state slot of {spec.slot_pages} pages"
        raise RequestError(
            f"{len(request.prompt)} prompt tokens plus max_tokens {request.max_tokens} need "
            f"{spec.blocks_for(length)} blocks of {spec.block_size} tokens{slots}; the arena has "
            f"{spec.num_pages} pages: at most {spec.max_length + 1} tokens in all fit. "
            "Lower max_tokens, shorten the prompt or enlarge the arena",
            "max_tokens",
            "context_length_exceeded",
        )


def may_start(
    seq: Sequence, match: Match, cache: Cache, policy: Policy, prefilling: Iterable[Sequence], followers: int = 0
) -> bool:
    """Whether all known tokens of ``seq`` fit beside what running sequences were promised.

    Promised are the blocks that running prefills still lack for tokens they already have, the states of ``followers``
    that have yet to branch off, and the policy's headroom for growth, theirs included. Counting the whole prompt rather than its first chunk is what keeps a request from being admitted only
    to be preempted half-way.
    """
    if not cache.holders:
        return True
    spec = cache.spec
    growing = sum(len(other.table) < spec.blocks_for(other.limit - 1) for other in cache.holders.values())
    promised = policy.headroom(growing + followers) + followers * spec.slot_pages
    for other in prefilling:
        promised += spec.blocks_for(other.known) - len(other.table)
    return cache.fits(seq, match, seq.known, promised)
