"""Tables of what a GPU took, from kept rows, and of what XLA makes of a step on paper."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from benchmarks.cases import NOBODY
from benchmarks.kept import Row, gain_of, runs_of

MODE, STOCK = "one_gpu", "xla"
ON_PAPER = Path(__file__).with_name("on_paper.jsonl")


def measured(rows: Iterable[Row]) -> pd.DataFrame:
    """Return one line a run: steps of stock's ways, and of the fastest rewritten one with its gains."""
    return pd.DataFrame([_line(run) for run in runs_of(row for row in rows if row.mode == MODE)])


def _line(run: list[Row]) -> dict[str, str]:
    baseline = min((row for row in run if row.baseline), key=lambda row: row.median_s)
    line = {
        "Network": baseline.case.removesuffix("_torch"),
        "Stock, ms": ", ".join(_step(row) for row in run if row.baseline),
    }
    ours = min((row for row in run if row.had_by == NOBODY), key=lambda row: row.median_s, default=None)
    if ours is None:
        return line
    overlapped_s, times = ours.about.get("overlapped_s"), ours.about["temporary_bytes"]
    times /= baseline.about["temporary_bytes"]
    line |= {
        "Fastest rewritten, ms": _step(ours),
        "Over the fastest stock (95%)": gain_of(baseline.turns_s, ours.turns_s).text(),
        "Side by side, ms": "" if overlapped_s is None else f"{overlapped_s * 1e3:.2f}",
        "Temporary memory": f"{times:.2f} times",
    }
    for stock in (row for row in run if row.way == STOCK):
        line["Over `xla` (95%)"] = gain_of(stock.turns_s, ours.turns_s).text()
    return line


def _step(row: Row) -> str:
    return f"`{row.way}` {row.median_s * 1e3:.2f}"


def on_paper(path: Path = ON_PAPER) -> pd.DataFrame:
    """Return what XLA makes of each way for an H100: fusions, launches outside of graphs, temporary bytes."""
    frame = pd.read_json(path, lines=True)
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
