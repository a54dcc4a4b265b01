"""Orders steps in which XLA compiles each task: new functions replace those that were traced.

TensorFlow takes no new functions from a plug-in, so a function runs op by op when it is traced.  Then it is
made once more from the same trace, for batches of one size, as XLA has to know all sizes.  Batches of other
sizes run op by op, except for updates, which have to round alike on all ranks, whatever their batches.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import rustworkx as rx
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.analysis.steps import STEP_ATTR
from grappler_passes.compat.graph_protos import data_inputs, is_communication, split_input
from grappler_passes.graph.dependencies import MERGES, NEXT_ITERATIONS, has_side_effects, only_reads
from tf_ooo.compat import func_graphs, nests, xla
from tf_ooo.errors import BackendError, GraphError, OOOError
from tf_ooo.fit import timing
from tf_ooo.hosts.ranks.base import Engine, Message
from tf_ooo.modes.data_parallel.ordering import request_to_take
from tf_ooo.report.report import Report
from tf_ooo.rewriting.compile_tasks import CompileTasksPass
from tf_ooo.rewriting.compiled_calls import as_compiled
from tf_ooo.rewriting.request import in_one_line
from tf_ooo.rewriting.result import CompiledTasks, RewriteResult, as_function
from tf_ooo.rewriting.step_graph import general_names
from tf_ooo.tracing.flat import StepSource, Unrolled

_KINDS = frozenset({"F", "dO", "dW", "U"})
_OTHER_SIZES = "; of batches of another size than the first one's only updates"
_GUARD = "tf_ooo_guard"
Order = Callable[[graph_pb2.GraphDef], RewriteResult]


@dataclass(frozen=True)
class Compiled(Message):
    """Tells whether a rank has compiled its steps, and which functions its updates are.

    ``failed`` says why it has not; ``updates`` is the same on ranks whose updates round alike.
    """

    failed: str = ""
    updates: str = ""


@dataclass(frozen=True)
class _Called:
    """Holds steps with calls, as a function, and the graphs behind them."""

    function: Callable[[Any], Any]
    result: RewriteResult
    compiled: CompiledTasks

    @property
    def updates(self) -> dict[str, str]:
        """Return the function of each call of an update."""
        calls = (node for node in self.result.graph_def.node if func_graphs.COMPILED in node.attr)
        return {n.name: n.attr["f"].func.name for n in calls if n.attr["_ooo_kind"].s == b"U"}


class CompiledSteps:
    """Holds the functions that XLA compiles from ordered steps, on all ranks or on none.

    Args:
        source: where steps come from.
        order: puts a graph of them in order.

    Attributes:
        traced: the ordered graphs of traced functions, by their number of steps.
    """

    def __init__(self, source: StepSource, order: Order, engine: Engine, report: Report) -> None:
        self._source, self._order, self._engine, self._report = source, order, engine, report
        self.traced: dict[int, RewriteResult] = {}
        self._kinds, self._called = _KINDS, dict[Any, _Called]()

    def compile(self, steps: Unrolled, batch: Any) -> bool:
        """Compile the traced steps for batches of a spec; return whether all ranks have.  All call it."""
        started = time.perf_counter()
        told: list[Compiled] = self._compiled(steps, batch).told(self._engine)
        # No update is compiled where the updates of one rank would round otherwise.
        if len({reply.updates for reply in told}) > 1 and not any(reply.failed for reply in told):
            self._kinds = self._kinds - {"U"}
            self._called.clear()
            told = self._compiled(steps, batch).told(self._engine)
        self._report.took(time.perf_counter() - started)
        why_not = next(
            (f"rank {rank}: {reply.failed}" for rank, reply in enumerate(told) if reply.failed), ""
        )
        steps.untraced.clear()
        if why_not:
            self._report.note(f"XLA does not compile the tasks: {why_not}", log=logging.WARNING)
        else:
            steps.untraced.update((key, called.function) for key, called in self._called.items())
            self._say_in_report()
        return not why_not

    def _compiled(self, steps: Unrolled, batch: Any) -> Compiled:
        updates: list[Any] = []
        try:
            for count in self.traced:
                of_count = [called.updates for called in self._of_count(steps, batch, count)]
                alike = all(each == of_count[0] for each in of_count)
                updates.append(sorted(of_count[0].items()) if alike else self._engine.rank)
        except OOOError as error:
            return Compiled(in_one_line(error))
        return Compiled(updates=hashlib.sha256(repr(updates).encode()).hexdigest())

    def _of_count(self, steps: Unrolled, batch: Any, count: int) -> list[_Called]:
        """Return the functions for so many steps, first the one for any batch size; make missing ones."""
        zeros, static = _zeros(batch, count), nests.is_static(self._source.element_spec)
        signature = nests.signature(zeros)
        with timing.said(f"compiling the tasks of {count} steps"):
            if count not in self._called:
                concrete = steps.function(count).get_concrete_function()
                kinds = self._kinds if static else self._kinds & {"U"}
                self._called[count] = _called(concrete, self.traced[count], kinds, count)
            if signature not in self._called and not static:
                concrete, graph_def = self._traced(count, batch, zeros)
                called = _called(concrete, self._order(graph_def), self._kinds, count)
                check_together(self._called[count].result.graph_def, called.result.graph_def)
                self._called[signature] = called
        keys = [count] if static else [count, signature]
        return [self._called[key] for key in keys]

    def _traced(self, count: int, batch: Any, zeros: list[Any]) -> tuple[Any, graph_pb2.GraphDef]:
        """Return a trace for batches of a spec, and its graph as TensorFlow would run it; nothing runs."""
        if not self._source.trace().may_be_copied:
            raise GraphError("the step keeps random numbers, or messages in a loop, to itself")
        request = request_to_take(self._source.model)
        function = self._source.copies(count, batch, _guard)
        try:
            with request.tracing():
                concrete = function.get_concrete_function()
                nests.synchronize(function(zeros))
        except (tf.errors.OpError, ValueError, TypeError) as error:
            raise GraphError(f"the step cannot be traced for one size of batches: {error}") from error
        finally:
            request.close()
        if request.latest is None:
            raise GraphError(request.failure() or "")
        return concrete, _unguarded(request.latest.taken)

    def _say_in_report(self) -> None:
        largest = max(self._called.values(), key=lambda called: len(called.compiled.calls))
        others = "" if nests.is_static(self._source.element_spec) else _OTHER_SIZES
        text = f"{largest.compiled.text}{others}"
        self._report.change(compiled_tasks=text, rewritten_graph=largest.result.graph_def)


def _called(concrete: Any, ordered: RewriteResult, kinds: Collection[str], count: int) -> _Called:
    """Have XLA compile the tasks of these kinds in ordered steps; return the functions that run them."""
    tasks = {name: key for name, key in ordered.tasks.items() if key.kind in kinds}
    general = general_names((node.name for node in ordered.graph_def.node), count)

    def made(refused: Set[str]) -> RewriteResult:
        done = CompileTasksPass(tasks, general, refused)(ordered.graph_def)
        return replace(ordered, graph_def=done.graph_def, compiled=CompiledTasks.of(done.notes))

    result = as_compiled(made)
    assert result.compiled is not None
    captured = [outside for outside, _ in func_graphs.captures_of(concrete)]
    function = as_function(result.graph_def, concrete, captured)
    return _Called(function, result, result.compiled)


def _guard(graph_def: graph_pb2.GraphDef) -> None:
    """Have all ops with side effects wait for one that fails.

    Otherwise TensorFlow would run the step on zeros if its own graph optimizers fail, without handing a graph
    over.
    """
    condition = xla.constant_node(f"{_GUARD}/never", np.array(False))
    opaque = node_def_pb2.NodeDef(
        name=f"{_GUARD}/condition", op="PlaceholderWithDefault", input=[condition.name]
    )
    opaque.attr["dtype"].type = condition.attr["dtype"].type
    opaque.attr["shape"].shape.SetInParent()
    fails = node_def_pb2.NodeDef(name=_GUARD, op="Assert", input=[opaque.name, opaque.name])
    fails.attr["T"].list.type.append(condition.attr["dtype"].type)
    for node in graph_def.node:
        if has_side_effects(node.op) and not only_reads(node.op):
            node.input.append(f"^{_GUARD}")
    graph_def.node.extend([condition, opaque, fails])


def _unguarded(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return the graph with guards that let everything pass."""
    for node in graph_def.node:
        if node.op == "Assert" and node.name.rpartition("/")[2] == _GUARD:
            passes = node_def_pb2.NodeDef(name=node.name, op="NoOp", device=node.device)
            passes.attr[STEP_ATTR].CopyFrom(node.attr[STEP_ATTR])
            node.CopyFrom(passes)
    return graph_def


