"""Defines the table of ``tf-ooo plan``: the candidates, and the figures of each."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from tf_ooo.planning.choosing import figures
from tf_ooo.planning.choosing.on_paper import AVERAGED, Split
from tf_ooo.planning.choosing.plan import Candidate
from tf_ooo.units import bytes_text, time_text, with_units

_LEFT_OUT = "-"
_FULL_WIDTH = 120


@dataclass(frozen=True)
class CandidateRows:
    """Lists candidates, the fastest first, compared with ``reference``; ``rows``: those of a micro-batch."""

    compared: Sequence[Candidate]
    reference: Candidate | None
    rows: int | None

    def table(self, chosen: str) -> Table:
        """Return the table, with the reason why some cannot be taken, or the cost of a memory limit."""
        look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1), "pad_edge": False}
        table = Table(title="Predicted, the fastest first", title_justify="left", **look)
        table.add_column("schedule", no_wrap=True)
        for column in ("step", "makespan", "bubble", "peak\nmemory", *self._columns()):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("remark")
        for candidate in self.compared:
            mine, costs = candidate.name == chosen, self._costs_text(candidate)
            remarks = ("chosen" if mine else "", costs, with_units(candidate.reason))
            remark = "; ".join(filter(None, remarks))
            table.add_row(candidate.name, *self._figures(candidate), remark, style="bold" if mine else "")
        return table

    def cells(self, chosen: str) -> tuple[list[str], list[list[str]], range, int | None]:
        """Return a page's header, rows, the columns that are numbers, and the row of the chosen candidate."""
        columns = [column.replace("-\n", "-").replace("\n", " ") for column in self._columns()]
        remarks = any(self._costs_text(candidate) for candidate in self.compared)
        header = ["schedule", "step", "idle", "peak memory", *columns, *(["remark"] if remarks else [])]
        rows = []
        for candidate in self.compared:
            if candidate.trial is None:
                rows.append([candidate.name, with_units(candidate.reason)])
                continue
            step, _, *rest = self._figures(candidate)
            remark = [self._costs_text(candidate)] if remarks else []
            rows.append([candidate.name, step, *rest, *remark])
        mine = next((i for i, candidate in enumerate(self.compared) if candidate.name == chosen), None)
        return header, rows, range(1, len(header) - remarks), mine

    def _costs_text(self, candidate: Candidate) -> str:
        costs = (self.squeezed.get(candidate.name), self.recomputed.get(candidate.name))
        return "; ".join(cost.in_short for cost in costs if cost is not None)

    def facts(self, candidate: Candidate) -> dict[str, Any]:
        """Return one candidate as JSON types; null where there is no schedule."""
        trial, less = candidate.trial, self.squeezed.get(candidate.name)
        again = self.recomputed.get(candidate.name)
        known = trial is not None and math.isfinite(candidate.step_s)
        return {
            "schedule": candidate.name,
            "step_s": candidate.step_s if known else None,
            "makespan_s": trial.makespan_s if trial and known else None,
            "bubble_fraction": trial.timeline.bubble_fraction if trial else None,
            "peak_bytes": trial.timeline.peak_bytes if trial else None,
            "rows_per_s": self._rate(candidate) if self.rows else None,
            "over_one_device": figures.over_one_device(trial) if trial else None,
            "over": self.reference.name if self.reference else None,
            "over_reference": self._over_reference(candidate),
            "reason": candidate.reason,
            "slower_by_limit": less.slower if less else None,
            "recomputed": list(again.layers) if again else [],
            "recomputed_s": again.again_s if again else 0.0,
            "peak_bytes_without": again.kept_bytes if again else None,
        }

    @cached_property
    def squeezed(self) -> dict[str, figures.Squeezed]:
        """Return the cost of the memory limit for each candidate that it changed, by name."""
        return {each.name: cost for each in self.compared if (cost := figures.squeezed(each)) is not None}

    @cached_property
    def recomputed(self) -> dict[str, figures.Recomputed]:
        """Return the layers that run again, by name of the candidate, if any do."""
        return {
            each.name: cost for each in self.compared if (cost := figures.recomputation(each)) is not None
        }

    def _columns(self) -> list[str]:
        rate = "rows/s" if self.rows else "micro-\nbatches/s"
        return [rate, "over one\ndevice", *([f"over\n{self.reference.name}"] if self.reference else [])]

    def _figures(self, candidate: Candidate) -> list[str]:
        trial = candidate.trial
        if trial is None:
            return [_LEFT_OUT] * (4 + len(self._columns()))
        rate = self._rate(candidate)
        return [
            *(time_text(candidate.step_s), time_text(trial.makespan_s)),
            *(f"{trial.timeline.bubble_fraction:.1%}", bytes_text(trial.peak_bytes)),
            _LEFT_OUT if rate is None else f"{rate:,.4g}" if rate < 1000 else f"{rate:,.0f}",
            _times(figures.over_one_device(trial)),
            *([_times(self._over_reference(candidate))] if self.reference else []),
        ]

    def _rate(self, candidate: Candidate) -> float | None:
        """Return rows a second, or micro-batches where the rows are not known."""
        rate = figures.microbatches_per_s(candidate.trial) if candidate.trial else math.inf
        return rate * (self.rows or 1) if math.isfinite(rate) else None

    def _over_reference(self, candidate: Candidate) -> float | None:
        trial, other = candidate.trial, self.reference.trial if self.reference else None
        return figures.over(trial, other) if trial and other else None


