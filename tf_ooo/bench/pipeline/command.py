"""The command ``tf-ooo bench pipeline``."""

from __future__ import annotations

import itertools
from pathlib import Path

import click

from tf_ooo.bench.pipeline import pytorch
from tf_ooo.bench.pipeline.rows import (
    BASELINES,
    FUSED,
    UNFUSED,
    OverheadRun,
    PipelineRun,
    rows_of,
    text_of,
    torch_rows_of,
)
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.drivers import SHARE, end_cleanly, run_driver
from tf_ooo.bench.shared.options import (
    CORES,
    COUNT,
    FOLDER,
    SeveralValues,
    json_option,
    quick_option,
    several,
)
from tf_ooo.bench.shared.processes import command, quiet, result_of
from tf_ooo.bench.shared.rows import Row, reported
from tf_ooo.bench.shared.workloads import PIPELINE
from tf_ooo.planning.policies import schedules_of

SCHEDULES = ",".join((*BASELINES, "fast_forward,modulo,zb_h1,zb_h2,zb_v,dualpipe_v"))
QUICK_SCHEDULES = "gpipe,1f1b,fast_forward,modulo"


class _Schedules(click.ParamType):  # type: ignore[type-arg]
    name = "names"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Names with commas, each of a schedule of pipelines; one without fusion behind the one with it."""
        names = sorted(value.split(","), key=lambda name: name.endswith(UNFUSED))
        unfused = [f"{name}{UNFUSED}" for name in FUSED if name in names]
        known = ("auto", *schedules_of("pipeline"), *unfused)
        for name in names:
            if name in BASELINES and name not in known:
                self.fail(f"{name!r} goes only beside {name.removesuffix(UNFUSED)!r}", param, ctx)
            if name not in known:
                self.fail(f"{name!r} is no schedule of pipelines; there are {', '.join(known)}", param, ctx)
        return ",".join(names)


@click.command("pipeline", cls=SeveralValues)
@quick_option("2 workers, 4 micro-batches, 4 schedules: under 5 minutes.", devices=[2], microbatches=[4],
              repetitions=2, schedules=QUICK_SCHEDULES)  # fmt: skip
@json_option
@click.option("--pictures", type=FOLDER, help="Folder for a Gantt chart of a measured step of each schedule.")
@several("--workload", click.Choice(list(PIPELINE)), default=["feed_forward"], show_default=True)
@several("--devices", COUNT, default=[4], show_default=True, help="Worker processes.")
@several("--microbatches", COUNT, default=[8], show_default=True)
@click.option("--schedules", type=_Schedules(), default=SCHEDULES, show_default=True,
              help=f"By name; with {UNFUSED} also in the same order without waiting for dW.")  # fmt: skip
@click.option("--cores", type=CORES, help=f"Of each worker.  [default: {SHARE} of an equal share]")
@click.option("--repetitions", type=COUNT, default=8, show_default=True, help="Turns of each schedule.")
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
    end_cleanly()
    if overhead:
        asked = (OverheadRun(name, 20 if quick else 60) for name in workload)
        module = "tf_ooo.bench.pipeline.overhead"
        reported(([result_of(command(module, run), quiet())] for run in asked), text_of, json_file)
        return
    if confine.skipped(with_link=False):
        return

    def measured(name: str, workers: int, count: int) -> list[Row]:
        without_torch = pytorch.why_not(name, workers) if torch else ""
        if without_torch:
            click.echo(without_torch)
        with_torch = torch and not without_torch
        asked = PipelineRun(name, count, schedules.split(","), str(pictures or ""), with_torch)
        run = run_driver("tf_ooo.bench.pipeline.driver", asked, workers, cores, repetitions)
        return rows_of(run, asked) + torch_rows_of(run, asked)

    reported(
        itertools.starmap(measured, itertools.product(workload, devices, microbatches)), text_of, json_file
    )
