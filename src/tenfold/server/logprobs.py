"""Tokens with their log probabilities, in the form of chat completions and in that of plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from tenfold.core import TokenLogprobs
from tenfold.engine.text import REPLACEMENT

IMPOSSIBLE = -9999.0
"""What OpenAI sends for a probability of 0, whose logarithm JSON cannot hold."""


class Alternative(NamedTuple):
    """A token, its bytes (which need not be whole characters) and its log probability."""

    text: str
    data: bytes
    logprob: float

    def chat(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.data)}

    @property
    def name(self) -> str:
        """The token as a key: the text, or OpenAI's spelling of bytes where they are no text."""
        if REPLACEMENT in self.text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)
        return self.text


class TokenEntry(NamedTuple):
    """A chosen token beside the most likely ones; ``offset`` is where its text begins in the sample's."""

    chosen: Alternative
    top: tuple[Alternative, ...]
    offset: int


def token_entry(tokenizer: Any, previous: int, token: int, values: TokenLogprobs, offset: int) -> TokenEntry:
    def alternative(token: int, logprob: float) -> Alternative:
        text = _text(tokenizer, previous, token)
        return Alternative(text, token_bytes(tokenizer, token, text), max(logprob, IMPOSSIBLE))

    top = tuple(alternative(other, logprob) for other, logprob in values.top)
    return TokenEntry(alternative(token, values.logprob), top, offset)


def chat_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    content = [{**entry.chosen.chat(), "top_logprobs": [other.chat() for other in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenEntry], asked: int) -> dict[str, Any]:
    """``asked`` is how many alternatives the client wants; the chosen token is always among the shown ones."""
    top = []
    for entry in entries:
        shown = {entry.chosen.name: entry.chosen.logprob}
        for other in entry.top:
            shown.setdefault(other.name, other.logprob)
        top.append(shown)
    return {
        "tokens": [entry.chosen.name for entry in entries],
        "token_logprobs": [entry.chosen.logprob for entry in entries],
        "top_logprobs": top if asked else None,
        "text_offset": [entry.offset for entry in entries],
    }


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """The bytes of a token. ``text`` is its decoding; only where that is not whole does the vocabulary tell them."""
    if REPLACEMENT not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str):
        return text.encode()
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return text.encode()


def _text(tokenizer: Any, previous: int, token: int) -> str:
    """The text that ``token`` adds after ``previous``: on its own, some tokenizers drop its leading space."""
    before = tokenizer.decode([previous], skip_special_tokens=False)
    both: str = tokenizer.decode([previous, token], skip_special_tokens=False)
    if both.startswith(before) and not before.endswith(REPLACEMENT):
        return both[len(before) :]
    return str(tokenizer.decode([token], skip_special_tokens=False))


@cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: printable ones as themselves, others from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
