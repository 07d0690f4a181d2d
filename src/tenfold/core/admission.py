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


class Promises:
    """What running sequences may still take: pages that nobody else is admitted on.

    Those are the blocks that prefills still lack for tokens they already have, the states of ``followers`` that have
    yet to branch off, and the policy's headroom for growth, theirs included. Counting whole prompts rather than their
    first chunks is what keeps a request from being admitted only to be preempted half-way.
    """

    def __init__(self, cache: Cache, policy: Policy, prefilling: Iterable[Sequence], followers: int) -> None:
        self.cache = cache
        self.policy = policy
        size = cache.spec.block_size
        self.growing = sum(len(seq.table) * size < seq.limit - 1 for seq in cache.holders.values()) + followers
        self.lacking = sum(map(self._lack, prefilling)) + followers * cache.spec.slot_pages

    def leave_room(self, seq: Sequence, match: Match) -> bool:
        """Whether all known tokens of ``seq`` and the states of its followers fit beside what is promised."""
        if not self.cache.holders:
            return True
        followers = len(seq.followers)
        headroom = self.policy.headroom(self.growing + followers)
        promised = self.lacking + headroom + followers * self.cache.spec.slot_pages
        return self.cache.fits(seq, match, seq.known, promised)

    def add(self, seq: Sequence) -> None:
        """``seq`` was admitted."""
        followers = len(seq.followers)
        self.growing += followers + (len(seq.table) * self.cache.spec.block_size < seq.limit - 1)
        self.lacking += followers * self.cache.spec.slot_pages + self._lack(seq)

    def _lack(self, seq: Sequence) -> int:
        return self.cache.spec.blocks_for(seq.known) - len(seq.table)
