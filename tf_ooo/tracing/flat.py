"""Traces functions to flat graphs of tensors: one or several steps, or a test or predict step."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE
from grappler_passes.compat import graph_protos, runtime
from tf_ooo.compat import func_graphs, nests, tf_functions, train_function
from tf_ooo.compat.nests import Packed

if TYPE_CHECKING:
    import keras


class FlatTrace:
    """Holds the trace of a function whose results are taken apart into their tensors.

    ``specs``: each argument's spec, which may be a nest.  ``fetches``: the results' tensors, ``node:port``,
    or a constant, because Grappler needs something to be asked for.  Raises whatever tracing raises.
    """

    def __init__(self, function: Callable[..., Any], specs: Sequence[Any], compiled: bool = False) -> None:
        packed: list[Packed] = []

        def flat(*tensors: Any) -> list[Any]:
            packed.append(Packed(nests.as_tensors(function(*tensors))))
            return packed[-1].tensors or [tf.constant(0.0)]

        self.specs = tuple(specs)
        self.concrete = tf_functions.concrete_function(flat, specs, compiled=compiled)
        self.results = packed[-1]
        self.fetches = tuple(tensor.name for tensor in self.concrete.outputs)

    def graph_def(self) -> graph_pb2.GraphDef:
        """Return the graph, whose placeholders say which variables they stand for."""
        graph_def: graph_pb2.GraphDef = runtime.graph_def_of(self.concrete)[0]
        return graph_def

    @property
    def captures(self) -> list[tuple[Any, Any]]:
        """Return pairs (tensor outside, placeholder inside); BackendError if only a call could tell."""
        return func_graphs.captures_of(self.concrete)

    @property
    def captured(self) -> dict[str, Any]:
        """Return the captured tensors by the names of their placeholders; raises as ``captures`` does."""
        return {placeholder.op.name: outside for outside, placeholder in self.captures}

    @property
    def arguments(self) -> tuple[str, ...]:
        inside = {id(placeholder) for _, placeholder in self.captures}
        return tuple(tensor.op.name for tensor in self.concrete.inputs if id(tensor) not in inside)

    def unpack(self, fetched: Sequence[Any]) -> Any:
        return self.results.unpack(fetched[: len(self.results.tensors)])


# Joins several steps in one flat function, so that no step waits for all of the step before. Between two
# calls everything is done, so that a checkpoint taken there holds every update.

_LOG = logging.getLogger("tf_ooo")
# These are entered around the first run of every function; the benchmark lifts its workers' CPU quotas there.
around_first_runs: list[Callable[[], AbstractContextManager[Any]]] = []

# With more steps a function gains little: the barrier at its end becomes a smaller part of it.
LARGEST = 16
# TensorFlow optimizes a traced graph of this many nodes in about half a minute.
_NODES = 40_000

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
Renumber = Callable[..., None]


class CopiedStep:
    """Holds a training step that is traced once and copied into other functions as often as needed.

    All names of a copy stand below one scope, as in an inlined ``tf.function``: graph optimizers sort the
    summands of a sum by name, so that any other naming would change bits.
    """

    def __init__(self, step: Callable[[Any], Any], element_spec: object) -> None:
        self._trace = FlatTrace(step, [element_spec])
        graph = self._trace.concrete.graph
        given = {tensor.op.name for tensor in graph.inputs}
        graph_def = graph.as_graph_def()
        inside = (node for node in graph_def.node if node.name not in given)
        self._graph_def = graph_protos.with_nodes(graph_def, inside)
        for node in self._graph_def.node:
            graph_protos.keep_colocations(node, lambda name: name not in given)

    @property
    def nodes(self) -> int:
        return len(self._graph_def.node)

    @property
    def may_be_copied(self) -> bool:
        """Return whether copies do the same as other traces would.

        Copies would draw the same random numbers if the step keeps these to itself, and the collectives of
        copies could not be told apart in a conditional or a loop.
        """
        called = {node.op for function in self._graph_def.library.function for node in function.node_def}
        types = called | {node.op for node in self._graph_def.node}
        collective = any(kind.startswith("Collective") for kind in called)
        return not collective and not any(map(graph_protos.keeps_random_state, types))

    def __call__(
        self,
        batch: object,
        scope: str,
        attributes: dict[str, int],
        edit: Callable[[Any], None] = lambda graph_def: None,
    ) -> Any:
        """Copy the step into the function being traced; return what the step returns.

        ``scope`` is new in that function; all nodes get ``attributes``; ``edit`` changes the GraphDef first.
        """
        graph_def = graph_protos.copy_of(self._graph_def)
        edit(graph_def)
        for node in graph_def.node:
            for key, value in attributes.items():
                node.attr[key].i = value
        copied = tf.graph_util.import_graph_def(
            graph_def, self._inputs(batch), list(self._trace.fetches), name=scope
        )
        return self._trace.unpack(copied)

    def _inputs(self, batch: object) -> dict[str, Any]:
        """Return what replaces the step's inputs: the batch, and variables as this function captures them."""
        inner = self._trace.concrete.graph
        captured = func_graphs.captured_here(self._trace.concrete)
        given = map(tf.convert_to_tensor, tf.nest.flatten(batch, expand_composites=True))
        pairs = zip(inner.inputs, [*given, *captured], strict=True)
        read = {text for node in self._graph_def.node for text in node.input}
        read |= {tensor.name.removesuffix(":0") for tensor in inner.outputs}
        return {
            tensor.name: value for tensor, value in pairs if tensor.op.name in read or tensor.name in read
        }


