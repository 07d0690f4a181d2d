"""Every refusal and failure as OpenAI's error object."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tenfold.errors import EngineError, QueueFullError, RequestError, TenfoldError

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(TenfoldError):
    """An answer other than 200, with everything that OpenAI's error object says about it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    """The server is loading or stopping; the client may try again after ``retry_after`` seconds."""
    return ApiError(
        503, message, type=SERVER_ERROR, code="service_unavailable", headers={"Retry-After": str(retry_after)}
    )


def as_api_error(error: Exception, *, stopping: bool = False) -> ApiError:
    """How ``error`` is told to a client. ``stopping``: the server is shutting down, which explains engine errors."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        seconds = max(1, math.ceil(error.retry_after))
        headers = {"Retry-After": str(seconds)}
        return ApiError(429, str(error), type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, EngineError):
        return unavailable(str(error)) if stopping else ApiError(500, str(error), type=SERVER_ERROR)
    return ApiError(500, "internal error: the server's log has the details", type=SERVER_ERROR)


def install_handlers(app: FastAPI) -> None:
    """Let ``app`` answer every exception in OpenAI's shape."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error, stopping=request.app.state.tenfold.stopping).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path, method = request.url.path, request.method
        messages = {404: f"there is nothing at {path}", 405: f"{method} is not allowed at {path}"}
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def gone(request: Request, error: Exception) -> JSONResponse:
        # Nobody reads it. 499 is what the access log of other servers shows for this.
        return JSONResponse(None, 499)

    app.add_exception_handler(TenfoldError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(Exception, known)
