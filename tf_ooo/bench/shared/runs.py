"""What the pipeline benchmark runs in turns: schedules, the model on one device, and its parts side by side.

Each has ``step_s()``: seconds of one training step, from the call to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tf_ooo.bench.shared.workloads import Workload, check_sum


class Steps:
    """The steps of a session of the callback, run without ``fit``: several of them can take turns."""

    def __init__(self, workload: Workload, session: Any) -> None:
        import tensorflow as tf

        self.workload, self.session = workload, session
        data = tf.data.Dataset.from_tensors((workload.x, workload.y)).repeat()
        self._iterator = iter(data)
        model = workload.model
        model.make_train_function()
        self.session.begin(model, {})
        self.steps = 0

    @property
    def report(self) -> Any:
        """The session's."""
        return self.session.report

    def step_s(self) -> float:
        """One step."""
        started = time.perf_counter()
        self.workload.model.train_function(self._iterator)
        self.steps += 1
        return time.perf_counter() - started

    def finish(self) -> int:
        """Puts the model back together; a check sum of its weights."""
        self.session.finish()
        return check_sum(self.workload.model)


class Scheduled(Steps):
    """A pipeline.

    ``measured`` is the ``planned_from`` of another one's session, for the same workload: then this one is
    traced once only.
    """

    def __init__(self, workload: Workload, options: dict[str, Any], measured: Any = None) -> None:
        from tf_ooo.modes.pipeline.fit import PipelineFit
        from tf_ooo.modes.pipeline.options import Pipeline

        session = PipelineFit(Pipeline(**options))
        session.planned_from = measured
        super().__init__(workload, session)

    def start(self) -> None:
        """Runs until the model is distributed, and two steps more."""
        while self.report.rewritten_graph is None:
            self.step_s()
        for _ in range(2):
            self.step_s()


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

        parts = []
        for device in devices:
            with tf.device(device):
                workload = make()
                workload.model.optimizer.build(workload.model.trainable_variables)
                x, y = tf.constant(workload.x), tf.constant(workload.y)
            parts.append((device, workload.model, x, y))
        self._step = tf.function(_side_by_side(parts), autograph=False)

    def start(self) -> None:
        """Traces, and runs two steps."""
        for _ in range(3):
            self.step_s()

    def step_s(self) -> float:
        """One step."""
        started = time.perf_counter()
        for loss in self._step():
            loss.numpy()
        return time.perf_counter() - started


def _side_by_side(parts: Sequence[tuple[str, Any, Any, Any]]) -> Callable[[], Any]:
    import tensorflow as tf

    def step() -> Any:
        losses = []
        for device, model, x, y in parts:
            with tf.device(device):
                losses.append(model.train_step((x, y))["loss"])
        return losses

    return step
