"""Steps that take turns, such as those of a callback's fit; their weights are compared with stock ``fit``."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from benchmarks.cases import WayRun, take_turns
from benchmarks.models import Workload, compared, weights_of
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, OOOError
from tf_ooo.fit.life import FitLife
from tf_ooo.modes.pipeline.mode import PipelineMode
from tf_ooo.modes.table import LayerPipe, Pipeline, mode_for
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.report.report import Report
from tf_ooo.rewriting.step_graph import StepGraph

Profile = tuple[StepGraph, CostTable]  # a pipeline's step, taken apart, and its costs


class Steps:
    """These take turns: ``run`` runs a step and waits for its end; ``model`` is trained by it, if any is."""

    predicted_s: float | None = None  # a step's seconds by the plan before they ran

    def __init__(self, run: Callable[[], object], model: Any = None, about: Mapping[str, Any] = {}) -> None:
        self._run, self.model, self._about, self.steps = run, model, dict(about), 0

    def step_s(self) -> float:
        started_s = time.perf_counter()
        self._run()
        self.steps += 1
        return time.perf_counter() - started_s

    def about(self) -> dict[str, Any]:
        return self._about

    def finish(self) -> None:
        """End the training."""


class Fit(Steps):
    """The steps of a callback's fit, run without ``model.fit``."""

    def __init__(self, workload: Workload, options: Pipeline | LayerPipe, profile: Profile | None) -> None:
        """Begin the fit; a pipeline is planned from another one's ``profile``."""
        super().__init__(self._step, workload.model)
        self._pipeline = PipelineMode(options) if isinstance(options, Pipeline) else None
        if self._pipeline is not None:
            self._pipeline.plans.planned_from = profile
        self._fit = FitLife(self._pipeline or mode_for(options))
        self._batches = iter(tf.data.Dataset.from_tensors((workload.x, workload.y)).repeat())
        self.model.make_train_function()
        self._fit.begin(self.model)

    def _step(self) -> None:
        logs = self.model.train_function(self._batches)
        if self._pipeline is not None:  # LayerPipe's loss comes some steps later
            float(logs["loss"])

    def start(self, more: int = 0) -> None:
        """Run until the model is distributed, or stays on one device, and ``more`` steps."""
        report = self.report
        try:
            while not (report.layerpipe.get("rounds") or report.rewritten_graph or report.fell_back):
                self.step_s()
        except OOOError:
            self.finish()
            raise
        for _ in range(0 if report.fell_back else more):
            self.step_s()
        self.predicted_s = report.predicted_step_s

    @property
    def report(self) -> Report:
        return self._fit.mode.describe()

    @property
    def schedule(self) -> Schedule:
        """Return the schedule that the fit runs.  BackendError: nothing has been planned."""
        if self.report.planned is None:
            raise BackendError(f"nothing has been planned: {self.report.fallback_reason}")
        return self.report.planned

    @property
    def profile(self) -> Profile | None:
        """Return what other pipelines can be planned from; None: there is nothing yet."""
        return None if self._pipeline is None else self._pipeline.plans.planned_from

    def finish(self) -> None:
        self._fit.finish()

    def about(self) -> dict[str, Any]:
        """Return the schedule that runs, and where and how long its tasks are."""
        report, pipeline = self.report, self.report.pipeline
        about: dict[str, Any] = {"schedule": report.schedule, "microbatches": pipeline.microbatches}
        if report.layerpipe:
            if "weight_version_bytes" in report.layerpipe:
                about["weight_version_bytes"] = report.layerpipe["weight_version_bytes"]
            return about | {"most_steps_late": max((report.layerpipe.delay_steps or {}).values(), default=0)}
        seconds = [stage.seconds for stage in pipeline.stages]
        return about | {
            "devices_used": len(pipeline.devices),
            "replicas": pipeline.replicas,
            "stages": len(seconds),
            "fused": self.schedule.fused_backward,
            "task_s": {kind: statistics.mean(of[kind] for of in seconds) for kind in seconds[0]},
            "predicted_peak_bytes": list(pipeline.predicted_peak_bytes),
            "compared_replicas": [dataclasses.asdict(row) for row in pipeline.compared_replicas],
        }


def train_in_turns(
    ways: Mapping[str, Steps], turns: int, turn_s: Callable[[Any], float], make: Callable[[], Workload] | None
) -> tuple[int, dict[str, WayRun], int | None]:
    """Let ways take turns; return how many steps all have made, their runs, and the bits of stock ``fit``.

    ``make``: what stock trains as often; None: it is not compared with.
    """
    turns_s = take_turns({name: partial(turn_s, way) for name, way in ways.items()}, turns)
    steps, runs = max(way.steps for way in ways.values()), {}
    for name, way in ways.items():
        while make and way.steps < steps:
            way.step_s()
        runs[name] = WayRun(turns_s[name], way.predicted_s, about=way.about())
    for way in ways.values():
        way.finish()
    if make is None:
        return steps, runs, None
    trained = {name: weights_of(way.model) for name, way in ways.items() if way.model is not None}
    model, x, y = make()
    model.fit(x, y, batch_size=len(x), epochs=steps, shuffle=False, verbose=0)
    bits, runs = compared(runs, trained, weights_of(model))
    return steps, runs, bits
