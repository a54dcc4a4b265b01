"""Seconds saved by running one layer's dW beside a region of the main stream: a table to save and edit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tf_ooo.costs.layer_costs import is_amount, is_number
from tf_ooo.costs.table import check_texts, errors_of
from tf_ooo.errors import CostError

VERSION = 1
_REGION = re.compile(r"(dO|F):(0|[1-9]\d{0,5})", re.ASCII)
_TASK = re.compile(r"(dO|F|dW):(0|[1-9]\d{0,5})", re.ASCII)
_ROW = frozenset({"region", "layer", "saved_s"})

Gains = Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class GainTable:
    """Holds the ``gains`` that :func:`tf_ooo.plan` takes for the schedule ``multi_stream``.

    Attributes:
        saved_s: ``{(region, layer): seconds}``; a region is ``"dO:5"``, or ``"F:3"`` for the next step's
            forward.  Negative where the two slow each other down.
        device: what was measured, in words.
        notes: what else a reader should know.
        alone_s: ``{"dW:4": seconds}``, what parts of the step take with nothing beside them, where measured.
        calculated: the pairs of ``saved_s`` that were not measured.
        launch_s: seconds that a kernel takes longer outside of CUDA graphs; None: not measured.

    Raises:
        CostError: a region that is none, or seconds that are no number.
    """

    saved_s: Gains
    device: str = ""
    notes: tuple[str, ...] = field(default=())
    alone_s: Mapping[str, float] = field(default_factory=dict)
    calculated: frozenset[tuple[str, int]] = frozenset()
    launch_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("saved_s", "alone_s"):
            if not isinstance(getattr(self, name), Mapping):
                raise CostError(f"gains: {name}: expected a map, got {getattr(self, name)!r:.80}")
        check_texts("gains: notes", self.notes)
        for task, seconds in self.alone_s.items():
            if not isinstance(task, str) or not _TASK.fullmatch(task):
                raise CostError(f"gains: alone_s must name 'dO:5', 'dW:5' or 'F:5', got {task!r}")
            _check_s(f"alone_s of {task}", seconds)
        if self.launch_s is not None:
            _check_s("launch_s", self.launch_s)
        for key, saved_s in self.saved_s.items():
            if not isinstance(key, tuple) or len(key) != 2:
                raise CostError(f"gains: keys are pairs such as ('dO:5', 6), got {key!r:.80}")
            region, layer = key
            if not isinstance(region, str) or not _REGION.fullmatch(region):
                raise CostError(f"gains: region must be 'dO:5' or 'F:3', got {region!r}")
            if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
                raise CostError(f"gains: {region}: layer must be a number from 0, got {layer!r}")
            if not is_number(saved_s) or not is_amount(abs(saved_s)):
                raise CostError(
                    f"gains: {region} beside dW:{layer}: saved_s must be finite, got {saved_s!r:.80}"
                )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the file, one pair a line; returns its path."""
        rows = []
        for key in sorted(self.saved_s):
            row = {"region": key[0], "layer": key[1], "saved_s": self.saved_s[key]}
            rows.append({**row, "measured": False} if key in self.calculated else row)
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        head: dict[str, Any] = {"version": VERSION, "device": self.device, "notes": list(self.notes)}
        if self.launch_s is not None:
            head["launch_s"] = self.launch_s
        if self.alone_s:
            head["alone_s"] = dict(self.alone_s)
        text = json.dumps(head)[:-1] + f', "gains": [\n{lines}\n]}}\n'
        target = Path(path)
        target.write_text(text, encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GainTable:
        """Reads a file.  CostError names the file and what is wrong in it."""
        with errors_of(str(path)):
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            saved_s, calculated = _rows(content)
            alone_s = content.get("alone_s", {})
            if not isinstance(alone_s, dict):
                raise CostError("gains: alone_s: expected a map from tasks to seconds")
            return cls(
                saved_s, str(content.get("device", "")), check_texts("notes", content.get("notes", ())),
                alone_s, calculated, content.get("launch_s"),
            )  # fmt: skip


def _check_s(what: str, seconds: object) -> None:
    if not is_amount(seconds):
        raise CostError(f"gains: {what} must be finite seconds from 0, got {seconds!r:.80}")


def _rows(content: object) -> tuple[dict[tuple[str, int], float], frozenset[tuple[str, int]]]:
    """(seconds by pair, the pairs that are marked as not measured)."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise CostError(f"no table of gains: version must be {VERSION}")
    rows = content.get("gains")
    if not isinstance(rows, list):
        raise CostError("gains: expected a list")
    saved_s: dict[tuple[str, int], float] = {}
    calculated = set()
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() - {"measured"} != _ROW:
            raise CostError(f"gains: entry {number} must have region, layer and saved_s, got {row!r:.80}")
        key = (row["region"], row["layer"])
        if not isinstance(key[0], str) or not isinstance(key[1], int):
            raise CostError(
                f"gains: entry {number}: expected a text and a number for region and layer, got {key}"
            )
        if key in saved_s:
            raise CostError(f"gains: {key[0]} beside dW:{key[1]} is there twice")
        saved_s[key] = row["saved_s"]
        if not row.get("measured", True):
            calculated.add(key)
    return saved_s, frozenset(calculated)
