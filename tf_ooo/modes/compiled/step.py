"""Compiles a step with dW on side streams: traced, rewritten and compiled once for each kind of input."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from grappler_passes.compat import runtime
from tf_ooo.compat import func_graphs, nests, tf_functions, xla
from tf_ooo.compat.nests import Packed
from tf_ooo.errors import BackendError, GraphError, MemoryLimitError
from tf_ooo.fit.comparison import REWRITTEN
from tf_ooo.modes.compiled.regions import GraphDef
from tf_ooo.modes.compiled.rewrite import StepGraph, unchanged
from tf_ooo.modes.compiled.session import StreamSession, watched
from tf_ooo.tracing import traces
from tf_ooo.tracing.flat import FlatTrace

Rewriter = Callable[[GraphDef, Sequence[str], Path | None], StepGraph]
_NO_LETTERS = re.compile(r"\W+")


@dataclass(frozen=True)
class Way:
    """Represents one way to compile a step; ``flags`` are XLA's, besides those of the process."""

    rewrite: Rewriter
    name: str = REWRITTEN
    flags: tuple[str, ...] = ()


STOCK_WAY = Way(unchanged, "stock")


class StreamStep:
    """Stands in the place of ``function``, compiled by XLA; if it cannot be rewritten, ``stock`` runs.

    The function reads and writes variables that exist already.
    """

    def __init__(
        self, function: Callable[..., Any], stock: Callable[..., Any], session: StreamSession, way: Way
    ) -> None:
        self.function, self.stock, self.session, self.way = function, stock, session, way
        self._made: dict[Any, CompiledStep | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self.compiled(args, kwargs)
        if compiled is None:
            return self.stock(*args, **kwargs)
        if compiled.has_run:
            return compiled(args, kwargs)
        try:
            with watched(self.way.flags) as watch:
                outputs = compiled(args, kwargs)
        # XLA compiles in the first call, before anything has changed.
        except tf.errors.OpError as error:
            self.session.fail(error, self.way.name)
            self._made[compiled.signature] = None
            return self.stock(*args, **kwargs)
        self.session.came_out(self.way.name, compiled.key, watch.module)
        return outputs

    def compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledStep | None:
        """Return the rewritten step for such inputs; None if there is none, for a reason the session knows.

        Raises MemoryLimitError: neither this step nor the stock step stays within the limit.
        """
        key = nests.signature((args, kwargs))
        if key not in self._made:
            try:
                compiled = CompiledStep(self, args, kwargs)
                self._check_memory(compiled, args, kwargs)
                self._made[key] = compiled
            except MemoryLimitError:
                raise
            except Exception as error:
                self.session.fail(error, self.way.name)
                self._made[key] = None
        return self._made[key]

    def _check_memory(self, compiled: CompiledStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile the step without running it, and the stock step for comparison."""
        key, session = compiled.signature, self.session
        limit_bytes = session.options.memory_limit_bytes
        if limit_bytes is None:
            return
        needed = compiled.needed_bytes(self.way.flags)
        stock = session.stock_bytes.get(key)
        if stock is None:
            stock_step = StreamStep(self.function, self.stock, session, STOCK_WAY)
            session.stock_bytes[key] = stock = CompiledStep(stock_step, args, kwargs).needed_bytes()
        if needed <= limit_bytes:
            return
        if stock > limit_bytes:
            session.least_bytes[key] = least = min(needed, stock, session.least_bytes.get(key, needed))
            raise MemoryLimitError(limit_bytes, least)
        raise BackendError(
            f"{self.way.name}: the compiled step needs {needed} bytes, above memory_limit_bytes="
            f"{limit_bytes}; the stock step needs {stock}"
        )

    def experimental_get_tracing_count(self) -> int:
        """Return the number of kinds of inputs that it was made for, as a tf.function counts traces."""
        return len(self._made)


class CompiledStep:
    """Represents a rewritten step for inputs of fixed shapes.

    Raises (when made): GraphError if shapes are open, the step is no training step, or none of its dW can be
    moved; also whatever tracing and lowering to HLO raise.
    """

    def __init__(self, step: StreamStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs, self.signature = Packed((args, kwargs)), nests.signature((args, kwargs))
        specs = self.inputs.specs
        if open_shapes := [spec for spec in specs if not spec.shape.is_fully_defined()]:
            raise GraphError(f"an input of open shape, {open_shapes[0]}: streams need fixed sizes")
        self._trace = _traced(step, self.inputs, self.signature)
        graph_def = self._trace.graph_def()
        if step.session.options.may_fall_back and (draws := traces.random_state_in(graph_def)):
            raise GraphError(f"{draws}, {traces.NOT_SHARED}")
        dump_dir = step.session.options.dump_dir  # each way has its own folder
        folder = None if dump_dir is None else Path(dump_dir) / _NO_LETTERS.sub("_", step.way.name)
        self.step_graph = step.way.rewrite(graph_def, self._trace.fetches, folder)
        self.key = (self.signature, self.step_graph.key, step.way.flags)
        if self.key not in step.session.compiled:
            run = tf_functions.plain_function(self._body(), specs, compiled=True)
            calls = len(self.step_graph.calls)
            kept = len(xla.stream_calls(xla.hlo_of(run, specs))) if calls else 0
            if kept < calls:  # each has to come through to HLO with its stream
                raise GraphError(f"XLA kept {kept} of {calls} calls on streams; this version cannot be used")
            step.session.compiled[self.key] = run
        self._run = step.session.compiled[self.key]
        self.has_run = False
        step.session.has_step = True
        if self.step_graph.result is not None:
            step.session.add(self.step_graph.result, step.way.name)

    def _body(self) -> Callable[..., list[Any]]:
        graph_def, fetches = self.step_graph.graph_def, self.step_graph.fetches
        arguments, captured = self._trace.arguments, self._trace.captured
        runtime.register_functions(graph_def)
        body = func_graphs.without_placeholders(graph_def)

        def run(*tensors: Any) -> list[Any]:
            given = dict(zip(arguments, tensors, strict=True)) | captured
            named = {f"{name}:0": tensor for name, tensor in given.items()}
            return func_graphs.import_here(body, named, fetches)

        return run

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = self._run(*self.inputs.tensors_of((args, kwargs)))
        self.has_run = True
        return self._trace.unpack(outputs)

    def hlo(self, stage: str = "hlo") -> str:
        """Return the text of the step before (``hlo``) or after (``optimized_hlo``) XLA's passes."""
        return xla.hlo_of(self._run, self.inputs.specs, stage)

    def needed_bytes(self, flags: tuple[str, ...] = ()) -> int:
        """Return the bytes of all its buffers, compiled but not run. BackendError: XLA cannot be asked."""
        with watched(flags) as watch:
            self.hlo("optimized_hlo")
        if watch.module is None or watch.module.total_bytes is None:
            raise BackendError("memory_limit_bytes cannot be kept: XLA does not say what the step needs")
        return watch.module.total_bytes


def _traced(step: StreamStep, inputs: Packed, key: Hashable) -> FlatTrace:
    """Return the trace that all ways of compiling a step share; if it failed once, it fails for all."""
    known = step.session.traced
    if key not in known:

        def flat(*tensors: Any) -> Any:
            args, kwargs = inputs.unpack(tensors)
            return step.function(*args, **kwargs)

        try:
            known[key] = FlatTrace(flat, inputs.specs, compiled=True)
        except Exception as error:
            known[key] = error
    trace = known[key]
    if isinstance(trace, Exception):
        raise trace.with_traceback(None)
    return trace