def _zeros(batch: Any, count: int) -> list[Any]:
    if batch is None:
        raise BackendError("this rank has no batch")
    try:
        return [nests.zeros_of(batch)] * count
    except ValueError as error:
        raise BackendError(f"a batch is no plain tensors: {error}") from error


def check_together(one: graph_pb2.GraphDef, other: graph_pb2.GraphDef) -> None:
    """Raise GraphError if a rank that runs one graph and a rank that runs the other cannot work together.

    Batches of different sizes are allowed.  Messages have to be the same, and no message of one rank may wait
    for a message that the other sends after it.
    """
    messages, others = _messages(one), _messages(other)
    different = sorted(n for n in messages.keys() | others.keys() if messages.get(n) != others.get(n))
    if different:
        raise GraphError(f"of batches of one size alone it would send other messages, such as {different[0]}")
    dag: rx.PyDiGraph = rx.PyDiGraph(multigraph=False)
    places: dict[Any, int] = {}
    for number, graph_def in enumerate((one, other)):
        ops = {node.name: node.op for node in graph_def.node}

        def place(name: str, number: int = number) -> int:
            key = name if name in messages else (number, name)
            if key not in places:
                places[key] = dag.add_node(key)
            return places[key]

        for node in graph_def.node:
            for producer, _ in map(split_input, node.input):
                if not (node.op in MERGES and ops[producer] in NEXT_ITERATIONS):
                    dag.add_edge(place(producer), place(node.name), None)
    if not rx.is_directed_acyclic_graph(dag):
        raise GraphError("its messages would wait for those of ranks with batches of other sizes")


def _messages(graph_def: graph_pb2.GraphDef) -> Mapping[str, list[bytes]]:
    """Return what identifies the messages of a graph: names of ops, and constants besides the data."""
    nodes = {node.name: node for node in graph_def.node}

    def constants(name: str) -> list[bytes]:
        sources = [nodes[split_input(text)[0]] for text in data_inputs(nodes[name])[1:]]
        sources += [nodes[split_input(text)[0]] for node in sources for text in data_inputs(node)]
        return [node.attr["value"].SerializeToString() for node in sources if node.op == "Const"]

    sent = (node.name for node in graph_def.node if is_communication(node.op))
    return {name: constants(name) for name in sent}
