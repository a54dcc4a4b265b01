"""One process of ``tf-ooo bench single``: builds steps of one network, then runs them when told to.

Reads lines ``NAME STEPS`` and answers each with a line of JSON; XLA's flags are those of the process.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tf_ooo
from tf_ooo.bench.shared.processes import answer, requests, serve
from tf_ooo.bench.single.cases import FITS, OURS, STOCK, WITHOUT_XLA, AskedWays, Case, OurWay
from tf_ooo.bench.single.inputs import batches, dataset
from tf_ooo.bench.single.networks import CLASSES, build
from tf_ooo.modes.compiled import plans
from tf_ooo.modes.compiled.captured import CompiledModule, watched
from tf_ooo.modes.compiled.measuring import MeasuredGains
from tf_ooo.modes.compiled.plans import capture_of
from tf_ooo.modes.compiled.priority import high_priority_main_stream
from tf_ooo.modes.compiled.rewrite import rewrite_step
from tf_ooo.modes.compiled.session import StreamSession
from tf_ooo.modes.compiled.step import CompiledStep, StreamStep, Way
from tf_ooo.modes.single_device.options import SingleDevice

Step = Callable[[], Any]
MEASURE_S = 60.0
_STEPS_UNTIL_DECIDED, _MOST_FITS = 10, 20


def main(case: Case, ways: AskedWays) -> None:
    """Makes the steps of some ways, then serves lines."""
    if ways.priority is not None:
        set_priority(ways.priority)
    timed = TimedSteps(case)
    for name in ways.names:
        timed.make(name)
    modules = {name: module.to_dict() for name, module in timed.modules.items()}
    about = {"modules": modules, "device": device(), "versions": versions()}
    answer({"ready": list(timed.steps), "said": timed.said, **about})

    def turn(line: str) -> dict[str, float]:
        name, _, count = line.rpartition(" ")
        return run(timed.steps[name], int(count))

    serve(turn)


def set_priority(priority: int) -> None:
    """The main stream of the first GPU gets this CUDA priority, where there is a GPU."""
    if tf.config.list_physical_devices("GPU"):
        high_priority_main_stream(32 * 2**30, priority)


def device() -> str:
    """The GPU's name, or ``cpu``."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "cpu"
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "gpu"))


def versions() -> dict[str, str]:
    """Of TensorFlow, Keras, and the CUDA that TensorFlow was built with."""
    built = tf.sysconfig.get_build_info()
    cuda = {"cuda": built.get("cuda_version"), "cudnn": built.get("cudnn_version")}
    known = {name: str(version) for name, version in cuda.items() if version}
    return {"tensorflow": tf.__version__, "keras": keras.__version__, **known}


