"""The arena as text: whose page is whose."""

from __future__ import annotations

from collections.abc import Mapping

from tenfold.core import Cache
from tenfold.core.arena import CACHED

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FREE_MARK, CACHED_MARK, SHARED_MARK, RESERVED_MARK = "·", "-", "*", "░"
COLOURS = (167, 173, 179, 143, 107, 72, 73, 74, 68, 104, 140, 175)
"""Of the 256 colours of a terminal: twelve of similar brightness, around the wheel."""
_RESET = "\x1b[0m"


def draw(
    cache: Cache,
    width: int = 96,
    rows: int = 8,
    colour: bool = False,
    letters: Mapping[int, str] | None = None,
    reserved: int = 0,
) -> str:
    """Draw the pages of ``cache`` from page 0 on, line by line.

    A small letter is a block of keys and values, a capital the state slot of the same sequence, ``*`` a block that
    several sequences share, ``-`` what is cached for reuse and ``·`` a free page.

    Args:
        width: characters of a line.
        rows: lines at most; an arena of more pages is drawn with a character for several, the first of which counts.
        colour: paint every sequence in a colour of its own, for a terminal of 256 colours.
        letters: the small letter of each sequence by id; by default they are dealt out in order of admission.
        reserved: blocks that every sequence is promised; those it has not filled are drawn as ``░`` over free pages.
    """
    letters = letters if letters is not None else _dealt(cache)
    marks = page_marks(cache, letters)
    promised = sum(max(0, reserved - len(seq.table)) for seq in cache.holders.values())
    for page in [page for page, mark in enumerate(marks) if mark == FREE_MARK][:promised]:
        marks[page] = RESERVED_MARK
    each = -(-len(marks) // (width * rows))
    marks = marks[::each]
    lines = [marks[first : first + width] for first in range(0, len(marks), width)]
    return "\n".join(_painted(line) if colour else "".join(line) for line in lines)


def page_marks(cache: Cache, letters: Mapping[int, str]) -> list[str]:
    """One character for each page."""
    spec, owners = cache.spec, cache.arena.owners
    marks = [CACHED_MARK if state == CACHED else FREE_MARK for state in owners]
    for checkpoint in cache.index.checkpoints.values():
        first = spec.slot_page(checkpoint.slot)
        marks[first : first + spec.slot_pages] = CACHED_MARK * spec.slot_pages
    for seq in cache.holders.values():
        letter = letters.get(seq.id, "?")
        for page in seq.table:
            marks[page] = letter if owners[page] == 1 else SHARED_MARK
        if spec.slot_pages:
            first = spec.slot_page(seq.slot)
            marks[first : first + spec.slot_pages] = letter.upper() * spec.slot_pages
    return marks


def _dealt(cache: Cache) -> dict[int, str]:
    return {seq: LETTERS[place % len(LETTERS)] for place, seq in enumerate(cache.holders)}


def _painted(line: list[str]) -> str:
    """Runs of one character share an escape sequence."""
    parts, before = [], ""
    for mark in line:
        code = _code(mark)
        parts.append(mark if code == before else f"{_RESET}{code}{mark}")
        before = code
    return "".join(parts) + _RESET


def _code(mark: str) -> str:
    if mark.lower() in LETTERS:
        shade = COLOURS[LETTERS.index(mark.lower()) % len(COLOURS)]
        return f"\x1b[38;5;16;48;5;{shade}m" if mark.islower() else f"\x1b[1;38;5;231;48;5;{shade}m"
    return "\x1b[38;5;130m" if mark == RESERVED_MARK else "\x1b[38;5;240m"
