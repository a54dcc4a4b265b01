"""``model.fit`` on one device: puts a controller in the place of the model's train function."""

from __future__ import annotations

import functools
import logging
from typing import Any

from grappler_passes.plugin import describe_keras
from tf_ooo.compat import keras_fits, train_function, versions
from tf_ooo.errors import GraphError, OOOError
from tf_ooo.fit.controller import StepController
from tf_ooo.fit.reporting import fall_back, save_timeline
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


class FitSession:
    """What the callback does in one or several ``fit`` calls of one model."""

    def __init__(self, options: SingleDevice) -> None:
        self.options = options
        self.report = Report(mode=options.mode)
        self.controller: StepController | None = None
        self._model: Any = None

    def epoch_begin(self, epoch: int) -> None:
        """Nothing to do on one device."""

    def epoch_end(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Notes that the model has got another train function in between."""
        replaced = self._model is not None and self._model.train_function is not self.controller
        if replaced and REPLACED not in self.report.notes:
            self.report.notes.append(REPLACED)

    def test_begin(self) -> None:
        """Nothing to do on one device."""

    def begin(self, model: Any, params: dict[str, Any] | None = None) -> None:
        """At the start of training.  Raises OOOError only with ``strict``."""
        self.end()
        try:
            self._begin(model)
        except Exception as error:
            self.end()
            if self.options.strict:
                raise
            self.report.model = self.report.model or str(model.name)
            self.report.environment = self.report.environment or environment(model)
            fall_back(
                self.report, str(error) if isinstance(error, OOOError) else f"{type(error).__name__}: {error}"
            )

    def _begin(self, model: Any) -> None:
        versions.check_versions()
        versions.check_keras_backend(model)
        stock = train_function.train_function_of(model)
        known = self.controller
        if known is None or known.stock is not stock or known.session.failures.errors:
            self._drop_controller()
            self.report = Report(
                mode=self.options.mode,
                model=str(model.name),
                environment=environment(model),
            )
            reason = train_function.why_not_rewritable(model)
            if reason is not None:
                raise GraphError(reason)
            self.controller = self._make_controller(model, stock)
        assert self.controller is not None  # for mypy: set above
        self._model = model
        train_function.install_train_function(model, self.controller, stock)

    def _make_controller(self, model: Any, stock: Any) -> StepController:
        if model.jit_compile is True:
            from tf_ooo.modes.compiled.controller import for_model  # noqa: PLC0415 - imports TensorFlow's XLA ops

            return for_model(model, stock, self.options, self.report)
        if self.options.schedule in COMPILED_SCHEDULES:
            raise GraphError(f"schedule={self.options.schedule!r} {NEEDS_XLA}")
        session = RewriteSession(self.options, describe=describe_keras(model))
        rewritten = train_function.new_train_function(model)
        return StepController(
            stock, rewritten, session, self.options, self.report, self._inputs(model),
            samples_seen=functools.partial(keras_fits.samples_seen, model),
        )  # fmt: skip

    def _inputs(self, model: Any) -> Inputs:
        if self.options.batch_size is not None:
            return Inputs()
        return Inputs(elements_per_call=lambda: train_function.steps_per_execution(model))

    def end(self) -> None:
        """Puts the model's own train function back; does nothing the second time."""
        if self._model is not None:
            train_function.remove_train_function(self._model)
            self._model = None

    def finish(self) -> None:
        """At the end of training: restores, notes an undecided profile, writes the timeline."""
        self.end()
        if self.controller is not None and self.controller.profiling and not self.report.fell_back:
            _LOG.info("training ended before %d steps of each order were timed", self.options.profile_steps)
        if self.options.timeline is not None:
            save_timeline(self.report, self.options.timeline)

    def _drop_controller(self) -> None:
        if self.controller is not None:
            self.controller.session.close()
            self.controller = None
