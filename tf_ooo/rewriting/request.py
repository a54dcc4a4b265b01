"""One wish to rewrite the graphs of a step: the plug-in's request, what came of it, why it failed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tensorflow.core.framework import graph_pb2

from grappler_passes import plugin
from tf_ooo.compat import versions
from tf_ooo.errors import BackendError, GraphError, MemoryLimitError, OOOError

if TYPE_CHECKING:
    from grappler_passes.plugin.requests import Describe


def in_one_line(error: BaseException) -> str:
    """Return its type, and its text if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(frozen=True)
class Failures:
    """The errors of a step's rewrites, in their order; ``errors`` grows while steps are traced.

    ``reason_of`` is an error as the report shows it; ``what`` begins the message of errors that are not our
    own; ``refused``: for which errors the step does not run.
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
        """Raises the error for which the step did not run, such as a MemoryLimitError, if there is one."""
        for error in self.errors:
            if isinstance(error, self.refused):
                raise error

    def raise_first(self, strict: bool = True) -> None:
        """Raises an interrupt (once) or why a step was refused; the first other error if ``strict``.

        To be called after the step has run: TensorFlow would swallow what is raised while it traces.
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
    """Describes what a rewrite returns; if nothing is ``modified`` TensorFlow runs the graph that it has."""

    @property
    def graph_def(self) -> graph_pb2.GraphDef: ...

    @property
    def modified(self) -> bool: ...


ResultT = TypeVar("ResultT", bound=Rewritten)


class _Answer(Generic[ResultT]):
    """Answers the plug-in for each graph of a request, and keeps what came of them.

    Graphs are large: one result is kept, and the last.
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
    """Rewrites the functions that are traced inside :meth:`tracing`, until :meth:`close`.

    Args:
        rewrite: a graph in, what was done to it out; None: it is none of ours.  A GraphError says why it is
            no training step (helper functions are traced, too); other errors are failures.
        replaces: whether the first of two results is kept in place of the second, which came before.
        no_graph: says why there was none to rewrite.
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
        """Rewrite again after :meth:`close`."""
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
        """Say why a graph was not rewritten, though nothing failed."""
        return self._outcome.skipped or self._no_graph(self._request)

    def failure(self) -> str | None:
        """Say in one line why (some of) the step runs in stock order; None where something was rewritten."""
        if self.failures.first is not None:
            return self.failures.reason
        return None if self.result is not None else self.skipped

    def tracing(self) -> AbstractContextManager[object]:
        return plugin.tracing(self._request)

    def close(self) -> None:
        self._close()
