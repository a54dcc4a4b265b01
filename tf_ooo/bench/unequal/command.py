"""The command ``tf-ooo bench unequal``."""

from __future__ import annotations

from pathlib import Path

import click

from tf_ooo.bench.mesh.cases import CASES
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.drivers import SHARE, end_cleanly, run_driver
from tf_ooo.bench.shared.options import (
    CORES,
    COUNT,
    POSITIVE,
    SeveralValues,
    json_option,
    quick_option,
    several,
)
from tf_ooo.bench.shared.rows import Row, reported
from tf_ooo.bench.unequal.rows import UnequalRun, row_of, text_of

_MODELS = ("mlp_even", "resnet", "transformer", "gpt2")


@click.command("unequal", cls=SeveralValues)
@quick_option("One model, 4 turns: under 5 minutes.", expose=False, workload=_MODELS[:1], repetitions=4)
@several("--workload", click.Choice(list(CASES)), default=list(_MODELS), show_default=True)
@click.option("--devices", type=COUNT, default=3, show_default=True, help="Worker processes.")
@click.option("--microbatches", type=COUNT, default=8, show_default=True, help="Of a step.")
@click.option(
    "--cores", type=CORES, help=f"Of each worker but the last.  [default: {SHARE} of an equal share]"
)
@click.option("--slow", type=POSITIVE, default=0.5, show_default=True, help="Of that, what the last one has.")
@click.option("--repetitions", type=COUNT, default=8, show_default=True, help="Turns of each.")
@json_option
def unequal(
    workload: tuple[str, ...], devices: int, microbatches: int, cores: float | None, slow: float,
    repetitions: int, json_file: Path | None,
) -> None:  # fmt: skip
    """Workers of unequal speed: stages for each one's own, measured before the model is cut.

    The last worker has a part of the others' CPU.  Pipelines that are planned for the measured speeds, and as
    if all workers were alike, take turns with what is chosen from all divisions of all or fewer workers, and
    with one worker that trains alone.
    """
    end_cleanly()
    if confine.skipped(with_link=False):
        return

    def measured(name: str) -> list[Row]:
        asked = UnequalRun(name, microbatches, slow)
        run = run_driver("tf_ooo.bench.unequal.driver", asked, devices, cores, repetitions)
        return [row_of(run, asked)]

    reported(map(measured, workload), text_of, json_file)
