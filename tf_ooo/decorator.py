"""``tf_ooo.function``: a ``tf.function`` whose training step is rewritten."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tf_ooo import compat
from tf_ooo.controller import StepController, fall_back
from tf_ooo.errors import GraphError, OOOError
from tf_ooo.options import Options
from tf_ooo.report import Report
from tf_ooo.session import RewriteSession


class OOOFunction:
    """A training step that runs rewritten where that is faster; ``.report`` says what happened.

    Args:
        function: a Python function or a ``tf.function`` over one.
        options: see :class:`tf_ooo.Options`.
        jit_compile: as in ``tf.function``; True hides the step from the graph passes.
    """

    def __init__(
        self, function: Callable[..., Any], options: Options, jit_compile: bool | None = None
    ) -> None:
        self.python_function = getattr(function, "python_function", function)
        self.options, self.jit_compile = options, jit_compile
        self.report = Report(mode=options.resolved_mode)
        self._given = function if function is not self.python_function else None
        self._step: Callable[..., Any] | None = None
        functools.update_wrapper(self, self.python_function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        if self._step is None:
            self._step = self._make_step()
        return self._step(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method, each object gets a step, and a report, of its own."""
        if instance is None:
            return self
        name = f"_ooo_{self.python_function.__name__}"
        bound = instance.__dict__.get(name)
        if bound is None:
            function = self.python_function.__get__(instance, owner)
            bound = OOOFunction(function, self.options, self.jit_compile)
            instance.__dict__[name] = bound
        return bound

    def _make_step(self) -> Callable[..., Any]:
        import tensorflow as tf

        stock = self._given or tf.function(self.python_function, jit_compile=self.jit_compile)
        reason = self._why_not()
        if reason is None:
            try:
                session = RewriteSession(self.options)
            except OOOError as error:
                if self.options.strict:
                    raise
                reason = str(error)
        if reason is not None:
            fall_back(self.report, reason)
            if self.options.strict:
                raise GraphError(reason)
            return stock
        rewritten = compat.untraced_copy(stock)
        return StepController(stock, rewritten, session, self.options, self.report)

    def _why_not(self) -> str | None:
        import tensorflow as tf

        if self.jit_compile or compat.compiles_with_xla(self._given):
            return (
                "jit_compile=True: XLA compiles the step, TensorFlow's graph optimizers see one opaque call"
            )
        if tf.config.functions_run_eagerly():
            return "tf.config.run_functions_eagerly(True): there is no graph to rewrite"
        return None


def function(
    fn: Callable[..., Any] | None = None,
    *,
    mode: str = "single_device",
    jit_compile: bool | None = None,
    **options: Any,
) -> Any:
    """Decorator like ``tf.function`` whose backward pass is reordered.

    >>> @tf_ooo.function(mode="single_device")
    ... def train_step(x, y): ...
    >>> train_step.report.summary()

    The first calls alternate between the stock and the rewritten step (each call runs one of them);
    then the faster is kept.

    Raises:
        OptionsError: an unknown option or value.
    """
    checked = Options.from_arguments(mode=mode, **options)
    if fn is None:
        return lambda later: OOOFunction(later, checked, jit_compile)
    return OOOFunction(fn, checked, jit_compile)
