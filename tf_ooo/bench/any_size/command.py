"""The command ``tf-ooo bench any-size``."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from tf_ooo.bench.any_size.driver import AnySizeRun
from tf_ooo.bench.shared import memory_groups
from tf_ooo.bench.shared.drivers import end_cleanly
from tf_ooo.bench.shared.options import COUNT, json_option, quick_option
from tf_ooo.bench.shared.processes import command, result_of
from tf_ooo.bench.shared.rows import Row, reported
from tf_ooo.hosts.addresses import free_ports

_DRIVER = "tf_ooo.bench.any_size.driver"
_PREFIX = "tf_ooo_any_size_"
# Of what a worker may use, for tensors: its process and its graphs take the rest.
_PLANNED_SHARE = 0.84
# Adam has two numbers for each weight.
WITH_SLOTS = 3
# What is free is given back, so that the most that was used is what was needed.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "4"}


@click.command("any-size")
@click.option("--layers", type=COUNT, default=16, show_default=True, help="Of the transformer.")
@click.option("--width", type=COUNT, default=1600, show_default=True, help="Of each; a multiple of 8.")
@click.option("--limit-mb", type=COUNT, default=2950, show_default=True, help="That one process may use.")
@click.option("--workers", type=COUNT, default=4, show_default=True, help="That share the model.")
@click.option("--steps", type=COUNT, default=6, show_default=True, help="To train.")
@quick_option("8 layers of 256, 600 MB.", expose=False, layers=8, width=256, limit_mb=600)
@json_option
def any_size(
    layers: int, width: int, limit_mb: int, workers: int, steps: int, json_file: Path | None
) -> None:
    """A model on workers that may each use half of what it needs.

    Workers run under a memory limit of the operating system, which ends who passes it (root, control
    groups).  Beside them stock Keras in one process: without a limit, for its losses, and under the same one.
    """
    reason = memory_groups.why_not()
    if reason:
        click.echo(f"skipped: {reason}")
        return
    end_cleanly()
    asked = AnySizeRun(layers, width, 8, steps, planned_bytes=int(_PLANNED_SHARE * limit_mb * 1e6))
    rows = reported(_runs(asked, limit_mb * 10**6, workers), text_of, json_file)
    click.echo(verdict_of(rows))


def _runs(asked: AnySizeRun, limit_bytes: int, workers: int) -> Iterator[list[Row]]:
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    about = {"layers": asked.layers, "width": asked.width, "date": f"{datetime.date.today()}"}
    with _workers(workers, limit_bytes, environment) as (cluster, groups):
        row = result_of(command(_DRIVER, replace(asked, cluster=cluster)), environment)
        used = [group.most_bytes for group in groups]
    yield [{"runs_on": f"{workers} workers", **about, **row, "limit_bytes": limit_bytes, "used_bytes": used}]
    in_one_process = command(_DRIVER, asked)
    yield [{"runs_on": "one process", **about, **result_of(in_one_process, environment)}]
    with memory_groups.memory_group(f"{_PREFIX}one", limit_bytes) as group:
        limited = environment | _ALLOCATOR
        ended = subprocess.run(group.command(in_one_process), env=limited, capture_output=True, check=False)
        row = {"status": ended.returncode, "limit_bytes": limit_bytes, "used_bytes": [group.most_bytes]}
        yield [{"runs_on": "one process", **about, **row}]


@contextlib.contextmanager
def _workers(
    count: int, limit_bytes: int, environment: dict[str, str]
) -> Iterator[tuple[str, list[memory_groups.MemoryGroup]]]:
    """Addresses and groups of workers that are ready; they are ended."""
    cluster = ",".join(f"127.0.0.1:{port}" for port in free_ports(count))
    start = [sys.executable, "-m", "tf_ooo", "worker", "--cluster", cluster, "--task"]
    with contextlib.ExitStack() as stack:
        groups = [
            stack.enter_context(memory_groups.memory_group(f"{_PREFIX}{task}", limit_bytes))
            for task in range(count)
        ]
        for task, group in enumerate(groups):
            worker = subprocess.Popen(
                group.command([*start, str(task)]),
                env=environment | _ALLOCATOR,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            if worker.stdout is not None:
                worker.stdout.readline()  # that it is ready
        yield cluster, groups


def text_of(row: Row) -> str:
    """One line."""
    limit = f", {row['limit_bytes'] / 1e6:.0f} MB each" if "limit_bytes" in row else ", no limit"
    used = f", used at most {max(row['used_bytes']) / 1e6:.0f} MB" if "used_bytes" in row else ""
    if "losses" not in row:
        return f"{row['runs_on']}{limit}: ended with status {row['status']}{used}"
    needs = f"weights and Adam's slots {WITH_SLOTS * row['weights_bytes'] / 1e6:.0f} MB"
    losses = " ".join(f"{loss:.6f}" for loss in row["losses"])
    return f"{row['runs_on']}{limit}: {needs}{used}; losses {losses}"


def verdict_of(rows: list[Row]) -> str:
    """How much larger the model was than a worker, and how far the losses are apart."""
    over, whole, limited = rows
    factor = WITH_SLOTS * over["weights_bytes"] / over["limit_bytes"]
    pairs = zip(over["losses"], whole["losses"], strict=True)
    apart = max(abs(a - b) / abs(b) for a, b in pairs)
    ended = f"ended with status {limited['status']}" if limited["status"] else "trained, too"
    return (
        f"weights and slots are {factor:.2f} times what a worker may use; losses differ by {apart:.1e} "
        f"(relative) at most; one process under that limit {ended}"
    )
