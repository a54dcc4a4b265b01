"""Runs ``model.fit`` on one device: stock and rewritten steps in turns, then the faster."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.graph.sizes import KnownShapes
from grappler_passes.plugin import describe_keras
from tf_ooo.compat import keras_fits, tf_functions, train_function
from tf_ooo.errors import GraphError
from tf_ooo.fit import timing
from tf_ooo.fit.controller import StepController
from tf_ooo.fit.mode import Training
from tf_ooo.fit.recorder import Watched
from tf_ooo.hosts.ranks.base import Engine, SingleEngine
from tf_ooo.modes.single_device.options import SingleDevice
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import schedules_of
from tf_ooo.report.parts import note_unused
from tf_ooo.report.report import Report
from tf_ooo.report.summary import environment
from tf_ooo.rewriting.lowering import tasks_of_ops
from tf_ooo.rewriting.one_device import peak_with
from tf_ooo.rewriting.request import RewriteSession
from tf_ooo.tracing.traces import Inputs
from tf_ooo.tracing.variables import build_optimizer

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
REPLACED = (
    "something else called model.make_train_function() during fit, as train_on_batch in a callback does: "
    "from there on the stock step trained"
)
_COMPILED = (
    "XLA has merged the step's ops into kernels, which belong to no task; plugins/profile has the raw profile"
)
# Given the model, its train function, the options and a report to fill in.
MakeController = Callable[["keras.Model", Callable[..., Any], SingleDevice, Report], StepController]


class SingleDeviceMode:
    """Trains with a controller in the place of the model's train function."""

    keeps_stock = True
    compiles = True

    def __init__(self, options: SingleDevice, make_controller: MakeController) -> None:
        self.options = options
        self.controller: StepController | None = None
        self._report = Report(mode=options.mode)
        self._make_controller = make_controller

    def join(self) -> Engine:
        return SingleEngine()

    def check(self, model: keras.Model, steps: int | None) -> None:
        """Raise GraphError if there is no graph to rewrite; a known model has been checked."""
        if self._known(model) is not None:
            return
        if self.controller is not None:
            self.controller.session.close()
            self.controller = None
        self._report = Report(self.options.mode, model=str(model.name), environment=environment(model))
        if (reason := train_function.why_not_rewritable(model)) is not None:
            raise GraphError(reason)

    def prepare(self, model: keras.Model, steps: int | None) -> Training:
        controller = self._known(model)
        if controller is None:
            stock = train_function.train_function_of(model)
            controller = self._make_controller(model, stock, self.options, self._report)
        self.controller = controller
        together = train_function.steps_per_execution(model)
        controller.begin_fit(executions_of_fit(steps, together), together)
        return SingleDeviceFit(controller, model)

    def describe(self) -> Report:
        """Fill in the peak for batches as large as in training: graphs of Keras leave their rows open."""
        report, controller = self._report, self.controller
        if controller is not None:
            result, rows = controller.session.result, controller.rows
            report.change(batch_rows=rows or report.batch_rows)
            if result is not None and rows not in (None, report.peak_rows) and report.unknown_size_ops:
                peak_bytes = peak_with(result, KnownShapes(rows))
                report.change(predicted_peak_bytes=peak_bytes, peak_rows=rows)
        return report

    def _known(self, model: keras.Model) -> StepController | None:
        known, stock = self.controller, train_function.train_function_of(model)
        usable = known is not None and known.stock is stock and not known.session.failures.errors
        return known if usable else None


class SingleDeviceFit(Training):
    """Represents the fit of a model whose steps a controller runs."""

    def __init__(self, controller: StepController, model: keras.Model) -> None:
        self._controller, self._model = controller, model
        self._builds = train_function.has_kerass_train_step(model)

    def run(self, given: Any) -> Any:
        """Run one execution; build the optimizer first, or Keras would trace the first step twice."""
        if self._builds:
            with self._model.distribute_strategy.scope():
                build_optimizer(self._model)
            self._builds = False
        return self._controller(given)

    def replaced(self) -> None:
        """Note that the stock step has taken over, which trains to the same bits."""
        self._controller.report.note(REPLACED)

    def ended(self) -> None:
        controller = self._controller
        if controller.choice is None and not controller.report.fell_back:
            _LOG.info("training ended before it was decided: %s", controller.report.undecided)

    def watched(self) -> Watched | None:
        """Return what a profile shows, once one order is kept."""
        controller, session = self._controller, self._controller.session
        if not controller.settled:
            return None
        if not session.shows_ops:
            return Watched(Schedule("single_device", "compiled"), dict, why_not=_COMPILED)
        result = session.result
        if result is None:
            return None
        why = "the stock order was kept" if controller.report.fell_back else ""
        tasks = functools.partial(tasks_of_ops, result.training_graph)
        return Watched(result.schedule, tasks, why=why, one_by_one=True)


def executions_of_fit(steps: int | None, together: int) -> int | None:
    """Return the executions of the fit that begins, with so many ``steps`` per epoch; None: nobody knows."""
    epochs = keras_fits.epochs_of_fit()
    if steps is None or epochs is None:
        return None
    first = keras_fits.argument_of_fit("initial_epoch") or 0
    return -(-steps // together) * max(0, epochs - first)


def controller_of_model(
    model: keras.Model, stock: Callable[..., Any], options: SingleDevice, report: Report
) -> StepController:
    """Make the controller of a model whose step TensorFlow's executor runs."""
    _check(options, report)
    session = RewriteSession(options, describe=describe_keras(model, keras_fits.trained_variables))
    rewritten, inputs = train_function.new_train_function(model), Inputs()
    if options.batch_size is None:
        inputs = Inputs(functools.partial(train_function.steps_per_execution, model))
    seen = functools.partial(keras_fits.samples_seen, model)
    never = _never_pays()
    return StepController(
        stock, rewritten, session, options, report, inputs, samples_seen=seen, never_pays=never
    )


def controller_of_function(
    stock: Callable[..., Any], options: SingleDevice, report: Report, on_decided: Callable[[], None]
) -> StepController:
    """Make the controller of a ``tf.function`` that TensorFlow's executor runs."""
    _check(options, report)
    session = RewriteSession(options)
    return StepController(
        stock, tf_functions.untraced_copy(stock), session, options, report, on_decided=on_decided,
        never_pays=_never_pays(),
    )  # fmt: skip


def _never_pays() -> str:
    """Say why comparing orders cannot pay on this process' device; empty where it may."""
    on_cpu = not tf.config.list_physical_devices("GPU")
    return timing.ON_CPU if on_cpu and not timing.ORDERS_MAY_GAIN_ON_CPU else ""


def _check(options: SingleDevice, report: Report) -> None:
    if options.schedule in schedules_of(options.mode, streams=True):
        raise GraphError(
            f"schedule={options.schedule!r} is for steps that XLA compiles: it needs jit_compile=True"
        )
    note_unused(report, options.given_for_xla)
