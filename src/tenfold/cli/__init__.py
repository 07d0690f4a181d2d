"""The ``tenfold`` command. Importing it is cheap: every command imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tenfold import __version__
from tenfold.cli import bench
from tenfold.cli.chat import chat
from tenfold.cli.generate import generate
from tenfold.cli.models import models
from tenfold.cli.plan import plan
from tenfold.cli.serve import serve
from tenfold.errors import TenfoldError

app = typer.Typer(
    name="tenfold",
    help="Serve language models from paged memory: ten sessions where contiguous reservation fits one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (serve, generate, chat, models, plan):
    app.command()(command)
app.add_typer(bench.app, name="bench")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tenfold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; an error that is written for the user is one line on standard error, and exit status 1."""
    try:
        app()
    except TenfoldError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
