"""Defines what a controller asks of whoever rewrites its step, and does it for graphs on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.sizes import KnownShapes
from tf_ooo.errors import MemoryLimitError
from tf_ooo.options import OneDeviceOptions
from tf_ooo.rewriting import one_device
from tf_ooo.rewriting.one_device import check_memory
from tf_ooo.rewriting.request import Failures, RewriteRequest
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.tracing.traces import Seen

if TYPE_CHECKING:
    from grappler_passes import plugin
    from grappler_passes.plugin.requests import Describe

_LOG = logging.getLogger("tf_ooo")


class StepSession:
    """Answers what a controller asks of whoever rewrites its step.

    The answers here are those for a step that is rewritten in one way, in which nothing has gone wrong.

    Attributes:
        failures: of its rewrites.
        shows_ops: whether the profiler sees the graph's ops in the step that is kept.
    """

    failures: Failures
    shows_ops: bool = True

    @property
    def result(self) -> RewriteResult | None:
        """Return what was done to the largest graph."""
        return None

    @property
    def stock_peak_bytes(self) -> int:
        """Return the stock order's highest predicted peak so far, with a memory limit."""
        return 0

    def failure(self) -> str | None:
        """Say in one line why (some of) the step runs in stock order; None where something was rewritten."""
        return None

    def tracing(self) -> AbstractContextManager[object]:
        """Functions traced on this thread inside the block are rewritten."""
        return nullcontext()

    def prepare(self, seen: Seen) -> None:
        """Takes note of the shapes of the next step's inputs; MemoryLimitError: too much with them."""

    def close(self) -> None:
        """Stops rewriting; what was compiled stays as it is."""

    def run_stock(self, step: Callable[[], Any], choice: str | None) -> Any:
        """Runs the stock step; given what has been decided, too."""
        return step()

    def ran(self, choice: str | None) -> None:
        """A rewritten step has run, or it has been decided, for what: fills in the report."""

    def failed(self) -> Iterable[tuple[str, BaseException]]:
        """The ways that cannot run, and why."""
        return ()

    def left_out(self, which: str, error: BaseException) -> None:
        """One of several ways does not run any more, and why."""

    def give_up(self) -> None:
        """There is no way left."""

    def keeps(self, which: str) -> None:
        """One of the ways is kept: the report is to be that one's."""

    def why_stock(self, reason: str, left: Collection[str]) -> str:
        """Return the reason for which stock is kept, with what is to be added, given the steps left."""
        return reason

    def decided(self) -> None:
        """There is no comparison any more."""


class _Peaks:
    """Keeps what is known of a step's peaks; with a memory limit the highest stock peak so far.

    ``open``: results whose peaks depend on inputs that are still to come.
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
    """A request for steps on one device, and the peaks of what was planned for it.

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
    """Return whether it is of a training graph with as many ops, or more."""
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
