"""What a benchmark hands back, the machine it ran on, and both as Markdown."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import NamedTuple

Row = dict[str, str]
"""One line of a table: column name to cell. All rows of a table name the same columns in the same order."""


class Result(NamedTuple):
    """``rows`` make the table; ``notes`` are sentences printed under it."""

    rows: list[Row]
    notes: list[str]


def cpu_model() -> str:
    """The processor's name as the kernel spells it, or as Python knows it where there is no ``/proc``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_line() -> str:
    return (
        f"{cpu_model()}, {usable_cores()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, {datetime.date.today().isoformat()}"
    )


def table(rows: list[Row]) -> str:
    """A Markdown table whose columns are padded, so that it also reads well in a terminal."""
    columns = list(rows[0])
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