class StepSource:
    """Traces a train step once, for all functions made of it, if :attr:`CopiedStep.may_be_copied`.

    ``renumber``: see :meth:`tf_ooo.hosts.ranks.base.Engine.renumber`.
    """

    def __init__(
        self, model: keras.Model, wrap: Wrapper, element_spec: object, renumber: Renumber | None = None
    ) -> None:
        self.model, self.element_spec = model, element_spec
        self._wrap, self._renumber = wrap, renumber
        self._copied: CopiedStep | None = None

    def trace(self) -> CopiedStep:
        if self._copied is None:
            self._copied = CopiedStep(self._step(), self.element_spec)
        return self._copied

    @property
    def most(self) -> int:
        """Return how many steps fit in a graph that TensorFlow optimizes in bearable time."""
        return max(2, min(LARGEST, _NODES // self.trace().nodes))

    def function(self, count: int) -> Any:
        """Return a ``tf.function`` of ``count`` steps, each marked for the passes; it is not traced yet."""
        if self.trace().may_be_copied:
            return self.copies(count, self.element_spec)
        return tf_functions.plain_function(numbered_steps(self._step()), [[self.element_spec] * count])

    def copies(self, count: int, spec: object, edit: Callable[[Any], None] = lambda graph_def: None) -> Any:
        """Return :meth:`function` made of copies of the trace; ``spec`` may say more than the trace's.

        ``edit`` changes the GraphDef of each copy.
        """
        copied, renumber = self.trace(), self._renumber

        def copies(batches: Any) -> list[Any]:
            return [
                copied(batch, f"{STEP_SCOPE}{number}", {STEP_ATTR: number}, functools.partial(change, number))
                for number, batch in enumerate(batches)
            ]

        def change(number: int, graph_def: Any) -> None:
            edit(graph_def)
            if renumber is not None:
                renumber(graph_def, number=number)

        return tf_functions.plain_function(copies, [[spec] * count])

    def _step(self) -> Callable[[Any], Any]:
        return train_function.step_on_data(self.model, self._wrap(self.model.train_step))


class Unrolled:
    """Runs batches through a train step, ``steps`` in one function, and the rest one by one.

    ``tracing`` is entered around calls; functions may be traced there.

    Attributes:
        around_traces: is given the number of steps, and entered around each first run; ``traced_now`` is
            called when that run has ended.
        untraced: functions that replace traced ones, by the signature of their batches, or by the number of
            steps for other signatures.
        first_runs: counts the first runs of both kinds of function.
    """

    def __init__(
        self, source: StepSource, steps: int, tracing: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.source, self.steps = source, steps
        self._tracing = tracing
        self._functions: dict[int, Any] = {}
        self.first_s = 0.0  # the longest first run of a function
        self.around_traces: Callable[[int], AbstractContextManager[Any]] = lambda count: nullcontext()
        self.traced_now: Callable[[int], None] = lambda count: None
        self.untraced: dict[Any, Callable[[Any], Any]] = {}
        self._ran: set[int] = set()

    def __call__(self, batches: Sequence[Any]) -> Any:
        outputs, rest = None, list(batches)
        while rest:
            count = self.steps if len(rest) >= self.steps else 1
            outputs, rest = self.run(rest[:count]), rest[count:]
        return outputs

    def run(self, batches: list[Any]) -> Any:
        if len(batches) not in self._functions:
            return self._first_run(batches)
        if len(batches) in self.untraced:
            other = self.untraced.get(nests.signature(batches)) or self.untraced[len(batches)]
            self._ran.add(id(other))
            return other(batches)[-1]
        with self._tracing():
            return self.function(len(batches))(batches)[-1]

    def _first_run(self, batches: list[Any]) -> Any:
        """Run a function for the first time: TensorFlow compiles it, in seconds for each large step."""
        started = time.perf_counter()
        _LOG.info("compiling a function of %d steps", len(batches))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.around_traces(len(batches)))
            for enter in around_first_runs:
                stack.enter_context(enter())
            self.source.trace()  # the step is traced outside of a request
            stack.enter_context(self._tracing())
            logs = self.function(len(batches))(batches)[-1]
            nests.synchronize(logs)
        taken_s = time.perf_counter() - started
        self.first_s = max(self.first_s, taken_s)
        _LOG.info("compiled %d steps in %.1f s", len(batches), taken_s)
        self.traced_now(len(batches))
        return logs

    @property
    def traced(self) -> int:
        return len(self._functions)

    @property
    def first_runs(self) -> int:
        return self.traced + len(self._ran)

    def function(self, count: int) -> Any:
        if count not in self._functions:
            self._functions[count] = self.source.function(count)
        return self._functions[count]


def numbered_steps(step: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Return a function that runs ``step`` on each batch in turn, each step marked for the passes."""

    def steps(batches: Any) -> list[Any]:
        logs = []
        for number, batch in enumerate(batches):
            with func_graphs.numbered_step(number, STEP_ATTR, STEP_SCOPE):
                logs.append(step(batch))
        # All logs are returned: a step's results tell its forward pass from its backward pass.
        return logs

    return steps


def steps_together(steps_per_execution: int, most: int) -> int:
    """Return how many steps go into one function: at most ``most``, equal parts if possible."""
    if steps_per_execution <= most:
        return steps_per_execution
    parts = [count for count in range(most, most // 2, -1) if steps_per_execution % count == 0]
    return parts[0] if parts else most


class EvaluationFunctions:
    """Holds Keras' test or predict step on one batch, as functions.

    They are traced as Keras traces its own, for the spec of a dataset or for any shape, and give the same
    bits; but each batch is a call of its own, so that no two are under way at once.  ``tracing`` is entered
    around calls.  ``step`` replaces Keras' own.
    """

    def __init__(
        self,
        model: keras.Model,
        kind: train_function.Kind,
        tracing: Callable[[], AbstractContextManager[Any]],
        step: Callable[[Any], Any] | None = None,
    ) -> None:
        self._model, self._kind, self._tracing, self._step = model, kind, tracing, step
        self._functions: dict[Any, Any] = {}

    def __call__(self, batch: object, spec: object) -> Any:
        with self._tracing():
            return self._functions[_key(spec)](batch)

    def make(self, example: object, spec: object) -> None:
        """Trace, unless done already, for data of a spec; None: for the shape of ``example``.

        Raises whatever tracing raises; nothing runs.
        """
        if _key(spec) in self._functions:
            return
        step = self._step or train_function.evaluation_on_data(self._model, self._kind)
        specs = None if spec is None else [spec]
        function = tf_functions.plain_function(step, specs, any_shape=True)
        with self._tracing():
            function.get_concrete_function(*([example] if spec is None else ()))
        self._functions[_key(spec)] = function

    @property
    def traced(self) -> int:
        return sum(function.experimental_get_tracing_count() for function in self._functions.values())


def _key(spec: object) -> Any:
    return None if spec is None else nests.signature(spec)
