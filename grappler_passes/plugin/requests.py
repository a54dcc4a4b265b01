"""Keeps the requests: which graphs are to be rewritten, by what, and how they are told apart.

A request is *registered* for as long as TensorFlow may compile a function that belongs to it, and
*active* (:func:`tracing`) on one thread while such functions are traced.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypedDict

from grappler_passes.compat import keras_values, runtime
from grappler_passes.compat.runtime import VARIABLE_ATTR as VARIABLE_ATTR

logger = logging.getLogger("tf_ooo")

REQUEST_ATTR = "_ooo_request"
"""This attribute is on the arguments of a graph that belongs to a request: the request's id."""
DONE_ATTR = "_ooo_done"
"""This attribute is on nodes of a graph that was rewritten."""
SEEN_ATTR = "_ooo_seen"
"""This attribute, with ``_CPU`` or ``_GPU`` behind it, is on arguments in TensorFlow's second round."""


class VariableInfo(TypedDict):
    """Describes one variable as the graph knows it."""

    name: str
    trainable: bool


Describe = Callable[[Sequence[Any]], Sequence[VariableInfo | None]]


@dataclass(eq=False)
class Request:
    """Asks that graphs traced while this is active go through ``rewrite`` before they run.

    Args:
        id: unique among the registered requests; written into the graph.
        rewrite: GraphDef in, new GraphDef out, None for "nothing to do".  Called with the placed,
            inlined graph, on whichever thread compiles the function; must not mutate its argument.
        describe: given the ``tf.Variable``s that a function captures (or what has but their ``handle``), what
            the graph is to say about each, None for the variable's own.  Called once per traced function.
            Keras keeps ``trainable`` to itself: see :func:`describe_keras`.
        refuse_on: after these errors of ``rewrite`` the graph must not run in stock order either: the
            call raises ``tf.errors.InvalidArgumentError`` before any op has had an effect.

    Filled in by the plug-in: ``traced`` functions, of which ``marked`` capture a resource; ``calls`` by
    TensorFlow, ``rewrites``, ``skipped`` (reasons) and ``errors``.  Nothing may be raised within TensorFlow:
    whoever runs the function raises what is in ``errors``, KeyboardInterrupt and SystemExit too.
    """

    id: str
    rewrite: Callable[[Any], Any]
    describe: Describe | None = None
    refuse_on: tuple[type[BaseException], ...] = ()
    traced: int = 0
    marked: int = 0
    calls: int = 0
    rewrites: int = 0
    skipped: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _logged: bool = field(default=False, repr=False)

    def count(self, traced: int = 0, marked: int = 0, calls: int = 0, rewrites: int = 0) -> None:
        """Add to what has been counted; may be called from any thread."""
        with self._lock:
            self.traced += traced
            self.marked += marked
            self.calls += calls
            self.rewrites += rewrites

    def fail(self, error: BaseException) -> None:
        """Keep the error and log the first one; TensorFlow then runs the unmodified graph.

        Errors of ``refuse_on`` are not logged, because the call raises.
        """
        with self._lock:
            self.errors.append(error)
            first, self._logged = not self._logged, True
        if first and not isinstance(error, self.refuse_on):
            what = f"{type(error).__name__}: {error}"
            logger.warning("%s: the graph runs in its stock order, because %s", self.id, what)
            logger.debug("%s: where it failed", self.id, exc_info=error)


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[Request] = []


_requests: dict[str, Request] = {}
_lock = threading.RLock()
_active = _Active()
_set_enabled: Callable[[bool], None] | None = None


def register(request: Request) -> Request:
    """Register the request and return it: from now on graphs marked with its id are rewritten."""
    with _lock:
        if request.id in _requests:
            raise ValueError(f"a request {request.id!r} is registered already; unregister it first")
        _requests[request.id] = request
        _update_enabled()
    return request


def unregister(request_id: str) -> None:
    """Forget a request; graphs compiled before stay as they are.  An unknown id is ignored."""
    with _lock:
        _requests.pop(request_id, None)
        _update_enabled()


