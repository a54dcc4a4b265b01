"""What became of rewriting one compiled step; the counterpart of ``tf_ooo.rewriting.session`` for XLA."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from tf_ooo.compat import xla_nodes
from tf_ooo.costs.gains import GainTable
from tf_ooo.errors import BackendError, MemoryLimitError, OOOError
from tf_ooo.fit.step_times import REWRITTEN
from tf_ooo.modes.compiled.captured import CompiledModule
from tf_ooo.modes.compiled.rewrite import StreamRewrite
from tf_ooo.options import OneDeviceOptions
from tf_ooo.rewriting.planner import RewriteResult

_LOG = logging.getLogger("tf_ooo")
_WHERE_STREAMS_ARE = "CUDA"
_CONVERTED = "in user code:"


class StreamSession:
    """Collects rewrites and failures of one step.

    Raises:
        BackendError: this TensorFlow or this platform has no streams to call on; says which.
    """

    def __init__(self, options: OneDeviceOptions) -> None:
        reason = why_not(options)
        if reason is not None:
            raise BackendError(reason)
        self.options = options
        self.shown: str | None = None  # the way whose result is the report's; None: the first that there is
        self.made = False  # whether any step was made, rewritten or not
        self.traced: dict[Any, Any] = {}
        self.compiled: dict[Any, Any] = {}
        self.stock_bytes: dict[Any, int] = {}
        self.least_bytes: dict[Any, int] = {}  # of ways above a memory limit, by kind of input
        self.modules: dict[str, CompiledModule] = {}
        self.failed: dict[str, BaseException] = {}
        self.several_ways = False
        self.said: list[str] = []
        self.gains: GainTable | None = None  # if they were measured
        self.waiting: list[Any] = []  # batches taken from Keras' iterator that no step has trained on
        self._module_of: dict[Any, CompiledModule] = {}
        self._results: dict[str, RewriteResult] = {}
        self.request = SimpleNamespace(errors=[])

    def add(self, made: StreamRewrite, name: str = REWRITTEN) -> None:
        """Takes note of a rewritten step; of several of one way the one with most ops is reported."""
        known = self._results.get(name)
        if known is None or len(made.training_graph.ops) >= len(known.training_graph.ops):
            self._results[name] = _as_result(made)

    @property
    def result(self) -> RewriteResult | None:
        """What became of the step; where one way is kept, of that one."""
        if self.shown is not None:
            return self._results.get(self.shown)
        return next(iter(self._results.values()), None)

    def measured(self, gains: GainTable) -> None:
        """Takes note of a table of gains that was measured for a plan."""
        self.gains = gains
        self.said += [note for note in gains.notes if note not in self.said]

    @property
    def stock_peak_bytes(self) -> int:
        """Of the stock step as XLA compiles it; asked with a memory limit only."""
        return max(self.stock_bytes.values(), default=0)

    def came_out(self, name: str, key: Any, module: CompiledModule | None) -> None:
        """Takes note of what XLA made of a step; one that was compiled under another name has the same."""
        if module is not None:
            self._module_of[key] = module
        known = self._module_of.get(key)
        if known is not None:
            self.modules.setdefault(name, known)

    def fail(self, error: BaseException, name: str = REWRITTEN) -> None:
        """Takes note of why a step was not rewritten; of several ways one may fail."""
        _LOG.debug("%s: not rewritten", name, exc_info=error)
        if self.several_ways:
            self.failed.setdefault(name, error)
        else:
            self.request.errors.append(error)

    def end_comparison(self) -> None:
        """From now on there is one way left, and the stock step where that fails."""
        self.several_ways = False

    def give_up(self) -> None:
        """There is no way left: the stock step runs."""
        self.request.errors.extend(self.failed.values())
        self.end_comparison()

    def tracing(self) -> AbstractContextManager[Any]:
        """Nothing has to be marked: the step is rewritten before it is traced for good."""
        return nullcontext()

    def prepare(self, seen: Sequence[Any]) -> None:
        """Shapes are known when a compiled step is traced."""

    def raise_if_refused(self) -> None:
        """Raises the MemoryLimitError for which the step did not run, if that is what happened."""
        for error in self.request.errors:
            if isinstance(error, MemoryLimitError):
                raise error

    def close(self) -> None:
        """Nothing is registered anywhere."""

    @property
    def error(self) -> BaseException | None:
        """The first failure."""
        return self.request.errors[0] if self.request.errors else None

    def failure(self) -> str | None:
        """Why the stock step runs (for some shapes), in one line; None where it does not."""
        error = self.error
        if error is None:
            return None if self.made or self.several_ways else "the step has not been traced"
        return reason_of(error)

    def raise_if_failed(self, strict: bool) -> None:
        """Raises a MemoryLimitError in any case, other failures if ``strict``."""
        self.raise_if_refused()
        if strict and isinstance(self.error, OOOError):
            raise self.error
        if strict and self.error is not None:
            raise BackendError(f"the rewrite failed: {self.failure()}") from self.error


def why_not(options: OneDeviceOptions) -> str | None:
    """Why no compiled step can be rewritten in this process; None where it can."""
    reason = xla_nodes.why_no_streams()
    if reason is not None:
        return f"jit_compile=True: {reason}"
    platform = xla_nodes.platform()
    if platform != _WHERE_STREAMS_ARE and not options.any_platform:
        return (
            f"jit_compile=True: XLA compiles for {platform} here, which has no streams to run dW on; "
            "that needs a CUDA GPU (jit_compile=False is reordered on every device)"
        )
    return None


def reason_of(error: BaseException) -> str:
    """In one line."""
    return str(error) if isinstance(error, OOOError) else f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    """Of an error in code that AutoGraph has converted the last: the first ones are a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return lines[-1 if lines[0] == _CONVERTED else 0]


def _as_result(made: StreamRewrite) -> RewriteResult:
    streams = {call.stream for call in made.calls}
    notes = [
        f"{len(made.calls)} calls on {len(streams)} side streams, {made.barriers} barriers",
        *(f"{layer}: dW stays on the main stream: {reason}" for layer, reason in made.left.items()),
    ]
    return RewriteResult(
        training_graph=made.training_graph,
        schedule=made.schedule,
        graph_def=made.graph_def,
        moved_ops=made.moved_ops,
        added_edges=made.barriers,
        plan_seconds=made.plan_seconds,
        mixed=dict(made.training_graph.mixed),
        notes=tuple(notes),
    )
