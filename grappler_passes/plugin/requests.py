"""Keeps the requests: which graphs are to be rewritten, and by what.

A request is *registered* for as long as TensorFlow may compile a function that belongs to it, and
*active* (:func:`tracing`) on one thread while such functions are traced.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypedDict

from grappler_passes.compat.traced_functions import VARIABLE_ATTR as VARIABLE_ATTR

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
    """One wish: graphs traced while this is active go through ``rewrite`` before they run.

    Args:
        id: unique among the registered requests; written into the graph.
        rewrite: GraphDef in, new GraphDef out, None for "nothing to do".  Called with the placed,
            inlined graph, on whichever thread compiles the function; must not mutate its argument.
        describe: given the ``tf.Variable``s that a function captures (or what has but their ``handle``), what
            the graph is to say about each, None for the variable's own.  Called once per traced function.
            Keras keeps ``trainable`` to itself: see :func:`hook.describe_keras`.
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
        """Adds to what has been counted; any thread may."""
        with self._lock:
            self.traced += traced
            self.marked += marked
            self.calls += calls
            self.rewrites += rewrites

    def fail(self, error: BaseException) -> None:
        """Keeps the error; the first one is logged, TensorFlow runs the unmodified graph.

        Those of ``refuse_on`` are not logged: the call raises.
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
    """Register the request: from now on graphs marked with its id are rewritten; returns it."""
    with _lock:
        if request.id in _requests:
            raise ValueError(f"a request {request.id!r} is registered already; unregister it first")
        _requests[request.id] = request
        _update_enabled()
    return request


def unregister(request_id: str) -> None:
    """Forgets a request; graphs compiled before stay as they are.  An unknown id is ignored."""
    with _lock:
        _requests.pop(request_id, None)
        _update_enabled()


def find(request_id: str) -> Request | None:
    """Return the registered request of that id."""
    with _lock:
        return _requests.get(request_id)


@contextmanager
def tracing(request: Request) -> Iterator[Request]:
    """Functions traced on this thread inside the block belong to ``request``; nests."""
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
    """Return the request that functions traced on this thread belong to now."""
    return _active.stack[-1] if _active.stack else None


def connect(set_enabled: Callable[[bool], None]) -> None:
    """``set_enabled`` is called, now and at every change, with whether any request is registered."""
    global _set_enabled
    with _lock:
        _set_enabled = set_enabled
        _update_enabled()


def _update_enabled() -> None:
    if _set_enabled is not None:
        _set_enabled(bool(_requests))


def _forget_in_child() -> None:
    """A forked child starts with no requests: TensorFlow's threads, and so its results, are the parent's."""
    global _lock
    _lock = threading.RLock()  # the old one may be held by a thread that does not exist here
    _requests.clear()
    _active.stack.clear()
    _update_enabled()


os.register_at_fork(after_in_child=_forget_in_child)
