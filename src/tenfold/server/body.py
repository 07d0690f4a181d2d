"""Reading a request's body: bounded, and JSON or a reason why not."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from fastapi import Request

from tenfold.errors import RequestError
from tenfold.server.errors import ApiError, ClientGone

LINGER_SECONDS = 2.0
"""How long the rest of an oversized body is read and dropped, so that its sender gets to read the answer."""
THREAD_BYTES = 2**16
"""Larger bodies are parsed on a thread, so that other streams go on."""


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the body.

    Raises:
        ApiError: 413 for more than ``limit`` bytes, 415 for another content type.
        RequestError: it is not a JSON object, with what is wrong about it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind!r}: send JSON with the header Content-Type: application/json")
    body = await _read(request, limit)
    return await asyncio.to_thread(parse_json, body) if len(body) > THREAD_BYTES else parse_json(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse strictly: no NaN, no lone surrogates, nothing too deep. Raises RequestError."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in body:
            json.dumps(found, ensure_ascii=False).encode("utf-8")  # lone surrogates cannot be text
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 (at byte {error.start})") from None
    except UnicodeEncodeError:
        raise RequestError("the body has an escaped half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError("the body must be a JSON object")
    return found


async def _read(request: Request, limit: int) -> bytes:
    stated = request.headers.get("content-length", "")
    too_large = stated.isdecimal() and int(stated) > limit
    pieces: list[bytes] = []
    size, more = 0, True
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as timer:
            while more:
                if too_large and timer.when() is None:
                    pieces.clear()
                    timer.reschedule(asyncio.get_running_loop().time() + LINGER_SECONDS)
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                more = message.get("more_body", False)
                size += len(message.get("body", b""))
                too_large = too_large or size > limit
                if not too_large:
                    pieces.append(message.get("body", b""))
    if too_large:
        # The rest of the body, if there is any, must not be taken for the next request.
        raise ApiError(413, f"the body exceeds {limit:,} bytes: send less at once", headers={"Connection": "close"})
    return b"".join(pieces)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
