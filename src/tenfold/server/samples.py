"""The text of each sample as its tokens come, and the pieces of it that may be shown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from tenfold.core import FinishReason, SamplingParams, TokenEvent
from tenfold.engine.ranking import Score
from tenfold.engine.service import Generation
from tenfold.engine.text import TextStream
from tenfold.server.logprobs import TokenEntry, token_entry


class Piece(NamedTuple):
    """What became known of one sample: perhaps text, perhaps that it ended. ``first``: nothing was shown before."""

    sample: int
    first: bool
    text: str
    entries: tuple[TokenEntry, ...]
    finish_reason: str | None


class Sample:
    """One choice of an answer, or a candidate for one.

    ``tokens`` counts the generated ones, the one that ended it included; ``reused`` those of its prompt that were found
    in the cache. ``score`` is kept where ``SamplingParams.best_of`` ranks the samples.
    """

    def __init__(self, index: int, tokenizer: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        self.index = index
        self.tokens = 0
        self.reused = 0
        self.score = Score()
        self._ranked = params.samples > params.n
        self._with_entries = params.logprobs is not None
        self._tokenizer = tokenizer
        self._stream = TextStream.of(tokenizer, prompt, params)
        self._previous = prompt[-1]
        self._text = ""  # may be shown, and is not yet
        self._shown = 0  # characters that may be shown
        self._entries: list[TokenEntry] = []  # of tokens whose text is not shown yet
        self._finish_reason: str | None = None
        self._first = True

    def push(self, event: TokenEvent) -> bool:
        """Take a token; True if it completed a stop string, so that the sequence has to be ended."""
        if self._finish_reason is not None:
            return False
        self.tokens += 1
        self.reused = event.reused
        if self._ranked:
            self.score.add(event)
        if event.finish_reason is FinishReason.STOP:  # the token is the one that says so, and no part of the text
            self._end(FinishReason.STOP)
            return False
        if self._with_entries and event.logprobs is not None:
            self._entries.append(
                token_entry(self._tokenizer, self._previous, event.token, event.logprobs, self._stream.length)
            )
        self._previous = event.token
        self._show(self._stream.push(event.token))
        if self._stream.stopped:
            self._end(FinishReason.STOP)
            return event.finish_reason is None
        if event.finish_reason is not None:
            self._end(event.finish_reason)
        return False

    def take(self) -> Piece | None:
        """What may be shown now, or None when there is nothing new."""
        if not self._text and self._finish_reason is None:
            return None
        # A token whose text begins in what is shown goes with it; one beyond a stop string's cut is no part of it.
        ready = sum(entry.offset < self._shown for entry in self._entries)
        if self._finish_reason is not None and not self._stream.stopped:
            ready = len(self._entries)
        piece = Piece(self.index, self._first, self._text, tuple(self._entries[:ready]), self._finish_reason)
        self._text, self._entries, self._first = "", self._entries[ready:], False
        return piece

    def _show(self, text: str) -> None:
        self._text += text
        self._shown += len(text)

    def _end(self, reason: FinishReason) -> None:
        self._show(self._stream.flush())
        self._finish_reason = (FinishReason.STOP if self._stream.stopped else reason).value


async def pieces(generation: Generation, samples: Sequence[Sample]) -> AsyncIterator[list[Piece]]:
    """Yield what may be shown, one piece for each sample that has something new, until all have ended.

    Raises:
        EngineError: as iterating a Generation.
    """
    async for events in generation:
        touched: dict[int, Sample] = {}
        for index, event in events:
            touched[index] = samples[index]
            if samples[index].push(event):
                generation.finish(index)
        ready = [piece for sample in touched.values() if (piece := sample.take()) is not None]
        if ready:
            yield ready
