"""What benchmarks run in turns: a callback's fit, or Keras' own step on one device or several.

Each has ``step_s()``: seconds of one training step, from the call to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tf_ooo.bench.shared.workloads import Workload, check_sum
from tf_ooo.errors import BackendError
from tf_ooo.fit.life import FitLife

if TYPE_CHECKING:
    import tensorflow as tf

    from tf_ooo.costs.layer_costs import LayerCosts
    from tf_ooo.fit.mode import Mode
    from tf_ooo.planning.model.schedule import Schedule
    from tf_ooo.report.report import Report


class Timed(Protocol):
    """Whatever can take turns."""

    def step_s(self) -> float:
        """Seconds of one step."""
        ...


class StepByStep:
    """The steps of a mode, run without ``model.fit``: several of them can take turns.

    Attributes:
        life: it has begun.
        steps: run until now.
    """

    def __init__(self, workload: Workload, mode: Mode) -> None:
        import tensorflow as tf

        self.life, self.steps = FitLife(mode), 0
        self._model = workload.model
        self._batches = iter(tf.data.Dataset.from_tensors((workload.x, workload.y)).repeat())
        self._model.make_train_function()
        self.life.begin(self._model)

    @property
    def report(self) -> Report:
        """The fit's."""
        return self.life.report

    @property
    def schedule(self) -> Schedule:
        """What the fit runs.  BackendError where it has not been planned."""
        if self.report.planned is None:
            raise BackendError(f"nothing has been planned: {self.report.fallback_reason}")
        return self.report.planned

    @property
    def layers(self) -> tuple[LayerCosts, ...]:
        """What the layers cost, as planned with.  BackendError where nothing has been planned."""
        if self.report.costs is None:
            raise BackendError(f"nothing has been planned: {self.report.fallback_reason}")
        return self.report.costs.layers

    def step_s(self) -> float:
        """Seconds of one step."""
        started_s = time.perf_counter()
        self._model.train_function(self._batches)
        self.steps += 1
        return time.perf_counter() - started_s

    def finish(self) -> int:
        """Puts the model back together; a check sum of its weights."""
        self.life.finish()
        return check_sum(self._model)


class Stock:
    """Keras' own training step, of one model or of several side by side, each on its device.

    Models that train on equal parts of a batch do the work of a pipeline, equally divided, without
    dependencies and messages: no schedule can be faster here.

    Args:
        make: makes one of the models and its batch.
        devices: of the models.
    """

    def __init__(self, make: Callable[[], Workload], devices: Sequence[str]) -> None:
        import tensorflow as tf

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
    """A step on one device; its loss."""
    import tensorflow as tf

    with tf.device(device):
        workload = make()
        workload.model.optimizer.build(workload.model.trainable_variables)
        batch = tf.constant(workload.x), tf.constant(workload.y)

    def step() -> tf.Tensor:
        with tf.device(device):
            return workload.model.train_step(batch)["loss"]

    return step

