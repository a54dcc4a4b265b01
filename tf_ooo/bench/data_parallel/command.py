"""The command ``tf-ooo bench data-parallel``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import click

from tf_ooo.bench.data_parallel.rows import (
    BASELINE,
    CONFIGURATIONS,
    LOCAL,
    PLAIN,
    SAME_STEPS,
    TUNED,
    DataParallelRun,
    text_of,
)
from tf_ooo.bench.data_parallel.running import measured, on_links
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.bars import save_bars
from tf_ooo.bench.shared.drivers import end_cleanly
from tf_ooo.bench.shared.options import CORES, COUNT, FILE, json_option, quick_option
from tf_ooo.bench.shared.rows import reported
from tf_ooo.bench.shared.workloads import DATA_PARALLEL

ALL, QUICK = ",".join((*CONFIGURATIONS, TUNED)), ",".join((BASELINE, SAME_STEPS[0], LOCAL, PLAIN, "auto"))


class _Numbers(click.ParamType):  # type: ignore[type-arg]
    """Numbers with commas; ``none`` is 0: no limit."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        try:
            numbers = [0.0 if text == "none" else float(text) for text in value.split(",")]
        except ValueError:
            numbers = [-1.0]
        if not all(0 <= number < math.inf for number in numbers):
            self.fail(f"{value!r}: expected numbers with commas, or none, none of them below 0", param, ctx)
        return numbers


@click.command("data-parallel")
@quick_option("A small workload, few configurations, under 5 minutes.", expose=False,
              workload="mlp_small", repetitions=3, configurations=QUICK)  # fmt: skip
@json_option
@click.option("--png", type=FILE, help="File for a picture.")
@click.option("--workload", type=click.Choice(list(DATA_PARALLEL)), default="mlp", show_default=True)
@click.option("--communication", type=_Numbers("TIMES"),
              help="Links on which communicating takes so many times as long as computing, by a run before: "
                   "0.7,1,1.3.  [default: 1]")  # fmt: skip
@click.option("--mbit", type=_Numbers("Mbit/s"),
              help="Instead, of the link, several with commas; none: no limit.")  # fmt: skip
@click.option("--workers", type=COUNT, default=2, show_default=True, help="Processes.")
@click.option("--cores", type=CORES, default=0.5, show_default=True,
              help="Of each worker, for computing; 1: one of its own, without a quota.")  # fmt: skip
@click.option(
    "--rows", type=click.IntRange(0), default=0, help="Of each worker's batch.  [default: the workload's]"
)
@click.option("--steps", type=COUNT, default=4, show_default=True, help="Of one execution.")
@click.option("--repetitions", type=COUNT, default=5, show_default=True, help="Turns of each configuration.")
@click.option("--configurations", default=ALL, help=f"Of {ALL}.  [default: all; with --quick {QUICK}]")
def data_parallel(
    json_file: Path | None, png: Path | None, workload: str, communication: list[float] | None,
    mbit: list[float] | None, workers: int, cores: float, rows: int, steps: int, repetitions: int,
    configurations: str,
) -> None:  # fmt: skip
    """Data parallel training against stock Horovod.

    Each worker has its share of this machine's CPU, all of them one link of chosen bandwidth.  In every
    run all configurations take turns, so that a disturbance hits all of them.
    """
    names = configurations.split(",")
    unknown = [name for name in names if name not in (*CONFIGURATIONS, TUNED)]
    if unknown:
        raise click.BadParameter(
            f"{unknown[0]!r} is no configuration; there are {ALL}", param_hint="--configurations"
        )
    if communication and mbit:
        raise click.UsageError("--communication chooses the link, and --mbit says which: give one of them")
    if confine.skipped():
        return
    if workers < 2 or workers * cores > confine.own_cores():
        raise click.ClickException(
            f"{workers} workers of {cores} core: there have to be two or more, with no more than the "
            f"{confine.own_cores()} cores here together; see --workers and --cores"
        )
    end_cleanly()
    compared = list(dict.fromkeys([BASELINE, *names]))  # what all are compared with
    run = DataParallelRun(workload, compared, 0.0, workers, cores, rows, steps, repetitions)
    runs: Iterable[DataParallelRun] = on_links(run, communication or [1.0])
    if mbit:
        runs = (dataclasses.replace(run, mbit=bandwidth) for bandwidth in mbit)
    measured_rows = reported(map(measured, runs), text_of, json_file)
    if png:
        save_bars(measured_rows, png)
