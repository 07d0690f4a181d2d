"""OpenAI's objects: chat completions and plain ones, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tenfold.server.logprobs import TokenEntry, chat_logprobs, completion_logprobs
from tenfold.server.samples import Piece


@dataclass
class Form:
    """One answer's identity, and how its choices look. ``logprobs`` is None when none were asked for."""

    model: str
    logprobs: int | None
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = self.prefix + secrets.token_hex(12)

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer at once; ``pieces`` has all of each choice, in order."""
        return self._envelope(self.object, [self.choice(piece) for piece in pieces]) | {"usage": usage}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._envelope(self.chunk_object, [choice])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._envelope(self.chunk_object, []) | {"usage": usage}

    def choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece becomes, one for each chunk."""
        raise NotImplementedError

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class ChatForm(Form):
    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {
            "index": piece.sample,
            "message": message,
            "logprobs": self._logprobs(piece.entries),
            "finish_reason": piece.finish_reason,
        }

    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        choices = []
        if piece.first:
            choices.append(self._delta(piece, {"role": "assistant", "content": "", "refusal": None}))
        if piece.text or piece.entries:
            choices.append(self._delta(piece, {"content": piece.text}, entries=piece.entries))
        if piece.finish_reason is not None:
            choices.append(self._delta(piece, {}, finish_reason=piece.finish_reason))
        return choices

    def _delta(
        self,
        piece: Piece,
        delta: dict[str, Any],
        entries: Sequence[TokenEntry] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(entries) if entries else None
        return {"index": piece.sample, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        return None if self.logprobs is None else chat_logprobs(entries)


class CompletionForm(Form):
    prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else completion_logprobs(piece.entries, self.logprobs)
        return {
            "index": piece.sample,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }

    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        return [self.choice(piece)]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
