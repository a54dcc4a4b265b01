"""Puts tables into pages, between ``<!-- table: NAME -->`` and ``<!-- end of table -->``."""

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks.gpu import tables as gpu
from benchmarks.kept import Row
from benchmarks.report import tables

_END = "<!-- end of table -->"
_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(" + re.escape(_END) + ")", re.DOTALL)
_README = ("Mode", "Middle setting", "Baseline", "Gain (95%)", "All settings", "Lost")
_MEASURED = ("pipeline", "mesh", "unequal", "data_parallel", "layerpipe", "one_cpu")


def tables_of(rows: Sequence[Row]) -> dict[str, str]:
    """Return all tables by the names that pages have for them, as Markdown."""
    frame = tables.frame_of(rows)
    if frame.empty:
        return {}
    emulated = tables.result(frame[frame["mode"] == "emulated"])
    measured = tables.result(frame[frame["mode"].isin(_MEASURED)])
    by_name = {
        "result": measured,
        "emulated": emulated,
        "readme": pd.concat([measured, emulated])[list(_README)],
        "emulated-settings": tables.parts([row for row in rows if row.mode == "emulated"]),
        "losses": tables.losses(frame),
        "predictions": tables.prediction_table(rows),
        "ran": tables.machines([row for row in rows if row.mode != gpu.MODE]),
        "gpu": gpu.measured(rows),
        "gpu-on-paper": gpu.on_paper(),
    }
    return {name: markdown(table) for name, table in by_name.items()}


def markdown(table: pd.DataFrame) -> str:
    """Write a table as Markdown."""
    if table.empty:
        return "No run of this is kept yet.\n"
    cells = [list(map(str, table.columns)), ["---"] * len(table.columns)]
    cells += [["" if pd.isna(cell) else str(cell) for cell in line] for line in table.itertuples(index=False)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def with_tables(text: str, by_name: dict[str, str]) -> str:
    """Return the page with its tables made anew; KeyError: it asks for a table that there is none of."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{by_name[match[2]]}\n{match[3]}", text)


def write_pages(paths: Sequence[Path], rows: Sequence[Row]) -> None:
    """Make the tables of pages anew."""
    by_name = tables_of(rows)
    for path in paths:
        path.write_text(with_tables(path.read_text(), by_name))
