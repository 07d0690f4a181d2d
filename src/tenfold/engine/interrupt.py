"""Ctrl-C between two steps instead of anywhere inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[list[bool]]:
    """Note Ctrl-C instead of raising KeyboardInterrupt.

    Yields a list that is empty until Ctrl-C was pressed. Only the main thread gets signals: nothing changes elsewhere.
    """
    pressed: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def note(signum: int, frame: FrameType | None) -> None:
        pressed.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
