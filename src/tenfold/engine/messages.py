"""Conversations as clients write them: contents in parts, and marks where a later prompt may go on differently."""

from __future__ import annotations

from typing import Any, NamedTuple

from tenfold.engine.ports import Messages
from tenfold.errors import RequestError, shortened

MAX_MARKS = 4
"""Explicit marks in one conversation; every one costs a rendering."""


class Mark(NamedTuple):
    """A place in a conversation: after that many characters of a message's content, or after the whole message."""

    message: int
    characters: int | None = None


def plain_messages(messages: Messages) -> tuple[Messages, list[Mark]]:
    """The messages as chat templates know them, and the places that ``cache_control`` marks.

    A content in parts becomes one string. ``{"cache_control": {"type": "ephemeral"}}`` may stand in a text part or in a
    message, and marks the end of it.

    Raises:
        RequestError: a part is not text, or a mark is not of that form; ``param`` names it.
    """
    plain: Messages = []
    marks: list[Mark] = []
    for place, message in enumerate(messages):
        at = f"messages[{place}]"
        if not isinstance(message, dict):
            raise RequestError(f"{at} must be an object, not {shortened(message)}", at, "invalid_type")
        kept = {name: value for name, value in message.items() if name != "cache_control"}
        if isinstance(kept.get("content"), list):
            kept["content"], ends = _joined(kept["content"], f"{at}.content")
            length = len(kept["content"])
            marks += [Mark(place, end if end < length else None) for end in ends]
        if _marked(message, at):
            marks.append(Mark(place))
        plain.append(kept)
    marks = list(dict.fromkeys(marks))
    if len(marks) > MAX_MARKS:
        raise RequestError(f"messages have {len(marks)} marks of cache_control: set at most {MAX_MARKS}", "messages")
    return plain, marks


def _joined(parts: list[Any], at: str) -> tuple[str, list[int]]:
    """The text of all parts, and the lengths after which one ends that is marked."""
    text, ends = "", []
    for place, part in enumerate(parts):
        where = f"{at}[{place}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(
                f"{where}: parts of type {shortened(kind)} are not supported: send text", where, "unsupported_parameter"
            )
        for name, value in part.items():
            if name not in ("type", "text", "cache_control") and value is not None:
                where = f"{where}.{str(name)[:80]}"
                raise RequestError(f"{where} is not supported: leave it out", where, "unsupported_parameter")
        if not isinstance(part.get("text"), str):
            where = f"{where}.text"
            raise RequestError(f"{where} must be a string, not {shortened(part.get('text'))}", where, "invalid_type")
        text += part["text"]
        if _marked(part, where):
            ends.append(len(text))
    return text, ends


def _marked(holder: dict[str, Any], at: str) -> bool:
    control = holder.get("cache_control")
    if control is None:
        return False
    at = f"{at}.cache_control"
    if not isinstance(control, dict):
        raise RequestError(f"{at} must be an object, not {shortened(control)}", at, "invalid_type")
    for name, value in control.items():
        if name != "type" and value is not None:
            where = f"{at}.{str(name)[:80]}"
            raise RequestError(f"{where} is not supported: leave it out", where, "unsupported_parameter")
    if control.get("type") != "ephemeral":
        where = f"{at}.type"
        raise RequestError(
            f'{where} {shortened(control.get("type"))} is not supported: send "ephemeral"', where, "invalid_value"
        )
    return True
