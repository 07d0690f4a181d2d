from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenfold.errors import TenfoldError
from tenfold.loadtest.sse import MAX_EVENT_BYTES, EventParser

LINE = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=8)
EVENTS = st.lists(st.lists(LINE, min_size=1, max_size=3).filter(any), max_size=5)
NOISE = st.sampled_from([": a comment", ":", "event: x", "id: 1", "retry: 10", "nonsense", "datax: 1"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A stream with all the liberties that the standard leaves, and the data of its events."""
    events = draw(EVENTS)
    stream = draw(st.sampled_from(["", "\ufeff"]))
    for lines in events:
        for line in lines:
            space = " " if line.startswith(" ") else draw(st.sampled_from(["", " "]))
            for noise in draw(st.lists(NOISE, max_size=1)):
                stream += noise + draw(st.sampled_from(["\n", "\r\n", "\r"]))
            # An empty line after a CR would be taken for its LF.
            stream += f"data:{space}{line}" + draw(st.sampled_from(["\n", "\r\n", "\r"]))
        stream += (
            draw(st.sampled_from(["\n", "\r\n"]))
            if not stream.endswith("\r")
            else draw(st.sampled_from(["\r\n", "\r"]))
        )
    return stream.encode(), ["\n".join(lines) for lines in events]


@given(streams(), st.lists(st.integers(0, 400)))
def test_cuts_do_not_matter(stream: tuple[bytes, list[str]], cuts: list[int]) -> None:
    data, expected = stream
    parser, found, before = EventParser(), [], 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        found += parser.feed(data[before:cut])
        before = cut
    assert found == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: [DONE]\n\n", ["[DONE]"]),
        (b"data:x\r\n\r\ndata:  y\r\n\r\n", ["x", " y"]),
        (b": ping\n\n: ping\n\ndata: x\n\n", ["x"]),
        (b"event: message\ndata: 1\ndata: 2\n\n", ["1\n2"]),
        (b"data\n\ndata:\n\n", []),
        (b"data: cut off\n", []),
    ],
)
def test_the_standard(stream: bytes, expected: list[str]) -> None:
    assert EventParser().feed(stream) == expected
    parser = EventParser()
    assert [event for byte in stream for event in parser.feed(bytes([byte]))] == expected


def test_an_event_is_not_held_up_by_half_a_line_end() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\r\n\r") == ["x"]
    assert parser.feed(b"\ndata: y\r\n\r\n") == ["y"]


def test_memory_is_bounded() -> None:
    parser = EventParser()
    with pytest.raises(TenfoldError, match="longer than"):
        for _ in range(MAX_EVENT_BYTES // 2**16 + 1):
            parser.feed(b"data: " + b"x" * 2**16 + b"\n")
    with pytest.raises(TenfoldError, match="longer than"):
        EventParser().feed(b"x" * (MAX_EVENT_BYTES + 1))


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(TenfoldError, match=re.escape("not UTF-8 (at byte 0)")):
        EventParser().feed(b"data: \xff\n\n")
