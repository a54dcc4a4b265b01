"""``model.fit`` on one device: stock and rewritten steps in turns, then the faster."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grappler_passes.plugin import describe_keras
from tf_ooo.compat import keras_fits, tf_functions, train_function
from tf_ooo.errors import GraphError
from tf_ooo.fit.controller import StepController
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.ranks.single_engine import SingleEngine
from tf_ooo.modes.single_device.options import SingleDevice
from tf_ooo.options import COMPILED_SCHEDULES, NEEDS_XLA
from tf_ooo.report.environment import environment
from tf_ooo.report.report import Report
from tf_ooo.rewriting.session import RewriteSession
from tf_ooo.tracing.inputs import Inputs

_LOG = logging.getLogger("tf_ooo")
REPLACED = (
    "something else called model.make_train_function() during fit, as train_on_batch in a callback does: "
    "from there on the stock step trained"
)
# Given the model, its train function, the options and a report to fill in.
MakeController = Callable[[Any, Callable[..., Any], SingleDevice, Report], StepController]


class SingleDeviceMode:
    """Trains with a controller in the place of the model's train function.

    Args:
        options: of the user.
        make_controller: makes it, or raises an OOOError.
    """

    keeps_stock = True
    compiles = True

    def __init__(self, options: SingleDevice, make_controller: MakeController) -> None:
        self.options = options
        self.controller: StepController | None = None
        self._report = Report(mode=options.mode)
        self._make_controller = make_controller

    def join(self) -> Engine:
        """This process trains alone."""
        return SingleEngine()

    def check(self, model: Any, steps: int | None) -> None:
        """GraphError where there is no graph to rewrite; a model that is known has been checked."""
        if self._known(model) is not None:
            return
        if self.controller is not None:
            self.controller.session.close()
            self.controller = None
        self._report = Report(self.options.mode, model=str(model.name), environment=environment(model))
        reason = train_function.why_not_rewritable(model)
        if reason is not None:
            raise GraphError(reason)

    def prepare(self, model: Any, steps: int | None) -> SingleDeviceTraining:
        """With the controller of the fit before, where it was of this model's step."""
        controller = self._known(model)
        if controller is None:
            stock = train_function.train_function_of(model)
            controller = self._make_controller(model, stock, self.options, self._report)
        self.controller = controller
        return SingleDeviceTraining(controller)

    def describe(self) -> Report:
        """The controller fills it in."""
        return self._report

    def _known(self, model: Any) -> StepController | None:
        known, stock = self.controller, train_function.train_function_of(model)
        usable = known is not None and known.stock is stock and not known.session.failures.errors
        return known if usable else None


@dataclass(frozen=True)
class SingleDeviceTraining:
    """A fit with a controller."""

    controller: StepController

    def run(self, iterator: Any) -> Any:
        """One execution."""
        return self.controller(iterator)

    def settle(self, saving: bool) -> None:
        """Each step ends before the next begins."""

    def explain(self, error: Exception) -> Exception:
        """As it is."""
        return error

    def replaced(self) -> None:
        """Notes it: the weights are the same bits."""
        if REPLACED not in self.controller.report.notes:
            self.controller.report.notes.append(REPLACED)

    def epoch_begin(self, epoch: int) -> None:
        """Nothing to do."""

    def test_begin(self) -> None:
        """Nothing to do."""

    def epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Nothing to do."""

    def ended(self) -> None:
        """Says that a comparison was cut short."""
        controller = self.controller
        if controller.profiling and not controller.report.fell_back:
            steps = controller.options.profile_steps
            _LOG.info("training ended before %d steps of each order were timed", steps)

    def restore(self) -> list[str]:
        """The controller stays for the next fit."""
        return []


def controller_of_model(
    model: Any, stock: Callable[..., Any], options: SingleDevice, report: Report
) -> StepController:
    """Of a model whose step TensorFlow's executor runs."""
    _refuse_compiled_schedules(options)
    session = RewriteSession(options, describe=describe_keras(model))
    rewritten, inputs = train_function.new_train_function(model), Inputs()
    if options.batch_size is None:
        inputs = Inputs(functools.partial(train_function.steps_per_execution, model))
    samples_seen = functools.partial(keras_fits.samples_seen, model)
    return StepController(stock, rewritten, session, options, report, inputs, samples_seen=samples_seen)


def controller_of_function(
    stock: Callable[..., Any], options: SingleDevice, report: Report, on_decided: Callable[[], None]
) -> StepController:
    """Of a ``tf.function`` that TensorFlow's executor runs."""
    _refuse_compiled_schedules(options)
    session = RewriteSession(options)
    return StepController(
        stock, tf_functions.untraced_copy(stock), session, options, report, on_decided=on_decided
    )


def _refuse_compiled_schedules(options: SingleDevice) -> None:
    if options.schedule in COMPILED_SCHEDULES:
        raise GraphError(f"schedule={options.schedule!r} {NEEDS_XLA}")
