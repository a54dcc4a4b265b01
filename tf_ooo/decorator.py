"""Defines ``tf_ooo.function``: a ``tf.function`` whose training step is rewritten."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, overload

import tensorflow as tf

from grappler_passes.compat import releases
from tf_ooo.compat import tf_functions, train_function
from tf_ooo.errors import GraphError, OOOError, OptionsError
from tf_ooo.modes.by_name import Options, options_for_steps
from tf_ooo.modes.table import SingleDevice, function_controller
from tf_ooo.report.parts import fall_back, save_timeline
from tf_ooo.report.report import Report
from tf_ooo.report.summary import environment
from tf_ooo.tracing import traces

_LOG = logging.getLogger("tf_ooo")
Given = str | SingleDevice | Options
releases.say_at_import()  # modes, which would say it, load on first use


class OOOFunction:
    """Runs a training step, rewritten where that is faster; ``.report`` says what happened.

    Args:
        function: a Python function or a ``tf.function`` over one.
        options: see :class:`tf_ooo.SingleDevice`.
        jit_compile: as in ``tf.function``; with True dW goes to streams of its own, on a GPU.
    """

    def __init__(
        self, function: Callable[..., Any], options: SingleDevice, jit_compile: bool | None = None
    ) -> None:
        self.python_function = getattr(function, "python_function", function)
        self.options, self.jit_compile = options, jit_compile
        self.report = Report(mode=options.mode)
        self._given = function if function is not self.python_function else None
        self._stock: Any = None
        self._step: Callable[..., Any] | None = None
        self._lock = threading.RLock()
        functools.update_wrapper(self, self.python_function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._step is None:
                self._step = self._make_step()
        return self._step(*args, **kwargs)

    @property
    def stock(self) -> Any:
        """Return the ``tf.function`` in TensorFlow's own order, for a ``tf.Module`` to save it.

        >>> module.saved_step = module.step.stock
        >>> tf.saved_model.save(module, "folder")
        """
        with self._lock:
            if self._stock is None:
                self._stock = self._given or tf.function(self.python_function, jit_compile=self.jit_compile)
        return self._stock

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Return the concrete function of the stock step, which computes the same."""
        return self.stock.get_concrete_function(*args, **kwargs)

    def experimental_get_tracing_count(self) -> int:
        """Return how often TensorFlow has traced the stock or the rewritten step, whichever is more."""
        steps = self.stock, getattr(self._step, "rewritten", self.stock)
        return max(map(traces.trace_count, steps))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Give each object a step, and a report, of its own where the step is a method."""
        # A partial or an object with __call__ binds nothing.
        if instance is None or not hasattr(self.python_function, "__get__"):
            return self
        name = self.python_function.__name__
        bound = instance.__dict__.get(f"_ooo_{name}")
        if bound is None:
            # tf.saved_model.save looks for functions of TensorFlow's own class.
            if isinstance(instance, tf.Module):
                _LOG.warning(
                    "%s.%s is not saved with its module: tf.saved_model.save keeps tf.functions only; keep "
                    "one for it, module.saved_%s = module.%s.stock",
                    *(type(instance).__name__, name, name, name),
                )
            function = self.python_function.__get__(instance, owner)
            step = OOOFunction(function, self.options, self.jit_compile)
            bound = instance.__dict__.setdefault(f"_ooo_{name}", step)
        return bound

    def _make_step(self) -> Callable[..., Any]:
        stock: Callable[..., Any] = self.stock
        self.report.change(model=_name_of(self.python_function), environment=environment())
        compiled = bool(self.jit_compile) or tf_functions.compiles_with_xla(self._given)
        try:
            if train_function.functions_run_eagerly():
                raise GraphError(train_function.RUN_EAGERLY)
            return function_controller(stock, compiled, self.options, self.report, self._write_timeline)
        except OOOError as error:
            if self.options.strict:
                raise
            fall_back(self.report, str(error))
        self._write_timeline()
        return stock

    def _write_timeline(self) -> None:
        if self.options.timeline is not None:
            save_timeline(self.report, self.options.timeline)


@overload
def function(
    fn: Callable[..., Any], *, mode: Given = ..., jit_compile: bool | None = ..., **options: Any
) -> OOOFunction: ...


@overload
def function(
    fn: None = None, *, mode: Given = ..., jit_compile: bool | None = ..., **options: Any
) -> Callable[[Callable[..., Any]], OOOFunction]: ...


def function(
    fn: Callable[..., Any] | None = None,
    *,
    mode: Given = "single_device",
    jit_compile: bool | None = None,
    **options: Any,
) -> OOOFunction | Callable[[Callable[..., Any]], OOOFunction]:
    """Decorate like ``tf.function``, and reorder the backward pass.

    >>> @tf_ooo.function(mode="single_device")
    ... def train_step(x, y): ...
    >>> train_step.report.summary()

    Some calls alternate between the stock and the rewritten step (each call runs one of them), and the faster
    is kept.  ``"auto"`` begins to compare once 5% of the time of the stock steps so far pays for it,
    ``compare=True`` at once.  ``timeline=`` is written after the decision.

    Args:
        fn: what is decorated; left out where options are given in brackets.
        mode: ``"single_device"``, or ``tf_ooo.SingleDevice(...)`` in the place of all options.
        jit_compile: as in ``tf.function``; with True dW goes to streams of its own, on a GPU.
        **options: fields of :class:`tf_ooo.SingleDevice`.

    Raises:
        OptionsError: an unknown option or value, or what is decorated is no function.
    """
    checked = options_for_steps("tf_ooo.function", mode, **options)
    if fn is None:
        return lambda later: OOOFunction(_callable(later), checked, jit_compile)
    return OOOFunction(_callable(fn), checked, jit_compile)


def _name_of(fn: object) -> str:
    """Return a name: of a function, of the function in a ``functools.partial``, or of an object's class."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _callable(fn: Any) -> Callable[..., Any]:
    if callable(fn):
        return fn  # type: ignore[no-any-return]
    hint = f", for example tf_ooo.function(schedule={fn!r})" if isinstance(fn, str) else ""
    raise OptionsError(f"tf_ooo.function takes a function, got {fn!r:.80}; name its options{hint}")
