"""What the machinery of a pipeline costs: one stage and one micro-batch beside Keras' own training step.

Both models train in this process, turn and turn about; which one begins changes from pair to pair.
"""

from __future__ import annotations

import time

import tensorflow as tf

from tf_ooo.bench.pipeline.rows import OverheadRun, overhead_row_of
from tf_ooo.bench.shared.processes import end_with, requests
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.steps import InTurn
from tf_ooo.bench.shared.workloads import PIPELINE, Workload, check_sum, make
from tf_ooo.compat import nests
from tf_ooo.modes.table import Pipeline

# Before these both have been compiled, and TensorFlow's executors know which kernels are cheap.
_WARM_UP = 5


class StockFit:
    """The train function that ``fit`` calls, of a model that knows nothing of us."""

    def __init__(self, workload: Workload) -> None:
        self.model = workload.model
        self._batches = iter(tf.data.Dataset.from_tensors((workload.x, workload.y)).repeat())
        self.model.make_train_function()

    def step_s(self) -> float:
        """Seconds of one step, until its logs are there."""
        started_s = time.perf_counter()
        nests.synchronize(self.model.train_function(self._batches))
        return time.perf_counter() - started_s


def row(asked: OverheadRun) -> Row:
    """Trains both models."""
    network = PIPELINE[asked.workload]
    stock = StockFit(make(network))
    ours = InTurn(make(network), Pipeline(devices=1, microbatches=1, schedule="1f1b"))
    ours.start(2)
    for _ in range(ours.steps):
        stock.step_s()
    for _ in range(_WARM_UP):
        stock.step_s(), ours.step_s()
    times_s: list[tuple[float, float]] = []
    for number in range(asked.pairs):
        order = (stock, ours) if number % 2 else (ours, stock)
        seconds = {run: run.step_s() for run in order}
        times_s.append((seconds[stock], seconds[ours]))
    return overhead_row_of(asked.workload, times_s, check_sum(stock.model) == ours.finish())


if __name__ == "__main__":
    # A process of its own: TensorFlow gets one thread for each op.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    end_with(row(*requests(OverheadRun)))
