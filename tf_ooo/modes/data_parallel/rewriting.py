"""The plug-in request of data parallel training: orders the unrolled steps, or only looks at them."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from grappler_passes import plugin
from grappler_passes.analysis.steps import STEP_ATTR
from grappler_passes.passes.separate import SeparatePass
from grappler_passes.passes.verify import VerifyPass
from tf_ooo.compat import versions
from tf_ooo.errors import BackendError, GraphError
from tf_ooo.modes.data_parallel.ordering import (
    FLIGHT_BYTES,
    LayerKey,
    ScheduleFor,
    order_steps,
    separate_steps,
)
from tf_ooo.rewriting.planner import RewriteResult

_LOG = logging.getLogger("tf_ooo")
_numbers = itertools.count(1)


class _Seen:
    """What came of the graphs of one request."""

    def __init__(self) -> None:
        self.result: RewriteResult | None = None
        self.latest: RewriteResult | None = None
        self.graph_def: Any = None
        self.skipped = ""


class StepRequest:
    """Graphs of unrolled steps that are traced inside :meth:`tracing`.

    Args:
        model: names its variables.
        schedule_for: the order, given the first step's graph; None: the graphs are looked at only.
        flight_bytes, planned_for, dump_dir: see :func:`tf_ooo.modes.data_parallel.ordering.order_steps`.

    Raises:
        BackendError: unsupported TensorFlow, or the plug-in cannot be loaded.
    """

    def __init__(
        self,
        model: Any,
        schedule_for: ScheduleFor | None = None,
        flight_bytes: float = FLIGHT_BYTES,
        planned_for: Sequence[LayerKey] | None = None,
        dump_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        versions.check_versions()
        try:
            plugin.load()
        except plugin.PluginError as error:
            raise BackendError(str(error)) from error
        self._seen = seen = _Seen()

        def order(graph_def: Any) -> RewriteResult:
            assert schedule_for is not None  # for mypy: only called then
            return order_steps(graph_def, schedule_for, flight_bytes, planned_for, dump_dir)

        self.request = plugin.Request(
            f"tf_ooo-parallel-{next(_numbers)}",
            _rewrite(seen, order, schedule_for is not None),
            describe=plugin.describe_keras(model),
        )
        plugin.register(self.request)
        self._close = weakref.finalize(self, plugin.unregister, self.request.id)

    def tracing(self) -> AbstractContextManager[Any]:
        """Functions traced on this thread inside the block belong to this request."""
        return plugin.tracing(self.request)

    @property
    def result(self) -> RewriteResult | None:
        """What was done to the largest graph."""
        return self._seen.result

    @property
    def latest(self) -> RewriteResult | None:
        """What was done to the graph that was traced last."""
        return self._seen.latest

    @property
    def graph_def(self) -> Any:
        """The largest graph as TensorFlow runs it, if none was to be ordered."""
        return self._seen.graph_def

    def failure(self) -> str:
        """Why the steps run in stock order; empty where they do not."""
        if self.request.errors:
            error = self.request.errors[0]
            return f"{type(error).__name__}: {error}"
        if self.result is not None:
            return ""
        return self._seen.skipped or "TensorFlow handed no graph over to be ordered"

    def close(self) -> None:
        """Stops; what was compiled stays as it is."""
        self._close()


def _look_at(seen: _Seen, graph_def: Any) -> Any:
    """Separated as the ordered steps will be, so that what is measured is what will run."""
    separated = separate_steps(graph_def)
    if separated.modified:
        VerifyPass(graph_def, separated.replaced, SeparatePass.relaxes)(separated.graph_def)
    if seen.graph_def is None or len(graph_def.node) >= len(seen.graph_def.node):
        seen.graph_def = separated.graph_def
    return separated.graph_def if separated.modified else None


def _rewrite(seen: _Seen, order: Callable[[Any], RewriteResult], wanted: bool) -> Callable[[Any], Any]:
    def rewrite(graph_def: Any) -> Any:
        if not any(STEP_ATTR in node.attr for node in graph_def.node):
            return None
        if not wanted:
            return _look_at(seen, graph_def)
        try:
            result = order(graph_def)
        except GraphError as error:  # helper functions are traced beside the steps
            seen.skipped = seen.skipped or str(error)
            return None
        seen.latest = result
        if seen.result is None or result.moved_ops >= seen.result.moved_ops:
            seen.result = result
        _LOG.info("ordered the steps by %s in %.2f s", result.schedule.policy, result.plan_seconds)
        return result.graph_def

    return rewrite
