"""Makes requests to rewrite the graphs of a step, and keeps each result or why it failed."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes import plugin
from grappler_passes.graph.sizes import KnownShapes
from tf_ooo.compat import versions
from tf_ooo.errors import BackendError, GraphError, MemoryLimitError, OOOError
from tf_ooo.options import OneDeviceOptions
from tf_ooo.rewriting import one_device
from tf_ooo.rewriting.one_device import check_memory
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.tracing.traces import Seen

if TYPE_CHECKING:
    from grappler_passes.plugin.requests import Describe

_LOG = logging.getLogger("tf_ooo")


def in_one_line(error: BaseException) -> str:
    """Return an error's type, and its text if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(frozen=True)
class Failures:
    """Collects the errors of a step's rewrites in order; ``errors`` grows while steps are traced.

    ``reason_of`` gives an error as the report shows it; ``what`` begins the message of errors that are not
    our own; ``refused`` are the errors for which the step does not run.
    """

    errors: list[BaseException] = field(default_factory=list)
    reason_of: Callable[[BaseException], str] = in_one_line
    what: str = "the rewrite failed"
    refused: tuple[type[BaseException], ...] = (MemoryLimitError,)

    @property
    def first(self) -> BaseException | None:
        return self.errors[0] if self.errors else None

    @property
    def reason(self) -> str | None:
        return self.reason_of(self.errors[0]) if self.errors else None

    def raise_refused(self) -> None:
        """Raise the error for which the step did not run, such as a MemoryLimitError, if there is one."""
        for error in self.errors:
            if isinstance(error, self.refused):
                raise error

    def raise_first(self, strict: bool = True) -> None:
        """Raise an interrupt (once) or why a step was refused; the first other error if ``strict``.

        Call this after the step has run: TensorFlow would swallow what is raised while it traces.
        """
        for error in list(self.errors):
            if not isinstance(error, Exception):
                self.errors.remove(error)
                raise error
        self.raise_refused()
        if not strict or self.first is None:
            return
        if isinstance(self.first, OOOError):
            raise self.first
        raise BackendError(f"{self.what}: {self.reason}") from self.first


_numbers = itertools.count(1)


class Rewritten(Protocol):
    """Describes the result of a rewrite; if it is not ``modified``, TensorFlow runs the graph that it has."""

    @property
    def graph_def(self) -> graph_pb2.GraphDef: ...

    @property
    def modified(self) -> bool: ...


ResultT = TypeVar("ResultT", bound=Rewritten)


