"""What the endpoints share: the engine's thread, the tokenizer, and whether the server is ready."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tenfold.engine.engine import Engine
from tenfold.engine.service import EngineThread
from tenfold.server.errors import ApiError
from tenfold.server.metrics import EngineMetrics
from tenfold.server.settings import ServerSettings


class Status(StrEnum):
    LOADING = "loading"
    READY = "ok"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True)
class Served:
    """A model that is ready to answer. ``tokenizer`` is a transformers tokenizer or does what one does."""

    engine: Engine
    tokenizer: Any
    model_name: str


class Serving:
    """The state of one server: loading, then ready, then stopping. Used on the server's asyncio loop only."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.active = 0  # requests being handled
        self._stopping = False
        self._served: Served | None = None
        self._thread: EngineThread | None = None
        self._metrics: EngineMetrics | None = None

    def open(self, served: Served) -> None:
        """Start the engine's thread: from now on requests are answered."""
        self._served = served
        self._thread = EngineThread(served.engine)
        self._metrics = EngineMetrics(self._thread)

    def refuse(self) -> None:
        """From now on new requests are refused."""
        self._stopping = True

    async def drained(self, seconds: float) -> bool:
        """Wait until no request is being handled, at most ``seconds``; True if that came to be."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.active and loop.time() < deadline:
            await asyncio.sleep(0.02)
        return not self.active

    def close(self) -> None:
        """End what still runs, with an error to its clients, and stop the engine's thread."""
        self._stopping = True
        if self._thread is not None:
            self._thread.stop()

    def join(self, seconds: float) -> bool:
        """After ``close``, wait for the step under way to end; True if it did. Blocks."""
        return self._thread is None or self._thread.join(seconds)

    @property
    def status(self) -> Status:
        if self._stopping:
            return Status.STOPPING
        if self._thread is None:
            return Status.LOADING
        return Status.READY if self._thread.alive else Status.FAILED

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def thread(self) -> EngineThread:
        assert self._thread is not None, "the gate lets no request in before"
        return self._thread

    @property
    def metrics(self) -> EngineMetrics | None:
        return self._metrics

    @property
    def engine(self) -> Engine:
        return self._opened.engine

    @property
    def tokenizer(self) -> Any:
        return self._opened.tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model: its own name, then the aliases."""
        return tuple(dict.fromkeys((self._opened.model_name, *self.settings.aliases)))

    def require_model(self, name: str | None) -> None:
        """Raise ApiError 404 if ``name`` is not what is served; None is fine."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; served is {' or '.join(self.names)}",
                code="model_not_found",
            )

    @property
    def _opened(self) -> Served:
        assert self._served is not None, "the gate lets no request in before"
        return self._served
