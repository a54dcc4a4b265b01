"""One registered wish to rewrite: its request, what came of it, and how it fails."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from grappler_passes import plugin
from grappler_passes.graph.sizes import KnownShapes
from tf_ooo.compat import versions
from tf_ooo.errors import BackendError, GraphError, MemoryLimitError, OOOError
from tf_ooo.options import OneDeviceOptions
from tf_ooo.rewriting.peaks import check_memory
from tf_ooo.rewriting.planner import RewriteResult, make_rewrite

_LOG = logging.getLogger("tf_ooo")
_numbers = itertools.count(1)


class _Found:
    """What the rewrites of one request gave.  A graph is large: few of them are kept.

    Attributes:
        best: the largest training graph rewritten so far; of equals the latest.
        open: those whose peaks depend on the inputs that are still to come (memory limit only).
        stock_peak_bytes: the highest predicted peak of the stock orders (memory limit only).
        skip: why a graph was no training step.
        known: shapes of the inputs of the next step.
    """

    def __init__(self, known: KnownShapes) -> None:
        self.best: RewriteResult | None = None
        self.open: list[RewriteResult] = []
        self.stock_peak_bytes = 0
        self.skip: str | None = None
        self.known = known

    def add(self, result: RewriteResult) -> None:
        if self.best is None or len(result.training_graph.ops) >= len(self.best.training_graph.ops):
            self.best = result
        if result.open_sizes:
            self.open.append(result)
        self.stock_peak_bytes = max(self.stock_peak_bytes, result.stock_peak_bytes)

    def add_skip(self, error: GraphError) -> None:
        self.skip = self.skip or str(error)


class Session(Protocol):
    """What a controller asks of whoever rewrites its step."""

    request: Any

    @property
    def stock_peak_bytes(self) -> int: ...

    @property
    def result(self) -> RewriteResult | None: ...

    @property
    def error(self) -> BaseException | None: ...

    def tracing(self) -> AbstractContextManager[Any]: ...

    def prepare(self, seen: Sequence[tuple[int, tuple[int | None, ...]]]) -> None: ...

    def raise_if_refused(self) -> None: ...

    def raise_if_failed(self, strict: bool) -> None: ...

    def failure(self) -> str | None: ...

    def close(self) -> None: ...


class RewriteSession:
    """A plug-in request for the functions traced inside :meth:`tracing`, until :meth:`close`.

    Args:
        options: how to rewrite.
        describe: names and trainability of captured variables, see ``plugin.Request``.

    Raises:
        BackendError: unsupported TensorFlow, or the plug-in cannot be loaded.
    """

    def __init__(self, options: OneDeviceOptions, describe: Callable[[Any], Any] | None = None) -> None:
        versions.check_versions()
        try:
            plugin.load()
        except plugin.PluginError as error:
            raise BackendError(str(error)) from error
        self.options = options
        self._found = found = _Found(KnownShapes(options.batch_size))  # no reference to self: see below
        rewrite = make_rewrite(options, found.add, found.add_skip, lambda: found.known)
        self.request: Any = plugin.Request(
            f"tf_ooo-{next(_numbers)}", rewrite, describe=describe, refuse_on=(MemoryLimitError,)
        )
        plugin.register(self.request)
        # A function that is dropped without close() must not stay registered for ever.
        self._close = weakref.finalize(self, plugin.unregister, self.request.id)

    @property
    def result(self) -> RewriteResult | None:
        """The largest training graph rewritten so far; of equals the latest."""
        return self._found.best

    @property
    def stock_peak_bytes(self) -> int:
        """With a memory limit: the highest predicted peak of the stock order so far."""
        return self._found.stock_peak_bytes

    def tracing(self) -> AbstractContextManager[Any]:
        """Functions traced on this thread inside the block are rewritten."""
        return plugin.tracing(self.request)

    def prepare(self, seen: Sequence[tuple[int, tuple[int | None, ...]]]) -> None:
        """Takes note of the shapes of the next step's inputs, as in ``KnownShapes.seen``.

        Raises MemoryLimitError if the plans made so far go over the limit with them.
        """
        found, limit_bytes = self._found, self.options.memory_limit_bytes
        found.known = KnownShapes(self.options.batch_size, tuple(seen))
        if limit_bytes is not None:
            for result in found.open:
                peak = check_memory(result, found.known, limit_bytes)
                found.stock_peak_bytes = max(found.stock_peak_bytes, peak)

    def raise_if_refused(self) -> None:
        """Raises the MemoryLimitError for which the step did not run, if that is what happened."""
        for error in self.request.errors:
            if isinstance(error, MemoryLimitError):
                raise error

    def close(self) -> None:
        """Stops rewriting; what was compiled stays as it is."""
        self._close()

    @property
    def error(self) -> BaseException | None:
        """The first failure."""
        return self.request.errors[0] if self.request.errors else None

    def failure(self) -> str | None:
        """Why (some of) the step runs in stock order, in one line; None where something was rewritten."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        if self.result is not None:
            return None
        return self._found.skip or self._why_not_called()

    def _why_not_called(self) -> str:
        """Why no rewrite was tried for a step that has run."""
        if self.request.calls:
            return (
                "TensorFlow ran its graph optimizers once only (meta_optimizer_iterations=ONE), steps are "
                "rewritten in the second round: leave meta_optimizer_iterations at its default, TWO"
            )
        if self.request.traced and not self.request.marked:
            return (
                "not a training graph: the step captures no variables (it must use them from outside, "
                "not take them as arguments)"
            )
        return "TensorFlow handed no graph over: eager execution, or graph optimizers are switched off"

    def raise_if_failed(self, strict: bool) -> None:
        """Raises an interrupt or a MemoryLimitError in any case, other failures if ``strict``."""
        self.request.raise_interrupt()
        self.raise_if_refused()
        failed = self.error
        if strict and isinstance(failed, OOOError):
            raise failed
        if strict and failed is not None:
            raise BackendError(f"the rewrite failed: {type(failed).__name__}: {failed}") from failed
