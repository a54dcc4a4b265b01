"""What a run of ``tf-ooo bench pipeline`` is asked for, and the rows that come of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tf_ooo.bench.shared.drivers import Measured, row_of
from tf_ooo.bench.shared.rows import Row, bits_text, seconds_of, spread_text
from tf_ooo.bench.shared.scripts import network_of
from tf_ooo.bench.shared.workloads import PIPELINE

BASELINE, SERIAL, LOCAL = "gpipe", "serial", "local"
# Schedules that users of PyTorch have: a dO is sent after the dW of its stage.
FUSED = ("gpipe", "1f1b", "interleaved_1f1b")
# The same order, in which a dO does not wait for that dW.
UNFUSED = "_unfused"
# What ours are compared with: also the orders of others that only wait less, which they do not have.
BASELINES = (*FUSED, *(f"{name}{UNFUSED}" for name in FUSED))
TORCH = "torch.distributed.pipelining"
# Its schedules: stages on each rank, by the name of the run.
TORCH_STAGES = {"torch_gpipe": 1, "torch_1f1b": 1, "torch_zbv": 2}
TORCH_SERIAL = "torch_serial"


@dataclass(frozen=True)
class PipelineRun:
    """A workload and its micro-batches, schedules, a folder for pictures (empty: none), and whether
    torch.distributed.pipelining takes turns with them."""

    workload: str
    microbatches: int
    schedules: list[str]
    pictures: str
    torch: bool


class PipelineMeasured(Measured):
    """``torch``: its version; None where it did not run."""

    torch: str | None


@dataclass(frozen=True)
class OverheadRun:
    """A workload, and how many pairs of steps to time."""

    workload: str
    pairs: int


def rows_of(measured: PipelineMeasured, asked: PipelineRun) -> list[Row]:
    """One row for each schedule."""
    about = _about(asked, "pipeline")
    if LOCAL in measured["times"]:
        # The shortest turn: the median of another run may not be below a bound by noise.
        about["bound_s"] = min(measured["times"][LOCAL])
    return [row_of(measured, about, name, BASELINE) for name in measured["runs"]]


def torch_rows_of(measured: PipelineMeasured, asked: PipelineRun) -> list[Row]:
    """One row for each of torch's schedules, beside its own serial step and our fastest schedule."""
    times, about = measured["times"], _about(asked, TORCH) | {"runs": measured["torch"]}
    ours = min(measured["runs"], key=lambda name: statistics.median(times[name]))
    return [row_of(measured, about, name, ours, TORCH_SERIAL) for name in TORCH_STAGES if name in times]


def _about(asked: PipelineRun, mode: str) -> Row:
    """``batch_rows``: of one micro-batch."""
    return {
        "workload": asked.workload,
        "mode": mode,
        "microbatches": asked.microbatches,
        "batch_rows": network_of(PIPELINE, asked.workload).batch,
    }


def overhead_row_of(workload: str, times_s: Sequence[tuple[float, float]], bit_equal: bool) -> Row:
    """Medians of stock's and our step, and of each pair's ratio the median and the quartiles."""
    stock_s, ours_s = zip(*times_s, strict=True)
    low, middle, high = statistics.quantiles([ours / stock for stock, ours in times_s], n=4)
    return {
        "workload": workload,
        "mode": "pipeline",
        "schedule": "1f1b",
        "baseline": "stock fit",
        "devices": 1,
        "microbatches": 1,
        **seconds_of(ours_s, stock_s),
        "speedup": 1 / middle,
        "overhead": middle - 1,
        "overhead_quartiles": [low - 1, high - 1],
        "pairs": len(times_s),
        "bit_equal": bit_equal,
    }


def text_of(row: Row) -> str:
    """One line."""
    if "overhead" in row:
        return _overhead_text(row)
    start = f"{row['workload']} P={row['devices']} m={row['microbatches']}".ljust(28)
    start += f" {row['schedule']:14s} {spread_text(row)}, "
    speedup = f"{row['speedup']:.2f}x {row['baseline']}" if "speedup" in row else ""
    if row["mode"] != "pipeline":
        more = f"serial {row['serial_s'] * 1e3:.0f}, efficiency {row['efficiency']:.2f} ({row['runs']})"
        return f"{start}{speedup}, {more}"
    return (
        f"{start}predicted {row['predicted_step_s'] * 1e3:.0f}, local {row.get('bound_s', 0) * 1e3:.0f}"
        f"{speedup and '  '}{speedup}, efficiency {row['efficiency']:.2f}, bubble "
        f"{row['bubble_fraction']:.0%} (predicted {row['predicted_bubble_fraction']:.0%}), peak "
        f"{_megabytes(row['measured_peak_bytes'])} MB (predicted {_megabytes(row['peak_bytes'])}), "
        f"{bits_text(row)}"
    )


def _overhead_text(row: Row) -> str:
    low, high = row["overhead_quartiles"]
    return (
        f"{row['workload']:14s} one stage, one micro-batch: {row['step_s'] * 1e3:.1f} ms, stock fit "
        f"{row['baseline_step_s'] * 1e3:.1f} ms; overhead {row['overhead']:+.1%} (middle half of "
        f"{row['pairs']} pairs: {low:+.1%} to {high:+.1%}), {bits_text(row)}"
    )


def _megabytes(sizes: Sequence[float]) -> str:
    return "/".join(f"{size / 1e6:.0f}" for size in sizes)
