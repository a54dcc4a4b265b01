"""Marks the arguments of traced functions, so that their graphs can be told apart later.

A graph that reaches the plug-in carries no function name, and inlining and constant folding drop
most attributes.  Attributes of an argument's placeholder that start with ``_`` become argument
attributes of the function and are still on the ``_Arg`` nodes of the final graph.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypedDict

from grappler_passes.plugin import compat
from grappler_passes.plugin.requests import REQUEST_ATTR, VARIABLE_ATTR, Request, active

_lock = threading.Lock()


class VariableInfo(TypedDict):
    """What the graph says about one variable."""

    name: str
    trainable: bool


def install() -> None:
    """Has every traced function looked at from now on; does nothing the second time."""
    with _lock:
        transforms = compat.func_graph_transforms()
        if mark_arguments not in transforms:
            transforms.append(mark_arguments)


def mark_arguments(func_graph: Any) -> None:
    """Marks the captured resources of a ``FuncGraph``, if a request is active on this thread."""
    request = active()
    if request is None:
        return
    try:
        _mark(func_graph, request)
    except Exception as error:  # an error here would break the user's tracing
        request.fail(error)


def describe_keras(variables: Iterable[Any]) -> Callable[[Any], VariableInfo | None]:
    """A ``Request.describe`` for Keras variables: ``path`` as name, and Keras' own ``trainable``.

    Needed because freezing a Keras layer leaves ``tf.Variable.trainable`` as it was.  Trainability
    is read when a function is traced, so layers may be frozen and thawed in between.
    """
    by_handle = {id(handle): variable for variable in variables for handle in _handles(variable)}

    def describe(variable: Any) -> VariableInfo | None:
        found = by_handle.get(id(variable.handle))
        if found is None:
            return None
        is_copy = getattr(found.value, "handle", None) is not variable.handle
        name = _name(variable) if is_copy else found.path
        return VariableInfo(name=name, trainable=bool(found.trainable))

    return describe


def _handles(keras_variable: Any) -> list[Any]:
    """The handles of a Keras variable: several under a distribution strategy, none for Keras 2."""
    value = keras_variable.value
    copies = getattr(value, "values", None) or [value]
    return [copy.handle for copy in copies if getattr(copy, "handle", None) is not None]


def _name(variable: Any) -> str:
    return str(variable.name).removesuffix(":0")


def _mark(func_graph: Any, request: Request) -> None:
    by_handle = {id(v.handle): v for v in func_graph.variables if getattr(v, "handle", None) is not None}
    captured = [
        (placeholder.op, by_handle.get(id(external)))
        for external, placeholder in func_graph.captures
        if placeholder.dtype.name == "resource"
    ]
    infos = _unique([_info(variable, request) for _, variable in captured if variable is not None])
    for op, variable in captured:
        compat.set_string_attr(op, REQUEST_ATTR, request.id)
        if variable is not None:
            compat.set_string_attr(op, VARIABLE_ATTR, json.dumps(next(infos)))


def _info(variable: Any, request: Request) -> VariableInfo:
    described: VariableInfo | None = request.describe(variable) if request.describe else None
    if described is not None:
        return described
    return VariableInfo(name=_name(variable), trainable=bool(variable.trainable))


def _unique(infos: Iterable[VariableInfo]) -> Iterator[VariableInfo]:
    """Appends ``_1``, ``_2``, ... to names that were there before."""
    infos = list(infos)
    taken = {info["name"] for info in infos}
    seen: set[str] = set()
    for info in infos:
        name, number = info["name"], 0
        while name in seen or (number and name in taken):
            number += 1
            name = f"{info['name']}_{number}"
        seen.add(name)
        yield VariableInfo(name=name, trainable=info["trainable"])
