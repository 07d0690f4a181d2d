"""``tenfold serve``."""

from __future__ import annotations

import gc
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenfold.cli import options
from tenfold.engine.profile import DEFAULT_LIMIT
from tenfold.errors import TenfoldError
from tenfold.units import parse_bytes

if TYPE_CHECKING:
    from tenfold.server.settings import ServerSettings
    from tenfold.server.state import Served


@options.with_engine_options
def serve(
    *,
    engine: dict[str, Any],
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Another name that clients may use for the model; may be repeated.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Demand this key from clients; may be repeated. In the environment, several are separated by spaces.",
            envvar="TENFOLD_API_KEY",
            show_default=False,
        ),
    ] = None,
    max_body: Annotated[str, typer.Option(help="Size of a request's body at most.")] = "32MiB",
    max_queue_requests: Annotated[
        int, typer.Option(help="Sequences that may wait at once; more are refused with status 429.", min=1)
    ] = 1024,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have to finish on Ctrl-C or SIGTERM.", min=0)
    ] = 30.0,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Trace every step to this file (overwritten), for chrome://tracing or ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    profile_limit: Annotated[str, typer.Option(help="Size of that file at most.")] = DEFAULT_LIMIT,
    log_level: options.Level = options.LogLevel.INFO,
) -> None:
    """Serve a model over OpenAI-compatible HTTP."""
    options.configure_logging(log_level)
    try:
        from tenfold.server.run import listen, run
        from tenfold.server.settings import ServerSettings
        from tenfold.server.state import Served
    except ModuleNotFoundError as error:
        raise TenfoldError(f"{error.name} is not installed: run pip install 'tenfold[server]'") from error
    keys = tuple(api_key or ())
    if not all(key.strip() for key in keys):
        raise TenfoldError("an API key is empty: give it a value, or leave the option out")
    settings = ServerSettings(tuple(served_model_name or ()), keys, parse_bytes(max_body), 128, shutdown_timeout)
    listener = listen(host, port)

    def load() -> Served:
        from tenfold.assembly import assemble
        from tenfold.engine.engine import COLLECTOR

        assembly = assemble(model, max_queue=max_queue_requests, profile=profile, profile_limit=profile_limit, **engine)
        # Full collections would walk everything that was loaded, again and again, in the middle of a step.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECTOR)
        return Served(assembly.engine, assembly.loaded.require_tokenizer(), assembly.loaded.name)

    bound = listener.getsockname()[1]
    run(load, listener, settings, lambda served: announce(served, host, bound, settings))


def announce(served: Served, host: str, port: int, settings: ServerSettings) -> None:
    """Say where the model is served, and how to try it."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{reachable}:{port}"
    body = {"model": served.model_name, "messages": [{"role": "user", "content": "Hello!"}]}
    headers = "-H 'Content-Type: application/json'"
    if settings.api_keys:
        headers += ' -H "Authorization: Bearer $TENFOLD_API_KEY"'
    typer.echo(f"Serving {served.model_name} at {url}/v1 - Ctrl-C stops it. Try:")
    typer.echo(f"  curl {url}/v1/chat/completions {headers} -d {shlex.quote(json.dumps(body))}")
