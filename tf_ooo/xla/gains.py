"""Seconds saved by running one layer's dW beside a region of the main stream: a table to save and edit."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tf_ooo.errors import CostError

VERSION = 1
_REGION = re.compile(r"(dO|F):(0|[1-9]\d{0,5})", re.ASCII)

Gains = Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class GainTable:
    """What :func:`tf_ooo.plan` takes as ``gains`` of the schedule ``multi_stream``.

    Attributes:
        saved_s: ``{(region, layer): seconds}``; a region is ``"dO:5"``, or ``"F:3"`` for the next step's
            forward.  Negative where the two slow each other down.
        device: what was measured, in words.
        notes: what else a reader should know.

    Raises:
        CostError: a region that is none, or seconds that are no number.
    """

    saved_s: Gains
    device: str = ""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for (region, layer), saved_s in self.saved_s.items():
            if not isinstance(region, str) or not _REGION.fullmatch(region):
                raise CostError(f"gains: region must be 'dO:5' or 'F:3', got {region!r}")
            if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
                raise CostError(f"gains: {region}: layer must be a number from 0, got {layer!r}")
            if not isinstance(saved_s, (int, float)) or not math.isfinite(saved_s):
                raise CostError(f"gains: {region} beside dW:{layer}: saved_s must be finite, got {saved_s!r}")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the file, one pair a line; returns its path."""
        rows = [
            {"region": region, "layer": layer, "saved_s": saved_s}
            for (region, layer), saved_s in sorted(self.saved_s.items())
        ]
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        head = {"version": VERSION, "device": self.device, "notes": list(self.notes)}
        text = json.dumps(head)[:-1] + f', "gains": [\n{lines}\n]}}\n'
        target = Path(path)
        target.write_text(text, encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GainTable:
        """Reads a file.  CostError names the file and what is wrong in it."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(_rows(content), str(content.get("device", "")), tuple(content.get("notes", ())))
        except (OSError, UnicodeDecodeError) as error:
            raise CostError(f"{path}: cannot be read: {error}") from error
        except json.JSONDecodeError as error:
            raise CostError(f"{path}: line {error.lineno}: no JSON: {error.msg}") from error
        except CostError as error:
            raise CostError(f"{path}: {error}") from error


def _rows(content: Any) -> dict[tuple[str, int], float]:
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise CostError(f"no table of gains: version must be {VERSION}")
    rows = content.get("gains")
    if not isinstance(rows, list):
        raise CostError("gains: expected a list")
    found: dict[tuple[str, int], float] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != {"region", "layer", "saved_s"}:
            raise CostError(f"gains: entry {number} must have region, layer and saved_s, got {row!r:.80}")
        key = (row["region"], row["layer"])
        if key in found:
            raise CostError(f"gains: {key[0]} beside dW:{key[1]} is there twice")
        found[key] = row["saved_s"]
    return found
