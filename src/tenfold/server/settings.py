"""What may be chosen about a server, apart from the model and the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Options of one HTTP server.

    ``aliases`` are names that clients may use for the model beside its own. With ``api_keys``, every endpoint except
    ``/health`` demands one of them, and prompts of different keys share no prefixes. ``max_body_bytes`` bounds a
    request's body, ``max_prompts`` the prompts in it. ``shutdown_timeout`` is how many seconds running requests have
    to finish once the server is asked to stop.
    """

    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    max_prompts: int = 128
    shutdown_timeout: float = 30.0
