"""Server-sent events, parsed as they come in."""

from __future__ import annotations

import re

from tenfold.errors import TenfoldError

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_EVENT_BYTES = 2**22


class EventParser:
    """Turns a stream of bytes, cut anywhere, into the data of its events, by the rules of the HTML standard.

    Lines may end with CR, LF or both; comments and fields other than ``data`` are dropped, and so are events without
    data and one that the stream ends in the middle of.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, received: bytes) -> list[str]:
        """The data of each event that ``received`` completes.

        Raises:
            TenfoldError: an event is longer than ``MAX_EVENT_BYTES``, or not UTF-8.
        """
        if not received:
            return []
        # The CR ended its line without waiting for what follows: an event must not be held up by half a line end.
        text = received.removeprefix(b"\n") if self._after_cr else received
        self._after_cr = received.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + text)
        events = [event for line in lines if (event := self._take(line))]
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise TenfoldError(f"an event of the stream is longer than {MAX_EVENT_BYTES:,} bytes")
        return events

    def _take(self, line: bytes) -> str:
        """Add a line to the event; the data of the event if the line ends it, else nothing."""
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            data, self._data, self._size = b"\n".join(self._data), [], 0
            try:
                return data.decode()
            except UnicodeDecodeError as error:
                raise TenfoldError(f"an event of the stream is not UTF-8 (at byte {error.start})") from None
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
        return ""
