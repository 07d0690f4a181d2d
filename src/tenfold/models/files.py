"""Small helpers for the files of a model and for what goes wrong with them; standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tenfold.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``. Raises ModelError naming the file when it is unreadable or not a JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds a JSON {type(found).__name__} where an object is expected")
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its type when it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
