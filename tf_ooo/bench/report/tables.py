"""Figures as tables of Markdown: n runs, min / median / max."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from tf_ooo.bench.any_size.command import WITH_SLOTS
from tf_ooo.bench.report.figures import (
    KINDS,
    MACHINE,
    ONE_CPU,
    OPTIONAL,
    Figure,
    Kind,
    figures_of,
    looked_up,
    machine_text,
    of_one_cpu,
)
from tf_ooo.bench.shared.kept import Run
from tf_ooo.bench.shared.rows import Row
from tf_ooo.planning.pictures.style import bytes_text
from tf_ooo.report.texts import seconds_text

_COLUMNS = (
    "Asked", "Strongest baseline", "Ours", "Gain", "Reordering alone", "Efficiency", "Baseline's",
    "Predicted by the plan", "Given the run's controls", "Of the bound", "Runs",
)  # fmt: skip
# Before the names of tables with all settings.
ALL_OF = "all of"
_WITHIN = 0.15
_NONE = "No run of this is kept yet."


def tables_of(runs: Sequence[Run]) -> dict[str, str]:
    """All of them, by the names that they have on pages: short ones, and ``all of`` those of each kind."""
    short = {kind.name: table_of(kind, runs) for kind in KINDS}
    long = {f"{ALL_OF} {kind.name}": table_of_all(kind, runs) for kind in KINDS}
    special = {ONE_CPU: orders_of(runs), "predictions": predictions_of(runs), "any size": any_size_of(runs)}
    return short | special | long


def table_of(kind: Kind, runs: Iterable[Run]) -> str:
    """A row for what a reader looks up: the setting that was run last, and the gains of all of them.

    Columns in which no row says anything are left out.
    """
    lines = looked_up(kind, figures_of(kind, runs))
    if not lines:
        return _NONE
    shown = [*kind.looked_up, MACHINE]
    places = [kind.setting.index(column) for column in shown]
    head = [*shown, *_COLUMNS, "Gain of all settings"]
    rows = [
        [*(settings[-1][-1].setting[place] for place in places), *_cells(settings[-1]), _of_all(settings)]
        for settings in lines
    ]
    return markdown(head, _without_alike(head, rows))


def table_of_all(kind: Kind, runs: Iterable[Run]) -> str:
    """A row for each setting, with all that tells settings apart."""
    settings = figures_of(kind, runs)
    if not settings:
        return _NONE
    head = [*kind.setting, *_COLUMNS]
    rows = [[*figures[-1].setting, *_cells(figures)] for figures in settings]
    return markdown(head, _without_alike(head, rows))


def orders_of(runs: Iterable[Run]) -> str:
    """One CPU device: a row for each order of the backward pass, over all networks."""
    orders: dict[str, list[Figure]] = {}
    for run in runs:
        if run.bench == "single-cpu":
            for figure in of_one_cpu(run):
                orders.setdefault(figure.ours, []).append(figure)
    if not orders:
        return _NONE
    lines = [
        [
            order,
            str(len({figure.setting[0] for figure in figures})),
            range_text([figure.gain for figure in figures], ".2f"),
            str(len(figures)),
        ]
        for order, figures in sorted(orders.items())
    ]
    return markdown(["Order", "Networks", "Gain over stock", "Runs"], lines)


def predictions_of(runs: Iterable[Run]) -> str:
    """What plans said before any step of them had run, beside what was measured."""
    settings: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        if run.bench == "prediction":
            for row in run.rows:
                settings.setdefault((row["workload"], machine_text(run.machine)), []).append(row)
    if not settings:
        return _NONE
    lines = []
    for (workload, machine), rows in settings.items():
        ended = [row for row in rows if "predicted_s" in row]
        errors = [row["predicted_s"] / row["measured_s"] - 1 for row in ended]
        within = sum(abs(error) <= _WITHIN for error in errors)
        lines.append([
            workload, machine, ended[0]["where"] if ended else "", _step_text(ended, "predicted_s"),
            _step_text(ended, "measured_s"), range_text(errors, "+.0%"), f"{within} of {len(errors)}",
            str(len(rows) - len(ended) or ""),
        ])  # fmt: skip
    head = [
        "Workload", "Machine", "Where", "Predicted", "Measured", "Off by (min / median / max)", "Within 15%",
        "Failed",
    ]  # fmt: skip
    return markdown(head, _without_alike(head, lines))


def any_size_of(runs: Iterable[Run]) -> str:
    """A model that is larger than what a process may use: who trains it, and within how much memory."""
    rows = [(machine_text(run.machine), row) for run in runs if run.bench == "any-size" for row in run.rows]
    if not rows:
        return _NONE
    lines = [
        [
            machine,
            f"{row['layers']} layers of {row['width']}",
            bytes_text(WITH_SLOTS * row["weights_bytes"]) if "weights_bytes" in row else "the same",
            row["runs_on"],
            bytes_text(row["limit_bytes"]) if "limit_bytes" in row else "no limit",
            bytes_text(max(row["used_bytes"])) if "used_bytes" in row else "",
            " ".join(f"{loss:.6f}" for loss in row["losses"])
            if "losses" in row
            else f"none: ended with status {row['status']}",
            seconds_text(statistics.median(row["step_s"][1:] or row["step_s"])) if "step_s" in row else "",
        ]
        for machine, row in rows
    ]
    head = [
        "Machine", "Transformer", "Weights and slots", "On", "Each may use", "Used at most", "Losses", "Step"
    ]  # fmt: skip
    return markdown(head, _without_alike(head, lines))


def _cells(figures: Sequence[Figure]) -> list[str]:
    """What one setting's runs measured; seconds are the last one's, as those of several do not compare."""
    last = figures[-1]
    baselines = _newest_last(figure.baseline for figure in figures)
    ours = _newest_last(figure.ours for figure in figures)
    return [
        last.asked,
        f"{baselines}, {seconds_text(last.baseline_s)}",
        f"{ours}, {seconds_text(last.ours_s)}",
        range_text([figure.gain for figure in figures], ".2f"),
        range_text([figure.alone for figure in figures if figure.alone is not None], ".2f"),
        range_text([figure.efficiencies[0] for figure in figures if figure.efficiencies], ".2f"),
        range_text([figure.efficiencies[1] for figure in figures if figure.efficiencies], ".2f"),
        _off([(figure.planned_s, figure.ours_s) for figure in figures]),
        _off([(figure.corrected_s, figure.ours_s) for figure in figures]),
        range_text([figure.ours_s / figure.bound_s for figure in figures if figure.bound_s], ".2f"),
        str(len(figures)),
    ]


def _of_all(settings: Sequence[Sequence[Figure]]) -> str:
    """``0.94 / 1.03 / 1.18, 4 runs``; empty where there is one setting only."""
    gains = [figure.gain for figures in settings for figure in figures]
    return f"{range_text(gains, '.2f')}, {len(gains)} runs" if len(settings) > 1 else ""


def _newest_last(names: Iterable[str]) -> str:
    """Each once: what the last run had stands beside its seconds."""
    return ", ".join(reversed(dict.fromkeys(reversed(list(names)))))


def _off(pairs: Iterable[tuple[float | None, float]]) -> str:
    """How far predictions are from what was measured."""
    return range_text([said_s / measured_s - 1 for said_s, measured_s in pairs if said_s], "+.0%")


def range_text(numbers: Sequence[float], form: str) -> str:
    """One number, or min / median / max of several."""
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f"{numbers[0]:{form}}"
    return " / ".join(
        f"{number:{form}}" for number in (min(numbers), statistics.median(numbers), max(numbers))
    )


def _without_alike(head: Sequence[str], lines: list[list[str]]) -> list[list[str]]:
    """Without what optional columns say where all lines say the same."""
    alike = [
        place
        for place, column in enumerate(head)
        if column in OPTIONAL and len({line[place] for line in lines}) == 1
    ]
    return [["" if place in alike else cell for place, cell in enumerate(line)] for line in lines]


def _step_text(rows: Sequence[Row], key: str) -> str:
    if not rows:
        return ""
    return seconds_text(statistics.median(row[key] for row in rows))


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table, without columns that are empty everywhere."""
    kept = [column for column in range(len(head)) if any(line[column] for line in lines)]
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row[column] for column in kept) + " |" for row in rows)
