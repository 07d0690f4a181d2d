"""``tenfold models``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tenfold.models.hub import ModelEntry, cached_models, known_models
from tenfold.units import format_bytes


def models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array for programs.")] = False) -> None:
    """List the models that have a short name and those on this disk."""
    known = known_models()
    names = {entry.name for entry in known}
    entries = known + [entry for entry in cached_models() if entry.name not in names]
    if as_json:
        typer.echo(json.dumps([described(entry) for entry in entries], indent=2))
        return
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        where = str(entry.path) if entry.path else "fetched on first use"
        typer.echo(f"{entry.name:{width}}  {format_bytes(entry.bytes):>9}  {entry.kind:11}  {where}")
        if entry.summary:
            typer.echo(f"{'':{width}}  {entry.summary}")


def described(entry: ModelEntry) -> dict[str, str | int | None]:
    """An entry as plain data; ``path`` is null until the model is fetched."""
    return {
        "name": entry.name,
        "kind": entry.kind,
        "bytes": entry.bytes,
        "path": str(entry.path) if entry.path else None,
        "summary": entry.summary,
    }
