"""Puts tables into pages, between ``<!-- table: NAME -->`` and ``<!-- end of table -->``."""

import re
from collections.abc import Sequence

import pandas as pd

from benchmarks.gpu import tables as gpu
from benchmarks.kept import Row
from benchmarks.report import tables

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_README = ["Mode", "Middle setting", "Baseline", "Gain (95%)", "All settings", "Lost"]
_MEASURED = ("pipeline", "mesh", "unequal", "data_parallel", "layerpipe", "one_cpu", "torch")


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
        "readme": pd.concat([measured, emulated])[_README],
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
        return "There is none yet.\n"
    lines = [list(table), ["---"] * len(table.columns), *table.fillna("").to_numpy().tolist()]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def with_tables(text: str, by_name: dict[str, str]) -> str:
    """Return the page with its tables made anew; KeyError: it asks for a table that there is none of."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{by_name[match[2]]}\n{match[3]}", text)
