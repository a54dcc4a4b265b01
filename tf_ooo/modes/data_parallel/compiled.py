"""Ordered steps of which XLA compiles each task: functions in the place of those that were traced.

TensorFlow takes no new functions from a plug-in, so a function runs op by op when it is traced.  Then it is
made once more, of the same trace, for batches of one size, as XLA has to know all sizes; batches of another
size go on as they were traced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import rustworkx as rx
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.dependencies import MERGES, NEXT_ITERATIONS
from grappler_passes.graph.flow import COMMUNICATION_PREFIXES
from grappler_passes.graph.node_input import data_inputs, split_input
from tf_ooo.compat import func_graphs, nests
from tf_ooo.errors import BackendError, GraphError, OOOError
from tf_ooo.fit import timing
from tf_ooo.hosts.ranks.base import Engine, Message
from tf_ooo.modes.data_parallel.ordering import request_to_take
from tf_ooo.report.report import Report
from tf_ooo.rewriting.compiled_calls import as_function, compile_calls
from tf_ooo.rewriting.request import in_one_line
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.tracing.flat import StepSource, Unrolled

Order = Callable[[graph_pb2.GraphDef], RewriteResult]


@dataclass(frozen=True)
class Compiled(Message):
    """Tells whether a rank has compiled its steps; ``failed`` says why not."""

    failed: str = ""


class CompiledSteps:
    """Holds what XLA compiles of ordered steps, on all ranks or on none.

    Args:
        source: of the steps.
        order: puts a graph of them in order, and makes calls of its tasks.

    Attributes:
        op_by_op: the ordered graphs of what was traced, by the number of its steps.
        result: of the most steps that were compiled.
    """

    def __init__(self, source: StepSource, order: Order, engine: Engine, report: Report) -> None:
        self._source, self._order, self._engine, self._report = source, order, engine, report
        self.op_by_op: dict[int, graph_pb2.GraphDef] = {}
        self.result: RewriteResult | None = None

    def compile(self, steps: Unrolled, batch: Any) -> bool:
        """Compile what was traced, for batches of a spec; return whether all ranks have.  All call it."""
        started, failed = time.perf_counter(), ""
        try:
            for count in self.op_by_op:
                self._compile(steps, batch, count)
        except OOOError as error:
            failed = in_one_line(error)
        told: list[Compiled] = Compiled(failed).told(self._engine)
        self._report.took(time.perf_counter() - started)
        why_not = next(
            (f"rank {rank}: {reply.failed}" for rank, reply in enumerate(told) if reply.failed), ""
        )
        if why_not:
            steps.untraced.clear()
            self._report.note(f"XLA does not compile the tasks: {why_not}", log=logging.WARNING)
        else:
            self._say_in_report()
        return not why_not

    def _compile(self, steps: Unrolled, batch: Any, count: int) -> None:
        """Put a function of so many steps in its place, unless it is there."""
        zeros = _zeros(batch, count)
        signature = nests.signature(zeros)
        if signature in steps.untraced:
            return
        with timing.said(f"compiling the tasks of {count} steps"):
            function = self._source.function(count, batch)
            concrete, graph_def = self._traced(function, zeros)
            result = self._order(graph_def)
            check_together(self.op_by_op[count], result.graph_def)
            compile_calls(result.graph_def)
            captured = [outside for outside, _ in func_graphs.captures_of(concrete)]
            steps.untraced[signature] = as_function(result.graph_def, concrete, captured)
        if self.result is None or len(result.graph_def.node) > len(self.result.graph_def.node):
            self.result = result

    def _traced(self, function: Any, zeros: list[Any]) -> tuple[Any, graph_pb2.GraphDef]:
        """Return a function's trace, and its graph as TensorFlow would run it; nothing of it runs."""
        request = request_to_take(self._source.model)
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
        return concrete, request.latest.taken

    def _say_in_report(self) -> None:
        result = self.result
        if result is None or result.compiled is None:
            return
        text = result.compiled.text
        if not nests.is_static(self._source.element_spec):
            text += "; batches of another size than the first one's: op by op"
        self._report.change(compiled_tasks=text, rewritten_graph=result.graph_def)


def _zeros(batch: Any, count: int) -> list[Any]:
    if batch is None:
        raise BackendError("this rank has no batch")
    try:
        return [nests.zeros_of(batch)] * count
    except ValueError as error:
        raise BackendError(f"a batch is no plain tensors: {error}") from error


def check_together(one: graph_pb2.GraphDef, other: graph_pb2.GraphDef) -> None:
    """GraphError where a rank that runs the one graph and a rank that runs the other cannot go together.

    They do with batches of different sizes.  Messages have to be the same, and no message of one rank may
    wait for what the other sends behind it.
    """
    messages = _messages(one)
    if messages != _messages(other):
        raise GraphError("compiled, it would send other messages")
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
        raise GraphError("compiled, its messages would wait for those of ranks that run op by op")


def _messages(graph_def: graph_pb2.GraphDef) -> Mapping[str, list[bytes]]:
    """Return what tells the messages of a graph apart: names of ops, and constants beside the data."""
    nodes = {node.name: node for node in graph_def.node}

    def constants(name: str) -> list[bytes]:
        sources = [nodes[split_input(text)[0]] for text in data_inputs(nodes[name])[1:]]
        sources += [nodes[split_input(text)[0]] for node in sources for text in data_inputs(node)]
        return [node.attr["value"].SerializeToString() for node in sources if node.op == "Const"]

    sent = (node.name for node in graph_def.node if node.op.startswith(COMMUNICATION_PREFIXES))
    return {name: constants(name) for name in sent}
