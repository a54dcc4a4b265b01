"""Makes ``tf.function``s, looks into them, and makes them be traced anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api


def abandon(session: Any) -> None:
    """Leave the session open for good: closing it asks its worker, and would wait for a lost one."""
    session._closed = True


# Keras' train function is a Python function around a tf.function around another tf.function.
_DEPTH = 3


def plain_function(
    body: Callable[..., Any],
    specs: Sequence[Any] | None = None,
    compiled: bool = False,
    any_shape: bool = False,
) -> Any:
    """Return a ``tf.function`` that runs its body as it is, without TensorFlow's warning about many traces.

    ``specs``: its inputs' specs, for one trace.  ``compiled``: XLA compiles it, for which loops are traced in
    another way.  ``any_shape``: the second shape of an input is traced for all that follow.
    """
    function = tf.function(
        tf.autograph.experimental.do_not_convert(body),
        input_signature=specs if specs is None else list(specs),
        autograph=False,
        jit_compile=True if compiled else None,
        reduce_retracing=any_shape,
    )
    function._omit_frequent_tracing_warning = True
    return function


def left_as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, marked so that AutoGraph calls it without converting it.

    Functions that it calls back must go through :func:`as_in_the_caller`.
    """
    left: Callable[..., Any] = api.autograph_artifact(function)
    return left


def as_in_the_caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, converted by AutoGraph if the code being traced here is converted."""
    autograph = tf.__internal__.autograph
    converted: Callable[..., Any] = autograph.tf_convert(function, autograph.control_status_ctx())
    return converted


def concrete_function(body: Callable[..., Any], specs: Sequence[Any], compiled: bool = False) -> Any:
    """Return the ConcreteFunction of ``body(*specs)``; raises whatever tracing raises."""
    return plain_function(body, compiled=compiled).get_concrete_function(*specs)


@contextlib.contextmanager
def variables_made_at_once() -> Iterator[None]:
    """Create variables at once that are made in the block while a function is traced.

    TensorFlow would initialize them later, and then trace the function a second time.  It still does so for
    variables whose initial value is computed by other ops of the function.
    """

    def make(next_creator: Callable[..., Any], **settings: Any) -> Any:
        initial = settings.get("initial_value")
        if not callable(initial):
            return next_creator(**settings)
        try:
            with tf.init_scope():
                value = initial()
        except Exception:  # it reads tensors of the function: TensorFlow initializes it
            return next_creator(**settings)
        with tf.init_scope():
            settings |= {"initial_value": value, "experimental_enable_variable_lifting": False}
            return next_creator(**settings)

    with tf.variable_creator_scope(make):
        yield


def is_tf_function(value: object) -> bool:
    """Return whether ``value`` was made by ``tf.function``."""
    return hasattr(value, "experimental_get_tracing_count")


def functions_of(step: Callable[..., Any]) -> list[Any]:
    """Return the ``tf.function`` itself, or those a Python function closes over, outermost first."""
    return list(_functions_in(step, _DEPTH))


def _functions_in(value: object, depth: int) -> Iterator[Any]:
    if is_tf_function(value):
        yield value
    elif depth:
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # the cell is empty yet
                yield from _functions_in(cell.cell_contents, depth - 1)


def step_of_fit(train_function: Callable[..., Any]) -> Any:
    """Return the latest trace of a step in ``fit``'s own train function; None if there is none.

    ``train_on_batch`` traces the step by itself, and for other batches.
    """
    functions = functions_of(train_function)
    if len(functions) < 2 or not functions[0].experimental_get_tracing_count():
        return None
    return next(reversed(concrete_functions_of(functions[-1])), None)


def is_concrete_function(value: object) -> bool:
    """Return whether ``value`` is a traced tf.function."""
    return all(hasattr(value, name) for name in ("graph", "captured_inputs", "structured_outputs"))


def undecorated(function: Any) -> Any:
    """Return the function behind a ``tf.function``, with Python conditions as ops if it converts them."""
    if not is_tf_function(function):
        return function
    converted, context = function.python_function, contextlib.nullcontext()
    if function._autograph:
        context = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
        converted = api.tf_convert(converted, context)

    def call(*args: Any, **kwargs: Any) -> Any:
        with context:  # the caller may have switched conversion off
            return converted(*args, **kwargs)

    call.decorated = function  # type: ignore[attr-defined]  # of a method: it is referred to weakly
    return call


def forget_traces(owner: object) -> None:
    """Make an object's methods decorated by ``tf.function`` be traced anew: a trace keeps its variables."""
    for kind in type(owner).__mro__:
        for value in vars(kind).values():
            if is_tf_function(value):
                value._descriptor_cache.pop(owner, None)


def concrete_functions_of(function: object) -> list[Any]:
    """Return the traces of a ``tf.function``; one with an input_signature is traced by asking.

    A function of ours that counts its own traces has none here.
    """
    traced: list[Any] = getattr(function, "_list_all_concrete_functions", list)()
    return traced


def untraced_copy(function: Any) -> Any:
    """Return an untraced ``tf.function`` with the settings of ``function`` (input_signature and so on)."""
    return function._clone(None)


def compiles_with_xla(function: object) -> bool:
    """Return whether a ``tf.function`` was made with ``jit_compile=True``."""
    return bool(getattr(function, "_jit_compile", None))
