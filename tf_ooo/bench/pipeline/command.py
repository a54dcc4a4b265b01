"""The command ``tf-ooo bench pipeline``."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import click

from tf_ooo.bench.pipeline import pytorch
from tf_ooo.bench.pipeline.rows import OverheadRun, PipelineRun, rows_of, text_of, torch_rows_of
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.drivers import SHARE, end_with_sigterm, run_driver
from tf_ooo.bench.shared.options import FOLDER, SeveralValues, json_option, quick_option, several
from tf_ooo.bench.shared.processes import command, quiet, result_of
from tf_ooo.bench.shared.rows import Row, write_rows
from tf_ooo.bench.shared.workloads import WORKLOADS

SCHEDULES = "gpipe,1f1b,fast_forward,modulo,zb_h1,zb_h2,zb_v,dualpipe_v"
QUICK_SCHEDULES = "gpipe,1f1b,fast_forward,modulo"


@click.command("pipeline", cls=SeveralValues)
@quick_option("2 workers, 4 micro-batches, 4 schedules: under 5 minutes.")
@json_option
@click.option("--pictures", type=FOLDER, help="Folder for a Gantt chart of a measured step of each schedule.")
@several("--workload", click.Choice(list(WORKLOADS)), default=["feed_forward"], show_default=True)
@several("--devices", int, default=[4], show_default=True, help="Worker processes.")
@several("--microbatches", int, default=[8], show_default=True)
@click.option("--schedules", default=SCHEDULES, show_default=True)
@click.option("--cores", type=float, help=f"Of each worker.  [default: {SHARE} of an equal share]")
@click.option("--repetitions", default=8, show_default=True, help="Turns of each schedule.")
@click.option("--torch", is_flag=True,
              help="torch.distributed.pipelining in turns with ours, where torch is installed "
                   "(feed_forward).")  # fmt: skip
@click.option("--overhead", is_flag=True,
              help="Instead: one stage and one micro-batch against stock fit, in one process.")  # fmt: skip
def pipeline(
    quick: bool, json_file: Path | None, pictures: Path | None, workload: tuple[str, ...],
    devices: tuple[int, ...], microbatches: tuple[int, ...], schedules: str, cores: float | None,
    repetitions: int, torch: bool, overhead: bool,
) -> None:  # fmt: skip
    """Pipeline schedules against each other.

    They run on worker processes with equal shares of this machine.  Every worker's computing threads
    get a CPU quota; its communication is left free.  In every run all schedules take turns, step by
    step, beside the whole model on one worker (serial) and the same work divided without dependencies
    (local, the floor that no schedule can beat here).
    """
    end_with_sigterm()
    if overhead:
        write_rows(json_file, [_overhead(name, 20 if quick else 60) for name in workload])
        return
    reason = confine.why_not(with_link=False)
    if reason:
        click.echo(f"skipped: {reason}")
        return
    if quick:
        devices, microbatches, repetitions, schedules = (2,), (4,), 4, QUICK_SCHEDULES
    rows: list[Row] = []
    for name, workers, count in itertools.product(workload, devices, microbatches):
        with_torch = torch and _torch_runs(name, workers)
        asked = PipelineRun(name, count, schedules.split(","), str(pictures or ""), with_torch)
        rows += _measured(asked, workers, cores, repetitions)
        write_rows(json_file, rows)


def _torch_runs(workload: str, devices: int) -> bool:
    """Whether torch.distributed.pipelining is compared; says why where it is not."""
    reason = pytorch.why_not(workload, devices)
    if reason:
        click.echo(reason)
    return not reason


def _measured(asked: PipelineRun, devices: int, cores: float | None, repetitions: int) -> list[Row]:
    """The rows of one run, printed too."""
    measured = run_driver("tf_ooo.bench.pipeline.driver", asked, devices, cores, repetitions)
    rows = rows_of(measured, asked) + torch_rows_of(measured, asked)
    for row in rows:
        click.echo(text_of(row))
    return rows


def _overhead(workload: str, pairs: int) -> Row:
    """The row of a process of its own, printed too."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        asked = OverheadRun(workload, pairs, str(out))
        row: Row = result_of(command("tf_ooo.bench.pipeline.overhead", asked), out, quiet())
    click.echo(text_of(row))
    return row
