"""Marks the arguments of traced functions, so that their graphs can be told apart later.

A graph that reaches the plug-in carries no function name.  Attributes of an argument's placeholder that start
with ``_`` are still on the ``_Arg`` nodes of the final graph.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grappler_passes.compat import keras_values, traced_functions
from grappler_passes.plugin.requests import (
    REQUEST_ATTR,
    VARIABLE_ATTR,
    Describe,
    Request,
    VariableInfo,
    active,
)

_lock = threading.Lock()


def install() -> None:
    """Has every traced function looked at from now on; does nothing the second time."""
    with _lock:
        transforms = traced_functions.func_graph_transforms()
        if mark_arguments not in transforms:
            transforms.append(mark_arguments)


def mark_arguments(func_graph: object) -> None:
    """Marks the captured resources of a ``FuncGraph``, if a request is active on this thread."""
    request = active()
    if request is None:
        return
    try:
        _mark_captured(func_graph, request)
    except Exception as error:  # an error here would break the user's tracing
        request.fail(error)


def describe_keras(model: Any, trained: Callable[[Any], Sequence[Any]] | None = None) -> Describe:
    """A ``Request.describe`` for a Keras model: Keras' own ``path`` as name, and its ``trainable``.

    Freezing a Keras layer leaves ``tf.Variable.trainable`` as it was.  The model is read at each trace: it
    may be built, frozen and thawed in between.  ``trained`` gives the variables that the traced step trains,
    where they may be others than ``model.trainable_variables``.
    """

    def infos() -> Iterator[tuple[Any, VariableInfo]]:
        trainable = {id(variable) for variable in (trained(model) if trained else model.trainable_variables)}
        # Keras' Nadam has a product of numbers that calls itself trainable.
        for keras_variable in (*keras_values.optimizer_variables(model), *model.variables):
            copies = _copies(keras_values.variable_of_keras(keras_variable))
            for number, copy in enumerate(copies):
                name = _name(copy) if number else keras_values.path_of_keras(keras_variable) or _name(copy)
                yield copy.handle, VariableInfo(name=name, trainable=id(keras_variable) in trainable)

    return described_by_handle(infos)


def described_by_handle(infos: Callable[[], Iterable[tuple[Any, VariableInfo]]]) -> Describe:
    """Return a ``Request.describe`` from (handle, what is said of its variable), asked for at each trace."""

    def describe(variables: Sequence[Any]) -> list[VariableInfo | None]:
        by_handle = {id(handle): info for handle, info in infos()}
        return [by_handle.get(id(variable.handle)) for variable in variables]

    return describe


def _copies(variable: object) -> list[Any]:
    """Return the variable, or its replicas under a distribution strategy; nothing if it has no handle."""
    copies = getattr(variable, "values", None) or [variable]
    return [copy for copy in copies if getattr(copy, "handle", None) is not None]


def _name(variable: Any) -> str:
    return str(variable.name).removesuffix(":0")


def _mark_captured(func_graph: Any, request: Request) -> None:
    by_handle = {id(v.handle): v for v in func_graph.variables if getattr(v, "handle", None) is not None}
    captured = [
        (placeholder.op, by_handle.get(id(external), _Handle(external)))
        for external, placeholder in func_graph.captures
        if placeholder.dtype.name == "resource"
    ]
    request.count(traced=1, marked=bool(captured))
    if not captured:
        return
    infos = _infos([variable for _, variable in captured], request)
    unique = _unique([info for info in infos if info is not None])
    for (op, _), info in zip(captured, infos, strict=True):
        traced_functions.set_string_attr(op, REQUEST_ATTR, request.id)
        if info is not None:
            traced_functions.set_string_attr(op, VARIABLE_ATTR, json.dumps(next(unique)))


@dataclass(frozen=True)
class _Handle:
    """Stands for a variable known by its handle only: legacy optimizers give fused ops those of slots."""

    handle: Any


def _infos(variables: Sequence[Any], request: Request) -> list[VariableInfo | None]:
    own = [None if isinstance(variable, _Handle) else _own(variable) for variable in variables]
    if request.describe is None:
        return own
    described = request.describe(variables)
    return [better or info for better, info in zip(described, own, strict=True)]


def _own(variable: Any) -> VariableInfo:
    # Keras 2's counters of steps are integers, and trainable by name.
    trainable = bool(variable.trainable and keras_values.has_gradient(variable.dtype))
    return VariableInfo(name=_name(variable), trainable=trainable)


def _unique(infos: Sequence[VariableInfo]) -> Iterator[VariableInfo]:
    """Yield the infos with names that differ."""
    names = traced_functions.numbered([info["name"] for info in infos])
    for info, name in zip(infos, names, strict=True):
        yield VariableInfo(name=name, trainable=info["trainable"])
