"""The command ``tf-ooo bench prediction``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from tf_ooo.bench.prediction.cases import CASES, LOGICAL, RANKS
from tf_ooo.bench.prediction.rows import PredictionRun, summary_of, text_of
from tf_ooo.bench.shared.options import COUNT, SeveralValues, json_option, quick_option, several
from tf_ooo.bench.shared.processes import command, result_of
from tf_ooo.bench.shared.rows import Row, reported

_DRIVER = "tf_ooo.bench.prediction.driver"


@click.command("prediction", cls=SeveralValues)
@several("--workload", click.Choice(list(CASES)), default=list(CASES), show_default=True)
@click.option("--repetitions", type=COUNT, default=3, show_default=True, help="Fits of each, in turns.")
@click.option("--steps", type=COUNT, default=40, show_default=True, help="Of each plan.")
@quick_option(
    "Two workloads, one fit each, under 5 minutes.", expose=False, workload=list(CASES)[:2], repetitions=1
)
@json_option
def prediction(workload: tuple[str, ...], repetitions: int, steps: int, json_file: Path | None) -> None:
    """What plans predict before any step of them has run, beside measured steps.

    Pipelines on logical devices and on workers, and data parallel: each fit in processes of its own, which
    have this machine to themselves, without quotas.  Every run stays.
    """
    rows = reported(_runs(workload, repetitions, steps), text_of, json_file)
    click.echo("\n".join(summary_of(rows)))


def _runs(names: tuple[str, ...], repetitions: int, steps: int) -> Iterator[list[Row]]:
    for repetition in range(1, repetitions + 1):
        for name in names:
            yield [row_of(PredictionRun(name, steps, repetition))]


def row_of(asked: PredictionRun) -> Row:
    """Of one fit; what fails is a row, too."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # of horovodrun
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PATH": path}
    try:
        row: Row = result_of(command_of(asked), environment)
    except click.ClickException as error:
        *_, last = error.message.strip().splitlines()
        return {"workload": asked.case, "repetition": asked.repetition, "failed": last}
    return row


def command_of(asked: PredictionRun) -> list[str]:
    """What starts its processes."""
    case, (python, *driver) = CASES[asked.case], command(_DRIVER, asked)
    if case.where == LOGICAL:
        return [python, *driver]
    kind = "--ranks" if case.where == RANKS else "--workers"
    return [
        sys.executable,
        "-m",
        "tf_ooo",
        "run",
        "--max-restarts",
        "0",
        kind,
        str(case.devices),
        "--",
        *driver,
    ]
