"""One running branch of text: its tokens and its counters."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tenfold.core.prefix import root
from tenfold.core.types import Request

if TYPE_CHECKING:
    from tenfold.core.beam import BeamSearch

NO_SLOT = -1
NO_ROW = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """``0 <= committed <= issued <= len(tokens) + pending``, and no flag for prefill or decode anywhere.

    Positions below ``issued`` were handed to the device, those below ``committed`` came back. ``pending`` tokens are
    being sampled and not known here yet. Preemption resets the counters and raises ``epoch``: outcomes of an older
    epoch are void. ``table`` maps block index to page and covers exactly the issued positions.

    ``keys`` name the full blocks of its tokens, the first ``published`` of which others may share. ``reused`` tokens
    were found in the cache on first admission. ``marks`` are positions ahead at which its state is worth a checkpoint.
    ``shared_tail`` says that the block it writes next may belong to others too. ``followers`` are further samples of
    the same prompt, which branch off when it is computed.
    A beam belongs to a ``search``, which decides on its tokens: a step of it ``draws`` none.
    """

    request: Request
    tokens: array[int]
    limit: int
    min_length: int
    committed: int = 0
    issued: int = 0
    pending: int = 0
    epoch: int = 0
    row: int = NO_ROW
    slot: int = NO_SLOT
    table: list[int] = field(default_factory=list)
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    reused: int = 0
    shared_tail: bool = False
    marks: list[int] = field(default_factory=list)
    followers: list[Sequence] = field(default_factory=list)
    search: BeamSearch | None = None
    draws: int = 1
    id: int = field(init=False)  # the request's, and so are the tokens that end it: both are read for every token
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.stop_token_ids = self.request.stop_token_ids

    @classmethod
    def of(cls, request: Request) -> Sequence:
        prompt = len(request.prompt)
        return cls(
            request,
            array("q", request.prompt),
            prompt + request.max_tokens,
            prompt + request.params.min_tokens,
            root=root(request.cache_salt),
        )

    @property
    def known(self) -> int:
        """Tokens that exist or are being sampled."""
        return len(self.tokens) + self.pending

    @property
    def want(self) -> int:
        """Positions that could be issued now. The last token of a full text is never an input."""
        return 0 if self.known >= self.limit else self.known - self.issued

    def reset(self) -> None:
        """Forget everything computed: the tokens stay, and the next epoch computes them again."""
        self.committed = self.issued = self.pending = self.published = 0
        self.marks = []
        self.epoch += 1