class _Answer(Generic[ResultT]):
    """Answers the plug-in for each graph of a request, and keeps the results.

    Only one result and the latest are kept, because graphs are large.
    """

    def __init__(
        self,
        rewrite: Callable[[graph_pb2.GraphDef], ResultT | None],
        replaces: Callable[[ResultT, ResultT], bool],
    ) -> None:
        self._rewrite, self._replaces = rewrite, replaces
        self.result: ResultT | None = None
        self.latest: ResultT | None = None
        self.count = 0
        self.skipped = ""

    def __call__(self, graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef | None:
        try:
            result = self._rewrite(graph_def)
        except GraphError as error:
            self.skipped = self.skipped or str(error)
            return None
        if result is None:
            return None
        self.count += 1
        self.latest = result
        if self.result is None or self._replaces(result, self.result):
            self.result = result
        return result.graph_def if result.modified else None


class RewriteRequest(Generic[ResultT]):
    """Rewrites the functions traced inside :meth:`tracing`, until :meth:`close`.

    Args:
        rewrite: takes a graph, returns what was done to it; None: the graph is none of ours.  A GraphError
            says why it is no training step (helper functions are traced, too); other errors are failures.
        replaces: takes a result and the one before; tells whether the new result is kept instead.
        no_graph: says why there was no graph to rewrite.
        refuse_on: errors for which the step does not run; ``failures.raise_refused`` raises them.
        failed: begins the message of errors that are not our own.

    Raises BackendError: unsupported TensorFlow, or the plug-in cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        rewrite: Callable[[graph_pb2.GraphDef], ResultT | None],
        replaces: Callable[[ResultT, ResultT], bool],
        no_graph: Callable[[plugin.Request], str],
        describe: Describe | None = None,
        refuse_on: tuple[type[BaseException], ...] = (),
        failed: str = "the rewrite failed",
    ) -> None:
        versions.check_versions()
        try:
            plugin.load()
        except plugin.PluginError as error:
            raise BackendError(str(error)) from error
        self._outcome = answer = _Answer(rewrite, replaces)  # without a reference to self: see below
        self._no_graph = no_graph
        self._request = plugin.Request(f"{name}-{next(_numbers)}", answer, describe, refuse_on)
        refused: tuple[type[BaseException], ...] = (MemoryLimitError, *refuse_on)
        self.failures = Failures(self._request.errors, what=failed, refused=refused)
        self.open()

    def open(self) -> None:
        """Rewrite again after a :meth:`close`."""
        plugin.register(self._request)
        # A function that is dropped without close() must not stay registered for ever.
        self._close = weakref.finalize(self, plugin.unregister, self._request.id)

    @property
    def result(self) -> ResultT | None:
        return self._outcome.result

    @property
    def latest(self) -> ResultT | None:
        return self._outcome.latest

    @property
    def count(self) -> int:
        return self._outcome.count

    @property
    def skipped(self) -> str:
        """Say why a graph was not rewritten although nothing failed."""
        return self._outcome.skipped or self._no_graph(self._request)

    def failure(self) -> str | None:
        """Say in one line why (some of) the step runs in stock order; None if something was rewritten."""
        if self.failures.first is not None:
            return self.failures.reason
        return None if self.result is not None else self.skipped

    def tracing(self) -> AbstractContextManager[object]:
        return plugin.tracing(self._request)

    def close(self) -> None:
        self._close()


class StepSession:
    """Answers a controller's questions about the rewriting of its step.

    These answers are for a step that is rewritten in one way, without any errors.

    Attributes:
        failures: the errors of the step's rewrites.
        shows_ops: whether the profiler sees the graph's ops in the step that is kept.
    """

    failures: Failures
    shows_ops: bool = True

    @property
    def result(self) -> RewriteResult | None:
        """Return the result for the largest graph."""
        return None

    @property
    def stock_peak_bytes(self) -> int:
        """Return the highest stock peak predicted so far; needs a memory limit."""
        return 0

    def failure(self) -> str | None:
        """Say in one line why (some of) the step runs in stock order; None if something was rewritten."""
        return None

    def tracing(self) -> AbstractContextManager[object]:
        """Rewrite the functions that this thread traces inside the block."""
        return nullcontext()

    def prepare(self, seen: Seen) -> None:
        """Note the shapes of the next step's inputs; MemoryLimitError if they need too much memory."""

    def close(self) -> None:
        """Stop rewriting; what was compiled stays as it is."""

    def run_stock(self, step: Callable[[], Any], choice: str | None) -> Any:
        """Run the stock step; ``choice`` holds what has been decided."""
        return step()

    def ran(self, choice: str | None) -> None:
        """Fill in the report: a rewritten step has run, or the choice is made."""

    def failed(self) -> Iterable[tuple[str, BaseException]]:
        """Return the ways that cannot run, and why."""
        return ()

    def left_out(self, which: str, error: BaseException) -> None:
        """Note that one of several ways does not run any more, and why."""

    def give_up(self) -> None:
        """Note that there is no way left."""

    def keeps(self, which: str) -> None:
        """Let the report describe the way that is kept."""

    def why_stock(self, reason: str, left: Collection[str]) -> str:
        """Return why stock is kept, with what is to be added, given the steps left."""
        return reason

    def decided(self) -> None:
        """Note that the comparison is over."""


class _Peaks:
    """Keeps a step's known peaks; with a memory limit the highest stock peak so far.

    ``open`` are results whose peaks depend on inputs still to come.
    """

    def __init__(self, known: KnownShapes) -> None:
        self.known, self.stock_bytes = known, 0
        self.open: list[RewriteResult] = []

    def add(self, result: RewriteResult) -> None:
        if result.orders is not None:
            self.stock_bytes = max(self.stock_bytes, result.orders.stock_peak_bytes)
            if result.orders.open_sizes:
                self.open.append(result)


class RewriteSession(RewriteRequest[RewriteResult], StepSession):
    """Holds the request for steps on one device, and the peaks of what was planned.

    Raises BackendError: unsupported TensorFlow, or the plug-in cannot be loaded.
    """

    def __init__(self, options: OneDeviceOptions, describe: Describe | None = None) -> None:
        self._options = options
        self._peaks = peaks = _Peaks(KnownShapes(options.batch_size))

        def rewrite(graph_def: graph_pb2.GraphDef) -> RewriteResult:
            result = one_device.rewrite_graph(graph_def, options, peaks.known)
            _LOG.info(
                "planned %s for %d layers in %.2f s: %d ops wait for %d added edges",
                result.schedule.policy,
                len(result.training_graph.layers),
                result.plan_seconds,
                result.moved_ops,
                result.added_edges,
            )
            peaks.add(result)
            return result

        super().__init__("tf_ooo", rewrite, is_larger, _why_not_called, describe, (MemoryLimitError,))

    @property
    def stock_peak_bytes(self) -> int:
        return self._peaks.stock_bytes

    def prepare(self, seen: Seen) -> None:
        peaks, limit_bytes = self._peaks, self._options.memory_limit_bytes
        peaks.known = KnownShapes(self._options.batch_size, seen)
        if limit_bytes is not None:
            for result in peaks.open:
                peaks.stock_bytes = max(peaks.stock_bytes, check_memory(result, peaks.known, limit_bytes))


def is_larger(result: RewriteResult, before: RewriteResult) -> bool:
    """Return whether ``result`` is for a training graph with as many ops as ``before``, or more."""
    return len(result.training_graph.ops) >= len(before.training_graph.ops)


def _why_not_called(request: plugin.Request) -> str:
    if request.calls:
        return (
            "TensorFlow ran its graph optimizers once only (meta_optimizer_iterations=ONE), steps are "
            "rewritten in the second round: leave meta_optimizer_iterations at its default, TWO"
        )
    if request.traced and not request.marked:
        return (
            "not a training graph: the step captures no variables (it must use them from outside, "
            "not take them as arguments)"
        )
    if tf.inside_function():
        return (
            "the step is called inside another tf.function and becomes part of its graph: decorate that "
            "function with tf_ooo.function instead, or take tf.function off it"
        )
    return "TensorFlow handed no graph over: eager execution, or graph optimizers are switched off"
