"""Sizes in bytes as people write them: 1 GB is 1e9 bytes, 1 GiB is 2**30."""

from __future__ import annotations

import re

from tenfold.errors import TenfoldError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_bytes(size: str | int) -> int:
    """Bytes in ``size``, for example ``"2GiB"``, ``"80 GB"`` or a plain number.

    Raises:
        TenfoldError: it is not a positive size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None or float(match.group(1)) <= 0:
        raise TenfoldError(f"{size!r} is not a size: write for example 512MiB, 2GiB or 80GB")
    return int(float(match.group(1)) * unit)


def format_bytes(count: float) -> str:
    """``count`` bytes in the largest binary unit that keeps it at 1 or more, for example ``"23.3 GiB"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{int(count)} B"
