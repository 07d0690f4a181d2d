"""OpenAI-compatible HTTP over one engine. Knows the engine and the core, never torch or the models."""

from tenfold.server.app import create_app
from tenfold.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
