"""What the machinery of a pipeline costs: one stage and one micro-batch beside Keras' own training step.

Both models train in this process, turn and turn about; which one begins changes from pair to pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_ooo.bench.shared.runs import Scheduled
from tf_ooo.bench.shared.workloads import WORKLOADS, Workload, check_sum, make

SCHEDULE = "1f1b"
# Before these both have been compiled, and TensorFlow's executors know which kernels are cheap.
_WARM_UP = 5


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

        started = time.perf_counter()
        nests.synchronize(self.workload.model.train_function(self._iterator))
        return time.perf_counter() - started


def pairs_of(workload: str, pairs: int) -> dict[str, Any]:
    """Seconds of stock's and our steps, and check sums of the weights that they end with."""
    stock = StockFit(make(workload, 1))
    ours = Scheduled(make(workload, 1), {"devices": 1, "microbatches": 1, "schedule": SCHEDULE})
    ours.start()
    for _ in range(ours.steps):
        stock.step_s()
    for _ in range(_WARM_UP):
        stock.step_s(), ours.step_s()
    times_s: list[tuple[float, float]] = []
    for number in range(pairs):
        order = (stock, ours) if number % 2 else (ours, stock)
        seconds = {run: run.step_s() for run in order}
        times_s.append((seconds[stock], seconds[ours]))
    bits = check_sum(stock.workload.model), ours.finish()
    return {"times_s": times_s, "bit_equal": bits[0] == bits[1], "edges": ours.report.added_edges}


def row_of(workload: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The benchmark's row: medians, and of each pair's ratio the median and the quartiles."""
    stock_s, ours_s = zip(*found["times_s"], strict=True)
    ratios = [ours / stock for stock, ours in found["times_s"]]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "workload": workload,
        "mode": "pipeline",
        "schedule": SCHEDULE,
        "baseline": "stock fit",
        "devices": 1,
        "microbatches": 1,
        "step_s": statistics.median(ours_s),
        "step_s_min": min(ours_s),
        "step_s_max": max(ours_s),
        "baseline_step_s": statistics.median(stock_s),
        "speedup": 1 / middle,
        "overhead": middle - 1,
        "overhead_quartiles": [low - 1, high - 1],
        "pairs": len(ratios),
        "bit_equal": found["bit_equal"],
    }


def text_of(row: Mapping[str, Any]) -> str:
    """One line."""
    low, high = row["overhead_quartiles"]
    return (
        f"{row['workload']:14s} one stage, one micro-batch: {row['step_s'] * 1e3:.1f} ms, stock fit "
        f"{row['baseline_step_s'] * 1e3:.1f} ms; overhead {row['overhead']:+.1%} (middle half of "
        f"{row['pairs']} pairs: {low:+.1%} to {high:+.1%}), "
        f"{'same bits' if row['bit_equal'] else 'OTHER BITS'}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """One workload; writes its row.  A process of its own: TensorFlow gets one thread for each op."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True, choices=WORKLOADS)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    row = row_of(options.workload, pairs_of(options.workload, options.pairs))
    options.out.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