class TimedSteps:
    """The ways of a case that can be made, each with one step that has run."""

    def __init__(self, case: Case) -> None:
        self.steps: dict[str, Step | TimedFit] = {}
        # Also of those that cannot be made.
        self.said: dict[str, str] = {}
        # What XLA made of some.
        self.modules: dict[str, CompiledModule] = {}
        self._case = case
        self._model = model = _model(case)
        model.optimizer.build(model.trainable_variables)
        self._batches = batches(model.input_shape[1:], case.batch, CLASSES, case.data)
        x, y = next(self._batches)
        model.compute_loss(y=y, y_pred=model(x))  # makes all its variables
        self._end_s = time.monotonic() + (case.make_s or math.inf)

    def make(self, name: str) -> None:
        """Makes one of them, unless the time for that is over."""
        if time.monotonic() > self._end_s:
            self.said[name] = f"not made: {self._case.make_s:.0f} s were over"
            return
        try:
            if name in FITS:
                self.steps[name] = fit = TimedFit(self._case, FITS[name], self._end_s)
                self.said[name] = fit.note
            else:
                self._make_step(name)
        except Exception as error:  # one that cannot be made must not stop the others
            self.steps.pop(name, None)
            self.said[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"

    def _make_step(self, name: str) -> None:
        with watched() as watch:
            if name in OURS:
                step, note = self._ours(OURS[name])
            else:
                jit_compile = name != WITHOUT_XLA
                function = tf.function(self._model.train_step, jit_compile=jit_compile, autograph=False)
                step, note = (lambda: function(next(self._batches))), ""
            self.steps[name], self.said[name] = step, note
            _wait(step())
        _wait(step())
        if watch.module is not None and name != WITHOUT_XLA:
            self.modules[name] = watch.module
            self.said[name] = "; ".join(filter(None, (note, watch.module.text())))

    def _ours(self, way: OurWay) -> tuple[Step, str]:
        notes: list[str] = []
        rewriter = functools.partial(
            rewrite_step, plan=self._plan(way, notes), store=way.store, side_updates=way.updates_aside
        )
        session = StreamSession(SingleDevice(schedule="multi_stream", any_platform=True))
        step = StreamStep(self._model.train_step, self._model.train_step, session, Way(rewriter))
        compiled = CompiledStep(step, (next(self._batches),), {})
        calls, result = compiled.step_graph.calls, compiled.step_graph.result
        if result is not None:
            planned = f"planned in {result.plan_seconds:.1f} s"
            notes.insert(0, f"{len(calls)} calls, {result.added_edges} barriers, {planned}")
        return lambda: compiled((next(self._batches),), {}), "; ".join(notes)

    def _plan(self, way: OurWay, notes: list[str]) -> Callable[..., Any]:
        """The plan; what it says of measured gains comes to ``notes``."""
        if way.plan == "every_layer":
            return functools.partial(plans.every_layer, streams=way.streams)
        given: dict[str, Any] = {"capture": lambda what: capture_of(what, self.modules.get(STOCK))}
        if way.measured:
            budget_s = max(1.0, min(MEASURE_S, (self._end_s - time.monotonic()) / 2))
            given["gains"] = MeasuredGains(budget_s, lambda table: notes.extend(table.notes))
        return functools.partial(plans.joint, streams=way.streams, **given)


class TimedFit:
    """``model.fit`` as users call it, a few steps at a time; epochs end when all steps have.

    With ``ours``, our callback, until it has decided, but not after ``end_s`` of ``time.monotonic``.
    """

    def __init__(self, case: Case, ours: bool, end_s: float) -> None:
        self._model, self._started_s = _model(case, jit_compile=True), 0.0
        self._data = dataset(self._model.input_shape[1:], case.batch, CLASSES, case.data)
        self._callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=self._first_step)]
        self._ours = None
        if ours:
            self._ours = tf_ooo.OOOBackprop(
                compare=True, any_platform=not tf.config.list_physical_devices("GPU")
            )
            self._callbacks.insert(0, self._ours)
        self.step_s(1)
        for _ in range(_MOST_FITS):
            if self._ours is None or not self._ours.report.undecided or time.monotonic() > end_s:
                break
            self.step_s(_STEPS_UNTIL_DECIDED)

    def _first_step(self, batch: int, logs: object) -> None:
        """It is over when its weights are there."""
        if batch == 0:
            self._model.optimizer.iterations.numpy()
            self._started_s = time.perf_counter()

    def step_s(self, count: int) -> float:
        """Seconds of a step, on average over ``count`` after one that is not timed."""
        settings = {"shuffle": False, "verbose": 0, "callbacks": self._callbacks}
        self._model.fit(self._data, steps_per_epoch=count + 1, **settings)
        return (time.perf_counter() - self._started_s) / count

    @property
    def note(self) -> str:
        """What our callback has decided."""
        report = None if self._ours is None else self._ours.report
        return "" if report is None else "; ".join(filter(None, (report.state, report.way, report.compared)))


def _model(case: Case, **compiling: bool) -> keras.Model:
    """The compiled model of a case."""
    keras.utils.set_random_seed(0)
    model = build(case.network, case.size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, **compiling)
    return model


def run(step: Step | TimedFit, count: int) -> dict[str, float]:
    """Seconds of one step, on average over ``count``, and the peak of the GPU's memory in bytes."""
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    if on_gpu:
        tf.config.experimental.reset_memory_stats("GPU:0")
    turn = {"step_s": step.step_s(count) if isinstance(step, TimedFit) else _step_s(step, count)}
    if on_gpu:
        turn["peak_bytes"] = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return turn


def _step_s(step: Step, count: int) -> float:
    _wait(step())
    started_s = time.perf_counter()
    for _ in range(count):
        out = step()
    _wait(out)
    return (time.perf_counter() - started_s) / count


def _wait(out: object) -> None:
    for value in tf.nest.flatten(out):
        value.numpy()


if __name__ == "__main__":
    main(*requests(Case, AskedWays))