def find(request_id: str) -> Request | None:
    """Return the registered request with that id, if there is one."""
    with _lock:
        return _requests.get(request_id)


@contextmanager
def tracing(request: Request) -> Iterator[Request]:
    """Let functions traced on this thread inside the block belong to ``request``; blocks nest."""
    if _set_enabled is None:
        raise RuntimeError(
            "the plug-in is not loaded, so nothing would be rewritten; call plugin.load() first"
        )
    _active.stack.append(request)
    try:
        yield request
    finally:
        _active.stack.pop()


def active() -> Request | None:
    """Return the request that functions traced on this thread now belong to."""
    return _active.stack[-1] if _active.stack else None


def connect(set_enabled: Callable[[bool], None]) -> None:
    """Call ``set_enabled``, now and at every change, with whether any request is registered."""
    global _set_enabled
    with _lock:
        _set_enabled = set_enabled
        _update_enabled()


def _update_enabled() -> None:
    if _set_enabled is not None:
        _set_enabled(bool(_requests))


def _forget_in_child() -> None:
    """Forget all requests in a forked child: TensorFlow's threads, and so its results, are the parent's."""
    global _lock
    _lock = threading.RLock()  # the old one may be held by a thread that does not exist here
    _requests.clear()
    _active.stack.clear()
    _update_enabled()


os.register_at_fork(after_in_child=_forget_in_child)


_hook_lock = threading.Lock()


# The functions below mark the arguments of traced functions, so that their graphs can be told apart later. A
# graph that reaches the plug-in carries no function name. Attributes of an argument's placeholder that start
# with ``_`` are still on the ``_Arg`` nodes of the final graph.


def install() -> None:
    """Make every function traced from now on be looked at; does nothing the second time."""
    with _hook_lock:
        transforms = runtime.func_graph_transforms()
        if mark_arguments not in transforms:
            transforms.append(mark_arguments)


def mark_arguments(func_graph: object) -> None:
    """Mark the captured resources of a ``FuncGraph``, if a request is active on this thread."""
    request = active()
    if request is None:
        return
    try:
        _mark_captured(func_graph, request)
    except Exception as error:  # an error here would break the user's tracing
        request.fail(error)


def describe_keras(model: Any, trained: Callable[[Any], Sequence[Any]] | None = None) -> Describe:
    """Return a ``Request.describe`` with a Keras model's own names (``path``) and ``trainable``.

    Freezing a Keras layer leaves ``tf.Variable.trainable`` as it was.  The model is read at each trace: it
    may be built, frozen and thawed in between.  ``trained`` gives the variables that the traced step trains,
    if they may differ from ``model.trainable_variables``.
    """

    def infos() -> Iterator[tuple[Any, VariableInfo]]:
        trainable = {id(variable) for variable in (trained(model) if trained else model.trainable_variables)}
        # Keras' Nadam has a product of numbers that claims to be trainable.
        for keras_variable in (*keras_values.optimizer_variables(model), *model.variables):
            copies = _copies(keras_values.variable_of_keras(keras_variable))
            for number, copy in enumerate(copies):
                name = _name(copy) if number else keras_values.path_of_keras(keras_variable) or _name(copy)
                yield copy.handle, VariableInfo(name=name, trainable=id(keras_variable) in trainable)

    return described_by_handle(infos)


def described_by_handle(infos: Callable[[], Iterable[tuple[Any, VariableInfo]]]) -> Describe:
    """Return a ``Request.describe`` from (handle, info) pairs, which ``infos`` gives at each trace."""

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
        runtime.set_string_attr(op, REQUEST_ATTR, request.id)
        if info is not None:
            runtime.set_string_attr(op, VARIABLE_ATTR, json.dumps(next(unique)))


@dataclass(frozen=True)
class _Handle:
    """Stands for a variable known only by its handle: legacy optimizers give fused ops such slots."""

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
    """Yield the infos with their names made unique."""
    names = runtime.numbered([info["name"] for info in infos])
    for info, name in zip(infos, names, strict=True):
        yield VariableInfo(name=name, trainable=info["trainable"])
