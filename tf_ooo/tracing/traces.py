"""What the ``tf.function``s behind a step have been traced to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tf_ooo.compat import func_graphs, tf_functions

_DEPTH = 3


def tf_functions_of(step: Callable[..., Any]) -> list[Any]:
    """The ``tf.function`` itself, or those that a Python function closes over, outermost first.

    Keras' train function is a Python function around a ``tf.function`` around another.
    """
    return list(_found(step, _DEPTH))


def _found(value: Any, depth: int) -> Iterator[Any]:
    if tf_functions.is_tf_function(value):
        yield value
    elif depth:
        for cell in getattr(value, "__closure__", None) or ():
            yield from _found(_content(cell), depth - 1)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def trace_count(step: Callable[..., Any]) -> int:
    """How often the step has been traced."""
    return sum(function.experimental_get_tracing_count() for function in tf_functions_of(step))


def trace(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Traces the step for these arguments without running it; the call that follows uses that trace.

    What cannot be traced is left to that call, which raises the user's own error.
    """
    for function in tf_functions_of(step)[:1]:
        try:
            function.get_concrete_function(*args, **kwargs)
        except Exception:  # see above
            return


def first_op(step: Callable[..., Any], wanted: Callable[[str], bool]) -> str | None:
    """The name of an op whose type is ``wanted``, in what was traced and all functions it calls."""
    for function in tf_functions_of(step):
        if not function.experimental_get_tracing_count():
            continue  # asked for its traces, one with an input_signature would make one
        for concrete in tf_functions.concrete_functions_of(function):
            for name, op_type in func_graphs.ops_reached_from(concrete.graph):
                if wanted(op_type):
                    return name
    return None