def print_table(assumed: Sequence[str], table: Table) -> None:
    """Print the assumptions and the table; no column is left out to fit a narrow terminal."""
    console = Console(soft_wrap=True, width=max(Console().width, _FULL_WIDTH))
    console.print("\n  ".join(["Assumed:", *assumed]), highlight=False, markup=False)
    console.print(table)


def show_splits(splits: Sequence[Split], assumed: Sequence[str], rows: int | None, as_json: bool) -> None:
    """Show every division of the devices, the fastest first and marked."""
    facts = [_split_facts(split, rows) for split in splits]
    if as_json:
        click.echo(json.dumps({"assumptions": list(assumed), "splits": facts}, indent=1, allow_nan=False))
        return
    rate = "rows/s" if rows else "micro-batches/s"
    columns = ("replicas", "stages' devices", "schedule", "step", rate, "peak memory", "over one device", "")
    title = "Predicted, the fastest first"
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, (split, fact) in enumerate(zip(splits, facts, strict=True)):
        cells = [str(split.replicas), str(split.devices)]
        if split.plan is None:
            table.add_row(*cells, *["-"] * 5, with_units(split.reason))
            continue
        cells += [split.plan.trial.schedule.policy, time_text(split.step_s), f"{fact['per_s']:,.4g}"]
        cells += [bytes_text(split.plan.trial.peak_bytes), _times(split.over_one_device)]
        table.add_row(*cells, "best" if place == 0 else "", style="bold" if place == 0 else "")
    print_table([*assumed, AVERAGED], table)


def _split_facts(split: Split, rows: int | None) -> dict[str, Any]:
    plan = split.plan
    count = 0 if plan is None else plan.trial.schedule.microbatches * split.replicas * (rows or 1)
    return {
        "replicas": split.replicas,
        "devices": split.devices,
        "schedule": plan.trial.schedule.policy if plan else None,
        "step_s": split.step_s if plan else None,
        "allreduce_s": split.allreduce_s if plan else None,
        "per_s": count / split.step_s if plan and split.step_s else None,
        "peak_bytes": plan.trial.timeline.peak_bytes if plan else None,
        "over_one_device": split.over_one_device,
        "reason": split.reason,
    }


def _times(factor: float | None) -> str:
    return _LEFT_OUT if factor is None else f"{factor:.2f}x"
