"""The command ``tf-ooo bench mesh``."""

from __future__ import annotations

from pathlib import Path

import click

from tf_ooo.bench.mesh.cases import CASES
from tf_ooo.bench.mesh.rows import MeshRun, row_of, summary_of, text_of
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.drivers import SHARE, end_cleanly, run_driver
from tf_ooo.bench.shared.options import CORES, COUNT, SeveralValues, json_option, quick_option, several
from tf_ooo.bench.shared.rows import Row, reported

_QUICK = ("mlp_one_large", "mlp_few_rows")


@click.command("mesh", cls=SeveralValues)
@quick_option("2 models, 4 turns: under 5 minutes.", expose=False, workload=_QUICK, repetitions=4)
@several("--workload", click.Choice(list(CASES)), default=list(CASES), show_default=True)
@click.option("--devices", type=COUNT, default=4, show_default=True, help="Worker processes.")
@click.option("--microbatches", type=COUNT, default=8, show_default=True, help="Of a step.")
@click.option("--cores", type=CORES, help=f"Of each worker.  [default: {SHARE} of an equal share]")
@click.option("--repetitions", type=COUNT, default=8, show_default=True, help="Turns of each.")
@json_option
def mesh(
    workload: tuple[str, ...], devices: int, microbatches: int, cores: float | None,
    repetitions: int, json_file: Path | None,
) -> None:  # fmt: skip
    """Replicas of pipelines: each number of them, and which one is chosen before any has run.

    Worker processes have equal shares of this machine; all ways to divide them between replicas and stages
    take turns, step by step, beside one worker that trains alone.
    """
    end_cleanly()
    if confine.skipped(with_link=False):
        return
    counts = tuple(n for n in range(1, devices + 1) if devices % n == 0 and n <= microbatches)

    def measured(name: str) -> list[Row]:
        asked = MeshRun(name, microbatches, counts)
        run = run_driver("tf_ooo.bench.mesh.driver", asked, devices, cores, repetitions)
        return [row_of(run, asked)]

    click.echo(summary_of(reported(map(measured, workload), text_of, json_file)))
