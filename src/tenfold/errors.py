"""Every error a user of Tenfold is meant to read, each one line that says what to change.

Standard library only: the core, the engine and the server all raise these.
"""

from __future__ import annotations

import json
from typing import Any


class TenfoldError(Exception):
    """Base of all errors whose message is written for the user; the command line prints it and exits with 1."""


class ModelError(TenfoldError):
    """A model cannot be found, fetched, read or run: the message names the file or model and the reason."""


class RequestError(TenfoldError):
    """A request is refused before it costs anything; over HTTP it is a 400 with OpenAI's error object.

    ``param`` names the offending parameter as the client spelt it, or is None when no single one is at fault.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(TenfoldError):
    """The waiting queue is at its bound; over HTTP it is a 429 with ``Retry-After`` set to ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(TenfoldError):
    """The engine cannot continue a request that it had accepted: a failed step, or a shutdown."""


def shortened(value: Any) -> str:
    """What a message may repeat of a value that a client sent."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:60] + "..."
