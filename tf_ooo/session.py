"""One registered wish to rewrite: its request, what came of it, and how it fails."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from grappler_passes import plugin
from grappler_passes.sizes import KnownShapes
from tf_ooo import compat
from tf_ooo.errors import BackendError, GraphError, MemoryLimitError, OOOError
from tf_ooo.options import Options
from tf_ooo.planner import RewriteResult, check_memory, make_rewrite

_LOG = logging.getLogger("tf_ooo")
_numbers = itertools.count(1)


class RewriteSession:
    """A plug-in request for the functions traced inside :meth:`tracing`, until :meth:`close`.

    Args:
        options: how to rewrite.
        describe: names and trainability of captured variables, see ``plugin.Request``.

    Raises:
        BackendError: unsupported TensorFlow, or the plug-in cannot be loaded.
    """

    def __init__(self, options: Options, describe: Callable[[Any], Any] | None = None) -> None:
        compat.check_versions()
        try:
            plugin.load()
        except plugin.PluginError as error:
            raise BackendError(str(error)) from error
        self.results: list[RewriteResult] = []
        self.skips: list[str] = []
        self.options = options
        self._known = known = [KnownShapes(options.batch_size)]
        results, skips = self.results, self.skips  # no reference to self: see the finalizer below
        rewrite = make_rewrite(
            options, results.append, lambda error: skips.append(str(error)), lambda: known[0]
        )
        self.request = plugin.Request(
            f"tf_ooo-{next(_numbers)}",
            rewrite,
            strict=options.strict,
            describe=describe,
            refuse_on=(MemoryLimitError,),
        )
        plugin.register(self.request)
        # A function that is dropped without close() must not stay registered for ever.
        self._close = weakref.finalize(self, plugin.unregister, self.request.id)

    @property
    def result(self) -> RewriteResult | None:
        """The largest training graph rewritten so far; of equals the latest."""
        return max(reversed(self.results), key=lambda r: len(r.training_graph.ops), default=None)

    def tracing(self) -> AbstractContextManager[Any]:
        """Functions traced on this thread inside the block are rewritten."""
        return plugin.tracing(self.request)

    def prepare(self, seen: Sequence[tuple[int, tuple[int | None, ...]]]) -> None:
        """Takes note of the shapes of the next step's inputs, as in ``KnownShapes.seen``.

        Raises MemoryLimitError if the plans made so far go over the limit with them.
        """
        self._known[0] = known = KnownShapes(self.options.batch_size, tuple(seen))
        if self.options.memory_limit_bytes is not None:
            for result in self.results:
                check_memory(result, known, self.options.memory_limit_bytes)

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
        """Why nothing was rewritten, in one line; None where something was or nothing was tried."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        if self.results:
            return None
        return self.skips[0] if self.skips else None

    def raise_if_failed(self, strict: bool) -> None:
        """Raises an interrupt or a MemoryLimitError in any case, other failures if ``strict``."""
        for error in list(self.request.errors):
            if not isinstance(error, Exception):
                self.request.errors.remove(error)
                raise error
        self.raise_if_refused()
        failed = self.error
        if strict and isinstance(failed, OOOError):
            raise failed
        if strict and failed is not None:
            raise BackendError(f"the rewrite failed: {type(failed).__name__}: {failed}") from failed
        if strict and not self.results and self.skips:
            raise GraphError(self.skips[0])
