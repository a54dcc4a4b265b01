"""The command ``tf-ooo bench layerpipe``."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path

import click
from click.core import ParameterSource

from tf_ooo.bench.layerpipe import accuracy as late
from tf_ooo.bench.layerpipe.rows import BASELINE, LayerPipeRun, rows_of, text_of
from tf_ooo.bench.planner import layerpipe as on_paper
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.bars import save_bars
from tf_ooo.bench.shared.drivers import SHARE, end_cleanly, run_driver
from tf_ooo.bench.shared.options import (
    CORES,
    COUNT,
    FILE,
    SeveralValues,
    json_option,
    quick_option,
    several,
)
from tf_ooo.bench.shared.rows import Row, reported
from tf_ooo.bench.shared.workloads import LAYERPIPE

# Beside the baseline.
SCHEDULES = ("fast_forward", "pipedream_2bw", "layerpipe", "layerpipe_ema")
DEVICES, ACCURACY_DEVICES = (2, 3, 4), (3,)
_WITH_ACCURACY = {"network", "rate", "devices", "seeds", "epochs"}
_EVERYWHERE = {"quick", "json_file", "keep", "accuracy", "simulated"}


@click.command("layerpipe", cls=SeveralValues)
@quick_option("The MLP on 2 workers, under 5 minutes; with --accuracy one seed, under two minutes.",
              repetitions=2, seeds=1)  # fmt: skip
@json_option
@click.option("--png", type=FILE, help="File for a picture of the rows.")
@several("--workload", click.Choice(list(LAYERPIPE)), default=["mlp"], show_default=True)
@several(
    "--schedules", click.Choice(SCHEDULES), default=SCHEDULES, help="Beside PipeDream; all of them without."
)
@several(
    "--devices", COUNT, help="Worker processes.  [default: 2 3 4; with --accuracy 3 logical CPU devices]"
)
@click.option("--cores", type=CORES, help=f"Of each worker.  [default: {SHARE} of an equal share]")
@click.option("--repetitions", type=COUNT, default=6, show_default=True, help="Turns of each mode.")
@click.option("--simulated", is_flag=True,
              help="Instead: all workloads on paper, for 2 to 16 processors.")  # fmt: skip
@click.option("--accuracy", is_flag=True,
              help="Instead: the test accuracy on digits, beside stock Keras.")  # fmt: skip
@several("--network", click.Choice(late.NETWORKS), default=["conv"],
         show_default=True, help="With --accuracy.")  # fmt: skip
@several("--rate", click.Choice(list(late.RATES)), default=["cosine"],
         show_default=True, help="With --accuracy.")  # fmt: skip
@click.option("--seeds", type=COUNT, default=5, show_default=True, help="With --accuracy: how many.")
@click.option("--epochs", type=COUNT, default=30, show_default=True, help="With --accuracy.")
@click.pass_context
def layerpipe(
    ctx: click.Context, quick: bool, json_file: Path | None, png: Path | None, workload: tuple[str, ...],
    schedules: tuple[str, ...], devices: tuple[int, ...], cores: float | None, repetitions: int,
    simulated: bool, accuracy: bool, network: tuple[str, ...], rate: tuple[str, ...], seeds: int, epochs: int,
) -> None:  # fmt: skip
    """LayerPipe against PipeDream on worker processes.

    Also PipeDream-2BW and a synchronous pipeline.  The workers have equal shares of this machine: their
    computing threads get a CPU quota, communication is left free.  All modes take turns, beside the
    whole model on one worker.
    """
    if accuracy:
        _refuse_given(ctx, "does not go with --accuracy", _WITH_ACCURACY)
        trained = late.rows(network, rate, devices or ACCURACY_DEVICES, seeds, epochs)
        trained_rows = reported(([row] for row in trained), late.text_of, json_file)
        click.echo(late.summary(trained_rows))
        return
    if simulated:
        _refuse_given(ctx, "does not go with --simulated", {"png"})
        ctx.invoke(on_paper.main, quick=quick, json_file=json_file, png=png)
        return
    _refuse_given(ctx, "is for --accuracy", set(ctx.params) - _WITH_ACCURACY | {"devices"})
    if confine.skipped(with_link=False):
        return
    end_cleanly()

    def measured(name: str, workers: int) -> list[Row]:
        asked = LayerPipeRun(name, list(dict.fromkeys((BASELINE, *schedules))))
        driver = "tf_ooo.bench.layerpipe.driver"
        return rows_of(run_driver(driver, asked, workers, cores, repetitions), name)

    pairs = itertools.product(workload, devices or (DEVICES[:1] if quick else DEVICES))
    rows = reported(itertools.starmap(measured, pairs), text_of, json_file)
    if png:
        save_bars(rows, png)


def _refuse_given(ctx: click.Context, reason: str, known: Collection[str]) -> None:
    """UsageError where an option was given that is not ``known``: it would do nothing."""
    for option in ctx.command.params:
        given = ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if given and option.name not in {*known, *_EVERYWHERE}:
            raise click.UsageError(f"{option.opts[0]} {reason}", ctx)
