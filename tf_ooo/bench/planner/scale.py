"""Planning and simulating large pipelines on one core: seconds and memory over four sizes.

The largest has 12.6 million tasks.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from tf_ooo.bench.shared.options import FILE, json_option, quick_option
from tf_ooo.bench.shared.rows import Row, write_rows
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.policies import POLICIES, Problem
from tf_ooo.planning.simulation.simulator import simulate

# (devices, micro-batches, layers)
SIZES = ((128, 512, 256), (256, 1024, 512), (512, 2048, 1024), (1024, 4096, 2048))
# Seconds of F, dO, dW of one layer: whole numbers, so that the closed form is met to the last bit.
FORWARD_S, OUTPUT_GRAD_S, WEIGHT_GRAD_S = 3.0, 4.0, 2.0
LIMIT_S, LIMIT_BYTES = 60.0, 8e9


def measure(devices: int, microbatches: int, layers: int) -> Row:
    """Plans and simulates zb_h1 in this process, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    took_s = (FORWARD_S, OUTPUT_GRAD_S, WEIGHT_GRAD_S)
    costs = (LayerCosts(*took_s, activation_bytes=1 << 20, output_bytes=1 << 16),) * layers
    problem = Problem(costs, devices, microbatches)
    began_s = time.perf_counter()
    # What plan() does above two million tasks; below, it would simulate too, and the curve would bend.
    schedule = POLICIES["zb_h1"].make(problem)
    planned_s = time.perf_counter()
    timeline = simulate(schedule, costs)
    makespan_s, peak_bytes = timeline.makespan_s, max(timeline.peak_bytes)
    done_s = time.perf_counter()
    return {
        "workload": "equal layers",
        "mode": "pipeline",
        "schedule": "zb_h1",
        "devices": devices,
        "microbatches": microbatches,
        "layers": layers,
        "tasks": len(schedule.tasks),
        "plan_s": planned_s - began_s,
        "simulate_s": done_s - planned_s,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "predicted_step_s": makespan_s,
        "bound_s": closed_form_s(devices, microbatches, layers),
        "peak_bytes": peak_bytes,
    }


def closed_form_s(devices: int, microbatches: int, layers: int) -> float:
    """ZB-H1's step: m (F + dO + dW) + (p - 1)(F + dO - dW), arXiv 2401.10241, section 2.3."""
    work_s = FORWARD_S + OUTPUT_GRAD_S + WEIGHT_GRAD_S
    bubble_s = FORWARD_S + OUTPUT_GRAD_S - WEIGHT_GRAD_S
    return layers / devices * (microbatches * work_s + (devices - 1) * bubble_s)


def measure_apart(size: Sequence[int]) -> Row:
    """:func:`measure` in a process of its own, whose memory is that of this size alone."""
    command = [sys.executable, "-m", "tf_ooo", "bench", "planner", "scale", "--one", *map(str, size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise click.ClickException(f"size {tuple(size)} failed:\n{done.stderr}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def exponent(rows: Sequence[Row]) -> float:
    """The power of (devices x micro-batches) with which seconds grow, least squares; 1 is linear."""
    size = [math.log(row["devices"] * row["microbatches"]) for row in rows]
    seconds = [math.log(row["plan_s"] + row["simulate_s"]) for row in rows]
    return statistics.linear_regression(size, seconds).slope


def save_png(rows: Sequence[Row], path: Path) -> None:
    """The curve: seconds and memory over devices x micro-batches, with a line for linear growth."""
    from matplotlib.figure import Figure  # slow to import

    size = [row["devices"] * row["microbatches"] for row in rows]
    seconds = [row["plan_s"] + row["simulate_s"] for row in rows]
    gigabytes = [row["process_bytes"] / 1e9 for row in rows]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.loglog(size, seconds, "o-", label="plan + simulate")
    left.loglog(size, [row["plan_s"] for row in rows], "s--", label="plan")
    left.loglog(size, [seconds[-1] * x / size[-1] for x in size], "k:", label="linear")
    left.axhline(LIMIT_S, color="tab:red", linewidth=0.8, label="limit")
    left.set(xlabel="devices x micro-batches", ylabel="seconds, one core", title="zb_h1: time")
    right.loglog(size, gigabytes, "o-", label="peak of the process")
    right.loglog(size, [gigabytes[-1] * x / size[-1] for x in size], "k:", label="linear")
    right.axhline(LIMIT_BYTES / 1e9, color="tab:red", linewidth=0.8, label="limit")
    right.set(xlabel="devices x micro-batches", ylabel="GB", title="zb_h1: memory")
    for axes in (left, right):
        axes.legend()
        axes.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)


@click.command("scale")
@json_option
@quick_option("Without the largest size.")
@click.option("--png", type=FILE, help="File for the curve.")
@click.option("--one", "size", type=int, nargs=3, metavar="DEVICES MICROBATCHES LAYERS",
              help="Instead: one size in this process; prints its row as JSON.")  # fmt: skip
def main(json_file: Path | None, quick: bool, png: Path | None, size: tuple[int, int, int] | None) -> None:
    """Seconds and memory of planning and simulating large pipelines on one core."""
    if size:
        click.echo(json.dumps(measure(*size)))
        return
    rows = []
    click.echo(
        f"{'devices':>7} {'m':>5} {'tasks':>10} {'plan s':>7} {'simulate s':>10} {'GB':>5}  closed form"
    )
    for measured in SIZES[:-1] if quick else SIZES:
        rows.append(measure_apart(measured))
        click.echo(text_of(rows[-1]))
    click.echo(f"seconds grow with (devices x micro-batches) to the power of {exponent(rows):.2f}")
    write_rows(json_file, rows)
    if png:
        save_png(rows, png)


def text_of(row: Row) -> str:
    """One line."""
    met = "met" if row["predicted_step_s"] == row["bound_s"] else "NOT met"
    return (
        f"{row['devices']:>7} {row['microbatches']:>5} {row['tasks']:>10} {row['plan_s']:7.1f} "
        f"{row['simulate_s']:10.1f} {row['process_bytes'] / 1e9:5.2f}  {met}"
    )
