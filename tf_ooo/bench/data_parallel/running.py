"""Starts the workers of ``tf-ooo bench data-parallel``, and reads what they have measured."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from tf_ooo.bench.data_parallel.rows import (
    LOCAL,
    SAME_STEPS,
    TUNED,
    DataParallelMeasured,
    DataParallelRun,
    as_if_in_turns,
    bandwidth_mbit,
    rows_of,
)
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.processes import command, result_of
from tf_ooo.bench.shared.rows import Row
from tf_ooo.hosts.addresses import held_ports

WORKER = "tf_ooo.bench.data_parallel.worker"
# Horovod's own knobs, milliseconds and bytes: what is tried for "tuned"; it ships with 1 and 128 MiB.
TUNING = [
    {"HOROVOD_CYCLE_TIME": cycle_ms, "HOROVOD_FUSION_THRESHOLD": fusion_bytes}
    for cycle_ms, fusion_bytes in (("1", "8388608"), ("3", "8388608"), ("1", "2097152"), ("10", "134217728"))
] + [{"HOROVOD_AUTOTUNE": "1"}]


def on_links(run: DataParallelRun, communication: Sequence[float]) -> Iterator[DataParallelRun]:
    """The run on links on which communicating takes so many times as long as computing, by a run before;
    0: a link without a limit."""
    alone = _run(run, [LOCAL], {})
    for times in communication:
        bandwidth = bandwidth_mbit(alone, times) if times else 0.0
        yield dataclasses.replace(run, communication=times, mbit=bandwidth)


def measured(asked: DataParallelRun) -> list[Row]:
    """The rows of one bandwidth; tuned Horovod brings what its times are scaled by."""
    beside = (SAME_STEPS[0], LOCAL)
    is_tuned = TUNED in asked.configurations
    names = dict.fromkeys([*asked.configurations, *(beside if is_tuned else ())])
    together = _run(asked, [name for name in names if name != TUNED], {})
    tuned = []
    if is_tuned:
        shipped = _run(asked, list(beside), {})
        for knobs in TUNING:
            alone = _run(asked, list(beside), knobs)
            tuned.append(as_if_in_turns(alone, shipped, together) | {"knobs": knobs})
    return rows_of(together, asked, tuned, given_knobs())


def given_knobs() -> dict[str, str]:
    """Horovod's that this process was given: they hold for all configurations of a run."""
    return {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}


def _run(asked: DataParallelRun, names: list[str], knobs: Mapping[str, str]) -> DataParallelMeasured:
    """What rank 0 of one run has measured; ``knobs``: Horovod's."""
    group = f"tf_ooo_bench_{os.getpid()}_"
    launcher = Path(sys.executable).with_name("horovodrun")
    if not launcher.exists():
        raise click.ClickException(
            f"there is no {launcher}: install Horovod, by make horovod or as in docs/data_parallel.md"
        )
    path = f"{launcher.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = os.environ | dict(knobs) | {"PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with (
        held_ports(asked.workers) as ports,
        confine.link(group + "net", asked.mbit * 1e6 if asked.mbit else None) as inside,
        confine.shares(group, asked.workers, asked.cores),
    ):
        cluster = ",".join(f"127.0.0.1:{port}" for port in ports)
        run = dataclasses.replace(asked, configurations=names, group=group, cluster=cluster)
        launch = [*inside, str(launcher), "--gloo", "--network-interfaces", "lo", "-np", str(asked.workers)]
        measured: DataParallelMeasured = result_of([*launch, *command(WORKER, run)], environment)
        return measured
