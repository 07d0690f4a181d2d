"""From tokens back to text, as it comes: never half a character, never the first half of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from tenfold.core import SamplingParams
from tenfold.engine.ports import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: after that many byte-level tokens without one, the bytes are really invalid."""
CONTEXT = 6
"""Tokens decoded again with each new one, at least, so that the tokenizer sees what stands before it."""


class Detokenizer:
    """Decodes one token at a time; the pieces concatenate to the decoding of all tokens at once.

    Text that ends in an incomplete character is held back until the character is whole or cannot become one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        for length in range(CONTEXT, CONTEXT + LONGEST_CHARACTER):
            self._window = list(prompt[-length:])
            if not self._decode().startswith(REPLACEMENT):
                break  # else it begins inside a character
        self._shown = len(self._decode())  # characters of the decoded window that are out
        self._held = 0  # tokens since the text was last whole
        self._cut = 0  # where the window may begin next: never inside a character, which some decoders never forgive

    def push(self, token: int) -> str:
        """The text that ``token`` completes, perhaps empty."""
        self._window.append(token)
        text = self._decode()
        whole = len(text.rstrip(REPLACEMENT))
        if whole == len(text):
            return self._show(text, whole, held=0)
        self._held += 1
        if self._held >= LONGEST_CHARACTER:
            # The bytes are invalid, but the last replacement character may still be the start of a good one.
            return self._show(text, len(text) - 1, held=LONGEST_CHARACTER - 1)
        if whole > self._shown:
            new, self._shown, self._held = text[self._shown : whole], whole, 1
            return new
        return ""

    def flush(self) -> str:
        """The text still held back: only an incomplete character can be, and it decodes to a replacement character."""
        if not self._held:
            return ""
        text = self._decode()
        return self._show(text, len(text), held=0)

    def _show(self, text: str, end: int, held: int) -> str:
        """Give out the decoded window up to ``end``; its last ``held`` tokens may belong to what comes next."""
        new = text[self._shown : end]
        keep = len(text) - end
        if len(self._window) - self._cut >= CONTEXT:
            del self._window[: self._cut]
            self._cut = len(self._window) - held
            text = self._decode()
        self._shown = len(text) - keep
        self._held = min(held, 1)
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip) if self._window else ""


class TextStream:
    """The text of one sequence up to a stop string.

    ``push`` returns what may be shown; ``stopped`` turns true when a stop string appeared, and nothing comes after it.
    A suffix that could be the beginning of a stop string is held back until it is decided. Stop strings are looked for
    in the text of the tokens after the first ``min_tokens``. ``length`` counts the characters of all text decoded so
    far, held back or not: it is where the text of the next token begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self._unstoppable = min_tokens
        self.length = 0
        self.stopped = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> Self:
        """The text of one sequence as ``params`` want it."""
        return cls(
            tokenizer,
            prompt,
            stop=tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def push(self, token: int) -> str:
        if self.stopped:
            return ""
        new = self._detokenizer.push(token)
        if self._unstoppable:
            self._unstoppable -= 1
            self.length += len(new)
            return new
        return self._release(new, final=False)

    def flush(self) -> str:
        """What is still held back, when the sequence ended for another reason."""
        if self.stopped:
            return ""
        return self._release(self._detokenizer.flush(), final=True)

    def _release(self, new: str, *, final: bool) -> str:
        self.length += len(new)
        if not self._stop:
            return new
        text = self._held + new
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: (hit[0], len(hit[1])))
            self.stopped, self._held = True, ""
            return text[: at + len(stop)] if self._include_stop else text[:at]
        keep = 0 if final else max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
