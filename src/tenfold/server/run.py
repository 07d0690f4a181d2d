"""The server as a process: it answers while the model still loads, and leaves in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from tenfold.errors import TenfoldError
from tenfold.server.app import build_app
from tenfold.server.settings import ServerSettings
from tenfold.server.state import Served, Serving

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 3
"""How long connections have to take their last bytes after everything has ended."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients usually keep an idle connection, so that they do not meet one just closed."""
INTERRUPTED = 130
"""Exit status of a process that Ctrl-C ended at once."""


def listen(host: str, port: int) -> socket.socket:
    """Bind ``host:port``; port 0 takes a free one.

    Raises:
        TenfoldError: it is taken, or cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        known = isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno
        reason = os.strerror(known) if known else getattr(error, "strerror", None) or str(error)
        raise TenfoldError(f"cannot listen on {host}:{port}: {reason}") from error


def run(
    load: Callable[[], Served],
    listener: socket.socket,
    settings: ServerSettings,
    ready: Callable[[Served], None] = lambda served: None,
) -> None:
    """Serve on ``listener`` until SIGTERM or Ctrl-C; returns when everything has ended in order.

    ``load`` runs on a thread; while it does, ``/health`` says so and everything else is a 503. ``ready`` is called with
    its result once requests are answered. A second Ctrl-C ends the process at once, with status 130.

    Raises:
        Exception: whatever ``load`` raised.
    """
    serving = Serving(settings)
    server = _Server(serving, load, ready)
    server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure
    if server.loading or not serving.join(LAST_WORDS_SECONDS):
        # A thread inside a native library cannot be ended, and must not run on while the interpreter is taken down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class _Server(uvicorn.Server):
    def __init__(self, serving: Serving, load: Callable[[], Served], ready: Callable[[Served], None]) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(serving),
                lifespan="off",
                log_config=None,
                server_header=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=LAST_WORDS_SECONDS,
            )
        )
        self.failure: BaseException | None = None
        self.loading = True
        self._serving = serving
        self._load = load
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()

        def load() -> None:
            try:
                served = self._load()
            except BaseException as error:
                loop.call_soon_threadsafe(self._fail, error)
            else:
                loop.call_soon_threadsafe(self._open, served)

        threading.Thread(target=load, name="tenfold-load", daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._serving.refuse()
        timeout = self._serving.settings.shutdown_timeout
        if self._serving.active:
            logger.info("finishing %d requests, at most %g s; Ctrl-C ends at once", self._serving.active, timeout)
        if not await self._serving.drained(timeout):
            logger.warning("%d requests did not finish in %g s and are cancelled", self._serving.active, timeout)
        self._serving.close()
        await self._serving.drained(LAST_WORDS_SECONDS)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Unlike uvicorn's, it does not raise the signal again in the end: an orderly exit has status 0.
        if self.should_exit and sig == signal.SIGINT:
            os._exit(INTERRUPTED)
        self.should_exit = True

    def _open(self, served: Served) -> None:
        self.loading = False
        if not self.should_exit:
            self._serving.open(served)
            self._ready(served)

    def _fail(self, error: BaseException) -> None:
        self.loading = False
        self.failure = error
        self.should_exit = True
