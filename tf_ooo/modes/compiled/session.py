"""What came of rewriting one compiled step.  No plug-in: a step is rewritten before XLA compiles it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tf_ooo.compat import xla_nodes
from tf_ooo.costs.gains import GainTable
from tf_ooo.errors import BackendError, OOOError
from tf_ooo.fit.step_times import REWRITTEN
from tf_ooo.modes.compiled.captured import CompiledModule
from tf_ooo.modes.compiled.rewrite import StreamRewrite
from tf_ooo.options import OneDeviceOptions
from tf_ooo.rewriting.failures import Failures
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.session import is_larger
from tf_ooo.tracing.flat import FlatTrace
from tf_ooo.tracing.inputs import Seen

_LOG = logging.getLogger("tf_ooo")
_WHERE_STREAMS_ARE = "CUDA"
_CONVERTED = "in user code:"


class StreamSession:
    """Collects rewrites and failures of one step: a StepSession.

    Raises:
        BackendError: this TensorFlow or this platform has no streams to call on; says which.
    """

    def __init__(self, options: OneDeviceOptions) -> None:
        reason = why_not(options)
        if reason is not None:
            raise BackendError(reason)
        self.options = options
        self.shown: str | None = None  # the way whose result is the report's; None: the first that there is
        self.has_step = False  # whether any was made, rewritten or not
        self.traced: dict[Hashable, FlatTrace | Exception] = {}
        self.compiled: dict[Hashable, Callable[..., Any]] = {}
        self.stock_bytes: dict[Hashable, int] = {}
        self.least_bytes: dict[Hashable, int] = {}  # of ways above a memory limit, by kind of input
        self.modules: dict[str, CompiledModule] = {}
        self.failed: dict[str, BaseException] = {}
        self.several_ways = False
        self.said: list[str] = []
        self.gains: GainTable | None = None  # if they were measured
        self.waiting: list[Any] = []  # batches taken from Keras' iterator that no step has trained on
        self._module_of: dict[Hashable, CompiledModule] = {}
        self._results: dict[str, RewriteResult] = {}
        self.failures = Failures(reason_of=reason_of)

    def add(self, rewrite: StreamRewrite, name: str = REWRITTEN) -> None:
        """Takes note of a rewritten step; of several of one way the one with most ops is reported."""
        result, before = _as_result(rewrite), self._results.get(name)
        if before is None or is_larger(result, before):
            self._results[name] = result

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

    def came_out(self, name: str, key: Hashable, module: CompiledModule | None) -> None:
        """Notes the compiled module of a way; ways that compile to the same key share one."""
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
            self.failures.errors.append(error)

    def end_comparison(self) -> None:
        """From now on there is one way left, and the stock step where that fails."""
        self.several_ways = False

    def give_up(self) -> None:
        """There is no way left: the stock step runs."""
        self.failures.errors.extend(self.failed.values())
        self.end_comparison()

    def tracing(self) -> AbstractContextManager[object]:
        """Nothing has to be marked: the step is rewritten before it is traced for good."""
        return nullcontext()

    def prepare(self, seen: Seen) -> None:
        """Shapes are known when a compiled step is traced."""

    def close(self) -> None:
        """Nothing is registered anywhere."""

    def failure(self) -> str | None:
        """Why the stock step runs (for some shapes), in one line; None where it does not."""
        has_step = self.has_step or self.several_ways
        return self.failures.reason or (None if has_step else "the step has not been traced")


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


def _as_result(rewrite: StreamRewrite) -> RewriteResult:
    streams = {call.stream for call in rewrite.calls}
    notes = [
        f"{len(rewrite.calls)} calls on {len(streams)} side streams, {rewrite.barriers} barriers",
        *(f"{layer}: dW stays on the main stream: {reason}" for layer, reason in rewrite.left.items()),
    ]
    return RewriteResult(
        training_graph=rewrite.training_graph,
        schedule=rewrite.schedule,
        graph_def=rewrite.graph_def,
        moved_ops=rewrite.moved_ops,
        added_edges=rewrite.barriers,
        plan_seconds=rewrite.plan_seconds,
        mixed=rewrite.training_graph.mixed,
        notes=tuple(notes),
    )
