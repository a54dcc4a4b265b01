"""What the machinery of a pipeline costs: one stage and one micro-batch beside Keras' own training step.

Both models train in this process, turn and turn about; which one begins changes from pair to pair.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import click

from tf_ooo.bench.pipeline.scheduled import Scheduled
from tf_ooo.bench.shared.processes import JsonOf
from tf_ooo.bench.shared.rows import Row, bits_text, seconds_of
from tf_ooo.bench.shared.workloads import Workload, check_sum, make

SCHEDULE = "1f1b"
# Before these both have been compiled, and TensorFlow's executors know which kernels are cheap.
_WARM_UP = 5


@dataclass(frozen=True)
class Overhead:
    """What to measure: a workload, how many pairs of steps; and the file for the row."""

    workload: str
    pairs: int
    out: str


class Pairs(TypedDict):
    """Seconds of stock's and of our step, pair by pair; whether both ended with the same weights."""

    times_s: list[tuple[float, float]]
    bit_equal: bool


class StockFit:
    """The train function that ``fit`` calls, of a model that knows nothing of us."""

    def __init__(self, workload: Workload) -> None:
        import tensorflow as tf

        self.workload = workload
        self._iterator = iter(tf.data.Dataset.from_tensors((workload.x, workload.y)).repeat())
        workload.model.make_train_function()

    def step_s(self) -> float:
        """Seconds of one step, until its logs are there."""
        from tf_ooo.compat import nests

        started_s = time.perf_counter()
        nests.synchronize(self.workload.model.train_function(self._iterator))
        return time.perf_counter() - started_s


def pairs_of(workload: str, pairs: int) -> Pairs:
    """Trains both models."""
    stock = StockFit(make(workload, 1))
    ours = Scheduled(make(workload, 1), {"devices": 1, "microbatches": 1, "schedule": SCHEDULE})
    ours.start()
    for _ in range(ours.session.steps):
        stock.step_s()
    for _ in range(_WARM_UP):
        stock.step_s(), ours.step_s()
    times_s: list[tuple[float, float]] = []
    for number in range(pairs):
        order = (stock, ours) if number % 2 else (ours, stock)
        seconds = {run: run.step_s() for run in order}
        times_s.append((seconds[stock], seconds[ours]))
    bits = check_sum(stock.workload.model), ours.session.finish()
    return {"times_s": times_s, "bit_equal": bits[0] == bits[1]}


def row_of(workload: str, pairs: Pairs) -> Row:
    """The benchmark's row: medians, and of each pair's ratio the median and the quartiles."""
    stock_s, ours_s = zip(*pairs["times_s"], strict=True)
    ratios = [ours / stock for stock, ours in pairs["times_s"]]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "workload": workload,
        "mode": "pipeline",
        "schedule": SCHEDULE,
        "baseline": "stock fit",
        "devices": 1,
        "microbatches": 1,
        **seconds_of(ours_s, stock_s),
        "speedup": 1 / middle,
        "overhead": middle - 1,
        "overhead_quartiles": [low - 1, high - 1],
        "pairs": len(ratios),
        "bit_equal": pairs["bit_equal"],
    }


def text_of(row: Row) -> str:
    """One line."""
    low, high = row["overhead_quartiles"]
    return (
        f"{row['workload']:14s} one stage, one micro-batch: {row['step_s'] * 1e3:.1f} ms, stock fit "
        f"{row['baseline_step_s'] * 1e3:.1f} ms; overhead {row['overhead']:+.1%} (middle half of "
        f"{row['pairs']} pairs: {low:+.1%} to {high:+.1%}), "
        f"{bits_text(row)}"
    )


@click.command()
@click.argument("asked", type=JsonOf(Overhead))
def main(asked: Overhead) -> None:
    """Writes the row.  A process of its own: TensorFlow gets one thread for each op."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    row = row_of(asked.workload, pairs_of(asked.workload, asked.pairs))
    Path(asked.out).write_text(json.dumps(row))


if __name__ == "__main__":
    main()
