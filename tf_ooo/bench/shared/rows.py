"""Rows of what was measured or predicted: plain data, which ``--json`` writes as it is, and ``--keep``
with what it takes to tell runs apart."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from tf_ooo.bench.shared.kept import keep

Row = dict[str, Any]


def write_rows(path: Path | None, rows: Sequence[Row]) -> None:
    """Writes the rows as JSON, and keeps them where that was asked for; nothing without a path."""
    keep(rows)
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def reported(runs: Iterable[Sequence[Row]], text_of: Callable[[Row], str], path: Path | None) -> list[Row]:
    """All rows, printed and written after each run: what was measured is not lost."""
    rows: list[Row] = []
    for run in runs:
        rows += run
        for row in run:
            click.echo(text_of(row))
        write_rows(path, rows)
    return rows


def known(row: Row) -> Row:
    """The row without what has no meaning for it (None)."""
    return {key: value for key, value in row.items() if value is not None}


def seconds_of(seconds: Sequence[float], baseline: Sequence[float] | None) -> Row:
    """Median and spread of a run's turns, and how it compares with the baseline if that was measured."""
    step_s = statistics.median(seconds)
    row: Row = {"step_s": step_s, "step_s_min": min(seconds), "step_s_max": max(seconds)}
    if baseline is not None:
        baseline_step_s = statistics.median(baseline)
        row |= {"baseline_step_s": baseline_step_s, "speedup": baseline_step_s / step_s}
    return row


def link_text(row: Row) -> str:
    """``200 Gbit/s``, or ``free`` for a link that takes no time."""
    rate = row.get("bandwidth_bit_s")
    return f"{rate / 1e9:.0f} Gbit/s" if rate else "free"


def spread_text(row: Row) -> str:
    """``1234 ms (1200-1300)``: the median step and the range of all."""
    return f"{row['step_s'] * 1e3:6.0f} ms ({row['step_s_min'] * 1e3:.0f}-{row['step_s_max'] * 1e3:.0f})"


def bits_text(row: Row) -> str:
    """Whether the run ended with the same weights as the one it is compared with."""
    return "same bits" if row["bit_equal"] else "OTHER BITS"
