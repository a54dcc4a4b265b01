"""One picture for each table: the gain of each setting, of all its runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tf_ooo.bench.report.figures import Figure, Kind

_OURS, _STOCK = "#1f6f8b", "#888888"
# Inches.
_BARS_WIDE, _LETTER_WIDE, _LINE_HIGH = 5.0, 0.062, 0.28


def save_gains(kind: Kind, settings: Sequence[Sequence[Figure]], path: Path) -> None:
    """Writes a PNG: a line for each setting, a point for each run, a bar for the median."""
    from matplotlib.figure import Figure as Picture  # slow to import

    names = _names(kind, [figures[-1] for figures in settings])
    wide = _BARS_WIDE + _LETTER_WIDE * max(map(len, names))
    picture = Picture(figsize=(wide, 1.2 + _LINE_HIGH * len(settings)), layout="constrained")
    axes = picture.add_subplot()
    for place, figures in enumerate(settings):
        gains = [figure.gain for figure in figures]
        axes.barh(place, statistics.median(gains) - 1, left=1, height=0.6, color=_OURS, alpha=0.45)
        axes.plot(gains, [place] * len(gains), "o", markersize=4, color=_OURS)
    axes.axvline(1, color=_STOCK, linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(kind.title, fontsize=10, loc="left")
    axes.set_xlabel("times as fast as the strongest baseline (bar: median, points: runs)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    picture.savefig(path, dpi=110)


def _names(kind: Kind, figures: Sequence[Figure]) -> list[str]:
    """``resnet, devices 2, micro-batches 4``: the first cell that differs, and of the rest what is needed to
    tell them apart."""
    columns = range(1, len(kind.setting))
    told = [column for column in columns if len({figure.setting[column] for figure in figures}) > 1]
    for column in reversed(told[1:]):
        fewer = [other for other in told if other != column]
        if len({_cells(figure, fewer) for figure in figures}) == len(figures):
            told = fewer
    heads = [kind.setting[column].lower() for column in told]
    return [
        ", ".join((workload, *(f"{head} {cell}" for head, cell in zip(heads, cells, strict=True))))
        for workload, *cells in (_cells(figure, told) for figure in figures)
    ]


def _cells(figure: Figure, columns: Sequence[int]) -> tuple[str, ...]:
    return tuple(figure.setting[column] for column in (0, *columns))
