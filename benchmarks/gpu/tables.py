"""Tables of what a GPU took, from kept rows, and of what XLA makes of a step on paper."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from benchmarks.case import NOBODY
from benchmarks.gains import gain_of, runs_of
from benchmarks.kept import Row
from benchmarks.report.tables import gain_text

MODE, STOCK = "one_gpu", "xla"
ON_PAPER = Path(__file__).with_name("on_paper.jsonl")


def measured(rows: Iterable[Row]) -> pd.DataFrame:
    """Return one line a run: steps of stock's ways, and of the fastest rewritten one with its gains."""
    return pd.DataFrame([_line(run) for run in runs_of(row for row in rows if row.mode == MODE).values()])


def _line(run: list[Row]) -> dict[str, str]:
    baseline = min((row for row in run if row.baseline), key=_middle_s)
    line = {
        "Network": baseline.case.removesuffix("_torch"),
        "Stock, ms": ", ".join(f"`{row.way}` {_ms(row)}" for row in run if row.baseline),
    }
    ours = min((row for row in run if row.had_by == NOBODY), key=_middle_s, default=None)
    if ours is None:
        return line
    over = gain_of(baseline.turns_s, ours.turns_s)
    line |= {
        "Fastest rewritten, ms": f"`{ours.way}` {_ms(ours)}",
        "Over the fastest stock (95%)": gain_text(over.ratio, over.low, over.high),
        "Side by side, ms": f"{ours.about['overlapped_s'] * 1e3:.2f}" if "overlapped_s" in ours.about else "",
        "Temporary memory": f"{ours.about['temporary_bytes'] / baseline.about['temporary_bytes']:.2f} times",
    }
    stock = next((row for row in run if row.way == STOCK), None)
    if stock is not None:
        gain = gain_of(stock.turns_s, ours.turns_s)
        line["Over `xla` (95%)"] = gain_text(gain.ratio, gain.low, gain.high)
    return line


def _middle_s(row: Row) -> float:
    return statistics.median(row.turns_s)


def _ms(row: Row) -> str:
    return f"{_middle_s(row) * 1e3:.2f}"


def on_paper(path: Path = ON_PAPER) -> pd.DataFrame:
    """Return what XLA makes of each way for an H100: fusions, launches outside of graphs, temporary bytes."""
    frame = pd.DataFrame([json.loads(line) for line in path.read_text().splitlines()])
    stock = frame[frame["way"] == STOCK].set_index("network")["fusions"]
    return pd.DataFrame({
        "Network": frame["network"],
        "Way": frame["way"].map("`{}`".format),
        "Fusions more than stock": frame["fusions"] - frame["network"].map(stock),
        "Launches": frame["kernels"],
        "Outside of CUDA graphs": frame["outside_of_graphs"],
        "CUDA graphs": frame["graphs"],
        "Temporary MB": (frame["temporary_bytes"] / 1e6).round().astype(int),
    })  # fmt: skip
