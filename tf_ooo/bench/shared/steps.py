"""What benchmarks run in turns: a callback's fit, or Keras' own step on one device or several.

Each has ``step_s()``: seconds of one training step, from the call to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_ooo.bench.shared.workloads import Workload, check_sum
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError
from tf_ooo.fit.life import FitLife
from tf_ooo.modes.pipeline.mode import PipelineMode
from tf_ooo.modes.table import LayerPipe, Pipeline, mode_for
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.report.report import Report
from tf_ooo.rewriting.unrolled_tasks import Step


class InTurn:
    """The steps of a fit, run without ``model.fit``.

    ``measured``: the step of another pipeline of the same workload, taken apart, and its costs: then this one
    is traced once only.
    """

    # Run until now.
    steps = 0

    def __init__(
        self,
        workload: Workload,
        options: Pipeline | LayerPipe,
        measured: tuple[Step, CostTable] | None = None,
    ) -> None:
        self._pipeline = PipelineMode(options) if isinstance(options, Pipeline) else None
        if self._pipeline is not None:
            self._pipeline.planned_from = measured
        self._fit = FitLife(self._pipeline or mode_for(options))
        self._model = workload.model
        # Of each step of a pipeline; LayerPipe's come some steps later.
        self.losses: list[float] = []
        self._batches = iter(tf.data.Dataset.from_tensors((workload.x, workload.y)).repeat())
        self._model.make_train_function()
        self._fit.begin(self._model)

    @property
    def report(self) -> Report:
        """The fit's."""
        return self._fit.report

    @property
    def schedule(self) -> Schedule:
        """What the fit runs.  BackendError where nothing has been planned."""
        if self.report.planned is None:
            raise BackendError(f"nothing has been planned: {self.report.fallback_reason}")
        return self.report.planned

    @property
    def measured(self) -> tuple[Step, CostTable] | None:
        """The step of a pipeline taken apart, and its costs; None before."""
        return None if self._pipeline is None else self._pipeline.planned_from

    def start(self, more: int) -> None:
        """Runs until the model is distributed, and ``more`` steps."""
        while not self.report.layerpipe.get("rounds") and self.report.rewritten_graph is None:
            self.step_s()
        for _ in range(more):
            self.step_s()

    def step_s(self) -> float:
        """Seconds of one step."""
        started_s = time.perf_counter()
        logs = self._model.train_function(self._batches)
        self.steps += 1
        took_s = time.perf_counter() - started_s
        if self._pipeline is not None:
            self.losses.append(float(logs["loss"]))
        return took_s

    def finish(self) -> int:
        """Puts the model back together; a check sum of its weights."""
        self._fit.finish()
        return check_sum(self._model)


class Stock:
    """Keras' own training step, of one model or of several side by side, each on its device.

    Models that train on equal parts of a batch do the work of a pipeline, equally divided, without
    dependencies and messages: no schedule can be faster here.
    """

    def __init__(self, make: Callable[[], Workload], devices: Sequence[str]) -> None:
        steps = [_on(device, make) for device in devices]
        self._step = tf.function(lambda: [step() for step in steps], autograph=False)

    def start(self) -> None:
        """Traces, and runs two steps."""
        for _ in range(3):
            self.step_s()

    def step_s(self) -> float:
        """Seconds of one step, until the losses are there."""
        started_s = time.perf_counter()
        for loss in self._step():
            loss.numpy()
        return time.perf_counter() - started_s


def _on(device: str, make: Callable[[], Workload]) -> Callable[[], tf.Tensor]:
    """A step on one device; it returns its loss."""
    with tf.device(device):
        workload = make()
        workload.model.optimizer.build(workload.model.trainable_variables)
        batch = tf.constant(workload.x), tf.constant(workload.y)

    def step() -> tf.Tensor:
        with tf.device(device):
            return workload.model.train_step(batch)["loss"]

    return step
