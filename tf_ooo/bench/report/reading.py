"""Runs that were kept, read from their folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tf_ooo.bench.shared.kept import Run
from tf_ooo.errors import OptionsError

# Beside the folder of runs: of rows that do not say it the size of their network, by file and workload.
_SIZES = "older_sizes.json"
# Two runs were kept with the names of these the wrong way round.
_MISNAMED = {"interleaved_1f1b_fused": "interleaved_1f1b_unfused"}
_FIELDS = {field.name for field in dataclasses.fields(Run)}


def runs_in(folder: Path) -> list[Run]:
    """All of them, the oldest first; older ones get their networks' sizes from the file beside.

    Raises:
        OptionsError: there are none; a file is not what ``--keep`` writes.
    """
    beside = folder.parent / _SIZES
    sizes = json.loads(beside.read_text()) if beside.exists() else {}
    runs = [
        _with_sizes(_run(path), sizes.get(path.relative_to(folder).as_posix(), {}))
        for path in sorted(folder.rglob("*.json"))
    ]
    if not runs:
        raise OptionsError(
            f"no runs in {folder}; tf-ooo bench NAME --keep {folder} or tf-ooo paper all --keep {folder} "
            "makes some"
        )
    return sorted(runs, key=lambda run: run.date)


def _run(path: Path) -> Run:
    try:
        read = json.loads(path.read_text())
    except ValueError as error:
        raise OptionsError(f"{path} is no JSON: {error}") from None
    if not isinstance(read, dict) or set(read) != _FIELDS or not _are_rows(read["rows"]):
        raise OptionsError(f"{path} is no run that --keep wrote: it should have {', '.join(sorted(_FIELDS))}")
    return Run(**read)


def _with_sizes(run: Run, sizes: dict[str, dict[str, Any]]) -> Run:
    """What a row says of itself counts more, but for names that are wrong."""
    rows = [{**sizes.get(row.get("workload", ""), {}), **row} for row in run.rows]
    for row in rows:
        if row.get("schedule") in _MISNAMED:
            row["schedule"] = _MISNAMED[row["schedule"]]
    return dataclasses.replace(run, rows=rows)


def _are_rows(rows: object) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
