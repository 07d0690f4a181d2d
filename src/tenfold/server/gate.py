"""What every request passes first: its key, and whether the server takes requests at all."""

from __future__ import annotations

import hmac

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tenfold.server.errors import ApiError, unavailable
from tenfold.server.state import Serving, Status

OPEN_PATH = "/health"
METRICS_PATH = "/metrics"


class Gate:
    """Plain ASGI, so that it costs streams nothing."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        self._keys = [key.encode() for key in serving.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == OPEN_PATH:
            await self._app(scope, receive, send)
            return
        place = self._key_place(scope)
        if place is not None:
            scope.setdefault("state", {})["tenant"] = f"{place}:"
        error = self._wrong_key(scope, place) or self._not_ready(scope)
        if error is not None:
            response: JSONResponse = error.response()
            await response(scope, receive, send)
            return
        self._serving.active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._serving.active -= 1

    def _key_place(self, scope: Scope) -> int | None:
        """Which of the keys the request has; None without a right one."""
        scheme, _, key = _authorization(scope).partition(b" ")
        # Every key is compared, in constant time, so that the time taken tells nothing about them.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None

    def _wrong_key(self, scope: Scope, place: int | None) -> ApiError | None:
        if not self._keys or place is not None:
            return None
        message = "the API key is wrong" if _authorization(scope) else "an API key is needed"
        return ApiError(
            401,
            f"{message}: send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _not_ready(self, scope: Scope) -> ApiError | None:
        status = self._serving.status
        if status is Status.READY or (scope["path"] == METRICS_PATH and self._serving.metrics is not None):
            return None
        if status is Status.LOADING:
            return unavailable("the model is still loading: try again in a moment", retry_after=2)
        if status is Status.STOPPING:
            return unavailable("the server is shutting down")
        return unavailable("the engine has failed: the server's log says why, and it must be restarted", 60)


def _authorization(scope: Scope) -> bytes:
    found: bytes = dict(scope["headers"]).get(b"authorization", b"")
    return found
