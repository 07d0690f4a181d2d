"""The ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from tenfold.engine.engine import Engine
from tenfold.server.errors import install_handlers
from tenfold.server.gate import Gate
from tenfold.server.routes import router
from tenfold.server.settings import ServerSettings
from tenfold.server.state import Served, Serving

JOIN_SECONDS = 60.0
"""How long the end of an application waits for the step under way."""


def create_app(engine: Engine, tokenizer: Any, model_name: str, settings: ServerSettings | None = None) -> FastAPI:
    """An application that serves ``engine`` from the start of its lifespan to the end.

    ``tokenizer`` is a transformers tokenizer, or does what one does. The engine must not be used by anyone else
    meanwhile.
    """
    serving = Serving(settings or ServerSettings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        serving.open(Served(engine, tokenizer, model_name))
        try:
            yield
        finally:
            serving.close()
            await asyncio.to_thread(serving.join, JOIN_SECONDS)

    return build_app(serving, lifespan)


def build_app(serving: Serving, lifespan: Any = None) -> FastAPI:
    """An application on a state that somebody else opens and closes."""
    app = FastAPI(title="Tenfold", lifespan=lifespan, openapi_url=None)
    app.state.tenfold = serving
    app.include_router(router)
    app.add_middleware(Gate, serving=serving)
    install_handlers(app)
    return app
