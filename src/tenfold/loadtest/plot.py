"""The measures of a load as a figure. It needs matplotlib, which is imported when a figure is drawn and not before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenfold.errors import TenfoldError
from tenfold.loadtest.measures import Run, Summary, output_rate, percentile

SUFFIXES = (".png", ".svg", ".pdf")
POINTS = 1000
"""Of a curve: millions of gaps make no better one."""
MAX_BINS = 120


def require(path: Path) -> None:
    """Whether a figure can be drawn to ``path``, asked before hours of measuring.

    Raises:
        TenfoldError: matplotlib is missing, or the name does not end as a figure's does.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise TenfoldError(f"--plot {path}: the name must end with {', '.join(SUFFIXES)}")
    _figure()


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise TenfoldError(f"{error.name} is not installed: run pip install 'tenfold[bench]'") from error
    return Figure


def draw(run: Run, summary: Summary, heading: str, path: Path) -> None:
    """Draw the distributions of time to first token and of gaps between chunks, and output tokens over time.

    Raises:
        TenfoldError: matplotlib is missing, or ``path`` cannot be written.
    """
    done = [record for record in run.records if record.failure is None]
    figure = _figure()(figsize=(12, 3.6), layout="constrained")
    figure.suptitle(heading, fontsize=10)
    first, gaps, rate = figure.subplots(1, 3)
    _distribution(first, "time to first token (ms)", [each.ttft for each in done if each.ttft is not None])
    _distribution(gaps, "time between chunks (ms)", [gap for each in done for gap in each.gaps])
    bins = min(MAX_BINS, max(1, math.ceil(4 * summary.seconds)))
    rate.stairs(
        output_rate(run.records, summary.seconds, bins),
        [summary.seconds * edge / bins for edge in range(bins + 1)],
        fill=True,
        alpha=0.6,
    )
    rate.axhline(summary.per_second(summary.output_tokens), color="black", linewidth=0.8, linestyle="--", label="mean")
    rate.set(xlabel="seconds", ylabel="output tokens per second", ylim=(0, None))
    rate.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise TenfoldError(f"cannot write {path}: {error.strerror or error}") from error


def _distribution(axes: Any, label: str, seconds: Sequence[float]) -> None:
    """The share of values up to each, with the percentiles of the table marked."""
    ordered = sorted(value * 1000 for value in seconds)
    axes.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
    if not ordered:
        axes.text(0.5, 0.5, "none", ha="center", transform=axes.transAxes)
        return
    shares = [point / POINTS for point in range(POINTS + 1)]
    axes.plot([percentile(ordered, share * 100) for share in shares], shares)
    for percent in (50, 99):
        value = percentile(ordered, percent)
        axes.plot([value], [percent / 100], "o", markersize=4, label=f"p{percent} {value:,.1f}")
    # A few stalls are a hundred times as long as the rest, which must stay legible.
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, loc="lower right")
