"""Text as it comes is the text at once, whatever the tokens cut through."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from support.byte_tokenizer import ByteTokenizer
from tenfold.engine.text import REPLACEMENT, Detokenizer, TextStream

TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",), exclude_characters=REPLACEMENT), max_size=40)
SHORT = st.text(alphabet="abé🌍", max_size=30)
STOPS = st.lists(st.text(alphabet="abé🌍", min_size=1, max_size=4), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=30)


class Pieces:
    """A tokenizer whose tokens are arbitrary byte strings, as those of byte-level vocabularies are."""

    def __init__(self, data: bytes, lengths: list[int]) -> None:
        self.pieces: list[bytes] = []
        while data:
            length = lengths[len(self.pieces) % len(lengths)]
            self.pieces.append(data[:length])
            data = data[length:]

    @property
    def ids(self) -> range:
        return range(len(self.pieces))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids, *, skip_special_tokens: bool = False) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode("utf-8", errors="replace")


@given(TEXT, CUTS)
def test_pieces_are_the_whole(text: str, lengths: list[int]) -> None:
    tokenizer = Pieces(text.encode(), lengths)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer.ids]
    assert not any(REPLACEMENT in piece for piece in pieces), "never half a character"
    assert "".join(pieces) == text, "nothing is held back once a character is whole"
    assert detokenizer.flush() == ""


@given(st.binary(max_size=60), CUTS)
def test_pieces_of_any_bytes_are_the_whole(data: bytes, lengths: list[int]) -> None:
    tokenizer = Pieces(data, lengths)
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(token) for token in tokenizer.ids) + detokenizer.flush()
    assert text == data.decode("utf-8", errors="replace")


class ByteFallback:
    """The real decoder of SentencePiece vocabularies: it gives up on a whole run of bytes for one that is wrong."""

    def __init__(self) -> None:
        self._decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.pieces: list[str] = []

    def add(self, text: str) -> list[int]:
        """Letters are tokens, with the space before them; everything else is bytes."""
        start = len(self.pieces)
        for piece in re.findall(" ?[a-z]|.", text, re.DOTALL):
            if piece.strip().isascii():
                self.pieces.append(piece.replace(" ", "\u2581"))
            else:
                self.pieces += [f"<0x{byte:02X}>" for byte in piece.encode()]
        return list(range(start, len(self.pieces)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids, *, skip_special_tokens: bool = False) -> str:
        return self._decoder.decode([self.pieces[token] for token in token_ids])


@given(st.text(alphabet="ab é🌍漢", max_size=30), st.text(alphabet="ab é🌍漢", max_size=30))
def test_bytes_that_fall_back(before: str, after: str) -> None:
    tokenizer = ByteFallback()
    prompt, tokens = tokenizer.add("x" + before), tokenizer.add(after)
    detokenizer = Detokenizer(tokenizer, prompt)
    assert "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush() == after
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in prompt + tokens]
    assert "".join(pieces) == "x" + before + after
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(TEXT, TEXT, CUTS)
def test_the_text_after_a_prompt(before: str, after: str, lengths: list[int]) -> None:
    start = Pieces(before.encode(), lengths)
    tokenizer = Pieces(after.encode(), lengths)
    tokenizer.pieces = start.pieces + tokenizer.pieces
    prompt = list(start.ids)
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = [detokenizer.push(token) for token in tokenizer.ids[len(prompt) :]]
    assert "".join(pieces) + detokenizer.flush() == after


@given(SHORT, CUTS)
def test_bytes_one_by_one(text: str, lengths: list[int]) -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer)
    shown = ""
    for token in text.encode():
        shown += stream.push(token)
        assert text.startswith(shown)
        assert stream.length == len(shown)
    assert shown + stream.flush() == text


@given(SHORT, CUTS, STOPS, st.booleans())
def test_stop_strings(text: str, lengths: list[int], stops: list[str], include: bool) -> None:
    tokenizer = Pieces(text.encode(), lengths)
    stream = TextStream(tokenizer, stop=stops, include_stop=include)
    shown, decoded, expected = "", b"", None
    for token in tokenizer.ids:
        decoded += tokenizer.pieces[token]
        so_far = decoded.decode("utf-8", errors="ignore")
        found = [(so_far.find(stop), len(stop)) for stop in stops if stop in so_far]
        shown += stream.push(token)
        assert stream.stopped == bool(found), "at the first token that completes one"
        if found:
            at, length = min(found)
            expected = so_far[: at + length * include]
            break
        assert so_far.startswith(shown)
        held = so_far[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops), "no more is held back than needed"
        longest = [stop[:n] for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])]
        assert len(held) == max(map(len, longest)), "never the first half of a stop string"
    shown += stream.flush()
    assert shown == (text if expected is None else expected)
    assert stream.push(0) == "" if stream.stopped and tokenizer.pieces else True


@given(SHORT, STOPS, st.integers(0, 12))
def test_stop_strings_after_a_minimum(text: str, stops: list[str], minimum: int) -> None:
    stream = TextStream(ByteTokenizer(), stop=stops, min_tokens=minimum)
    data = text.encode()
    shown = "".join(stream.push(token) for token in data) + stream.flush()
    free = len(data[:minimum].decode("utf-8", errors="ignore"))
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, free)) >= 0]
    assert shown == (text[: min(found)[1]] if found else text), "cut where the first to be complete begins"
