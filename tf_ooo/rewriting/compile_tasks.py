"""Defines the pass that lets XLA compile each task of a placed step as one call, and checks the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from grappler_passes import blocks
from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import control_inputs, data_inputs, split_input, tensor
from grappler_passes.compat.shape_inference import infer_some_outputs
from grappler_passes.errors import GraphError, VerifyError
from grappler_passes.graph.dependencies import (
    ENTERS,
    SWITCHES,
    Context,
    GraphIndex,
    conflicts,
    has_side_effects,
)
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Note, Pass, PassResult, Relaxation
from tf_ooo.compat import func_graphs, xla_calls
from tf_ooo.rewriting import task_calls
from tf_ooo.rewriting.task_calls import REFUSED, Chosen, TaskCall, TaskKey
from tf_ooo.rewriting.task_copies import divided_means, own_copies
from tf_ooo.rewriting.task_functions import COMMUTATIVE, CalledOps, Functions, Port, computed

PREFIX = "ooo_task"
# A call gets these attributes from its first op.
_MARKS = ("_ooo_kind", "_ooo_layer", "_ooo_stream", "_ooo_priority", "_ooo_stage", "_ooo_step")
# A tensor is the name of the node that computes it, and its port.
Tensor = tuple[str, int]
COMPILED, LEFT = "compiled", "left"


@dataclass(frozen=True)
class CompileTasksPass(Pass):
    """Puts the ops of each task into a function that XLA compiles, and a call in their place.

    The resulting graph has a library of functions, which no Grappler plug-in can hand to TensorFlow:
    :class:`tf_ooo.compat.func_graphs.OptimizedGraph` runs it.

    Attributes:
        tasks: the task in whose call each op is, by the op's name.
        general: names that ops of all micro-batches have in common.
        refused: ops that stay as they are, because XLA could not compile the calls with them.
    """

    tasks: Mapping[str, TaskKey]
    general: Mapping[str, str]
    refused: Set[str] = frozenset()
    name: ClassVar[str] = "compile_tasks"
    relaxes = frozenset(
        {
            Relaxation.NEW_NODES,
            Relaxation.REPLACED_NODES,
            Relaxation.SIDE_EFFECTS,  # updates read what a call returns
            Relaxation.FUNCTIONS,
            Relaxation.MORE_WAITS,  # what waited for an op waits for its whole call
            Relaxation.FEWER_WAITS,  # in a call only data give an order
        }
    )

    @blocks.collector_paused()
    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        outputs = infer_some_outputs(graph_def)
        tasks = {name: key for name, key in self.tasks.items() if name not in self.refused}
        general = dict(self.general)
        inside = _in_loops(graph_def)
        outside = {name: key for name, key in tasks.items() if name not in inside}
        divided, sums = divided_means(graph_def, outside, outputs)
        for total, mean in sums.items():
            outside[total] = tasks[mean]
            general[total] = general.get(mean, mean) + total.removeprefix(mean)
        own = own_copies(divided, outside, general, outputs)
        chosen = task_calls.choose(own.graph_def, {**tasks, **own.tasks}, own.general, outputs)
        result, called = with_calls(own.graph_def, chosen, own.general)
        check(chosen, result, called)
        functions = {node.name: node.attr["f"].func.name for node in result.node if node.name in called}
        names, new = chosen.index.names, own.copies.keys() | sums.keys()
        notes = [
            Note(
                COMPILED,
                functions[call],
                (call, *(names[i] for i in ops.inner if i not in chosen.copied and names[i] not in new)),
            )
            for call, ops in called.items()
        ]
        refused = Counter(
            (REFUSED, n.op) for n in graph_def.node if n.name in self.refused and n.name in self.tasks
        )
        left = (
            Note(LEFT, f"{reason}: {op}", (str(count),))
            for (reason, op), count in {**chosen.left, **refused}.items()
        )
        moved = _Moved(chosen, called)
        return PassResult(result, bool(called), (*notes, *left), moved.replaced())


def with_calls(
    graph_def: graph_pb2.GraphDef, chosen: Chosen, general: Mapping[str, str]
) -> tuple[graph_pb2.GraphDef, dict[str, CalledOps]]:
    """Return the graph with calls in place of the ops, and the ops of each call by its name."""
    functions = Functions(chosen, general)
    made = {name: (call, *functions.of(call)) for name, call in _named(chosen.calls).items()}
    called = {name: ops for name, (_, _, ops) in made.items()}
    moved = _Moved(chosen, called)
    result = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
    result.library.function.extend(functions.made.values())
    for name, (call, function, ops) in made.items():
        shapes = [chosen.outputs[chosen.index.names[i]][port].shape or () for i, port in ops.inputs]
        node = xla_calls.call_node(name, function, moved.inputs(ops.inputs, ops.controls), shapes)
        _mark(node, call, chosen.nodes[call.ops[0]])
        result.node.append(node)
    result.node.extend(moved.others())
    return result, called


def _in_loops(graph_def: graph_pb2.GraphDef) -> set[str]:
    """Return the names of ops within loops and branches, which stay outside of calls."""
    if not any(node.op in ENTERS or node.op in SWITCHES for node in graph_def.node):
        return set()
    index = GraphIndex(graph_def)
    return {name for name, context in zip(index.names, index.contexts, strict=True) if context != Context()}


def _mark(node: node_def_pb2.NodeDef, call: TaskCall, first: node_def_pb2.NodeDef) -> None:
    """Put a call where its first op was, with that op's marks; the kind is the call's own."""
    node.device = first.device
    for mark in _MARKS:
        if mark in first.attr:
            node.attr[mark].CopyFrom(first.attr[mark])
    if "_ooo_kind" in node.attr:
        node.attr["_ooo_kind"].s = call.key.kind.encode()


def _named(calls: Iterable[TaskCall]) -> dict[str, TaskCall]:
    """Return the calls by names that say whose task each is."""
    named: dict[str, TaskCall] = {}
    parts: Counter[TaskKey] = Counter()
    for call in calls:
        key = call.key
        name = f"{PREFIX}/{key.of_all}_{key.microbatch}"
        parts[key] += 1
        named[name if parts[key] == 1 else f"{name}/part_{parts[key]}"] = call
    return named


class _Moved:
    """Finds the ops that became calls, and where their results now are."""

    def __init__(self, chosen: Chosen, called: Mapping[str, CalledOps]) -> None:
        self._nodes, self._index = chosen.nodes, chosen.index
        self._call_of = {i: name for name, ops in called.items() for i in ops.inner if i not in chosen.copied}
        self._now = {
            port: tensor(name, place)
            for name, ops in called.items()
            for place, port in enumerate(ops.outputs)
        }
        copied = {i for ops in called.values() for i in ops.inner if i in chosen.copied}
        # Only calls read these, and they have copies.
        unread = (i for i in copied if self._call_of.keys() >= set(self._index.succs[i]))
        self._gone = self._call_of.keys() | set(unread)

    def replaced(self) -> frozenset[str]:
        """Return the names of removed nodes and of nodes that read a call's result instead."""
        readers = (reader for i, _ in self._now for reader in self._index.succs[i])
        return frozenset(self._index.names[i] for i in {*self._gone, *readers})

    def others(self) -> Iterator[node_def_pb2.NodeDef]:
        """Yield the remaining nodes, which read the calls' results."""
        names = {self._index.names[i] for i in self._gone}
        for i, node in enumerate(self._nodes):
            if i in self._gone:
                continue
            copied = node_def_pb2.NodeDef()
            copied.CopyFrom(node)
            if i not in self._index.back_preds:  # no call is in a loop
                copied.input[:] = self.inputs(self._index.data_preds[i], self._index.control_preds[i])
            graph_protos.keep_colocations(copied, lambda name: name not in names)
            yield copied

    def inputs(self, data: Iterable[Port], controls: Iterable[int]) -> list[str]:
        """Return a node's inputs in the new graph, each control input once."""
        names = self._index.names
        read = [self._now.get((i, port)) or tensor(names[i], port) for i, port in data]
        return [*read, *dict.fromkeys(f"^{self._call_of.get(i) or names[i]}" for i in controls)]


def check(chosen: Chosen, after: graph_pb2.GraphDef, called: Mapping[str, CalledOps]) -> None:
    """Raise VerifyError, naming an op or a call, if the graph with calls differs from the one without.

    Each op must be there once, by itself or in a call, on its device; it must compute the same from the same
    inputs, and wait for what it waited for, or for the call with it. Nothing else may be there, no cycle, and
    ops with side effects must run in their order.
    """
    try:
        index = GraphIndex(after)
    except GraphError as error:
        raise VerifyError(error.node or "?", "structure", str(error)) from error
    _Comparison(chosen, after, called).compare()
    for first, then in conflicts(chosen.index):
        earlier, later = chosen.index.names[first], chosen.index.names[then]
        if not index.implied(earlier, later):
            raise VerifyError(later, "side effects", f"no longer runs after {earlier!r}")


class _Body:
    """Holds the ops of a function, the tensors they read, and the tensors it returns."""

    def __init__(self, function: function_pb2.FunctionDef) -> None:
        ports, signature = func_graphs.ports_of(function), function.signature
        self.arguments = [argument.name for argument in signature.input_arg]
        self.computed = {node.name: computed(node) for node in function.node_def}
        self.reads = {
            node.name: [ports.get(text, (text, -1)) for text in node.input] for node in function.node_def
        }
        results = [function.ret[result.name] for result in signature.output_arg]
        self.results = [ports.get(text, (text, -1)) for text in results]


class _Comparison:
    """Compares a graph with calls with the one without."""

    def __init__(self, chosen: Chosen, after: graph_pb2.GraphDef, called: Mapping[str, CalledOps]) -> None:
        self._index, self._nodes, self._constants = chosen.index, chosen.nodes, chosen.copied
        self._called = {
            name: [i for i in ops.inner if i not in chosen.copied] for name, ops in called.items()
        }
        self._call_of = {i: name for name, own in self._called.items() for i in own}
        self._now = {node.name: node for node in after.node}
        self._bodies = {function.signature.name: _Body(function) for function in after.library.function}
        self._results: dict[Tensor, Tensor] = {}
        self._inner = {name: self._opened(name, ops) for name, ops in called.items()}

    def compare(self) -> None:
        """Raise VerifyError if they differ."""
        for name, inner in self._inner.items():
            self._compare_call(name, inner)
        copied = {
            node.name for inner in self._inner.values() for node in inner.values() if node.op == "Const"
        }
        for i, was in enumerate(self._nodes):
            now = self._now.get(was.name)
            if (now is None) != (i in self._call_of) and not (now is None and was.name in copied):
                raise VerifyError(was.name, "kept", "is not there once, in a call or by itself")
            if now is not None:
                _compare(was, computed(now), self._sources(now))
                self._compare_place(now, [i], self._index.control_preds[i])
        if new := self._now.keys() - self._index.index.keys() - self._called.keys():
            raise VerifyError(min(new), "new nodes", "it is no call")

    def _opened(self, name: str, ops: CalledOps) -> dict[str, node_def_pb2.NodeDef]:
        """Return the ops that have to stand in a call, by their names inside; note what its results are."""
        body, inner = self._body(name), {}
        for i, name_inside in ops.inner.items():
            node = self._nodes[i]
            if has_side_effects(node.op) or self._index.contexts[i] != Context():
                raise VerifyError(node.name, "calls", f"a {node.op} may not be in a call, or not where it is")
            for part in task_calls.parts_of(node) or [node]:
                inner[name_inside + part.name.removeprefix(node.name)] = part
        if inner.keys() != body.computed.keys():
            raise VerifyError(name, "calls", "other ops are in its function")
        for place, (op, port) in enumerate(body.results):
            self._results[name, place] = inner[op].name if op in inner else op, port
        return inner

    def _body(self, name: str) -> _Body:
        function = self._now[name].attr["f"].func.name if name in self._now else ""
        if function not in self._bodies:
            raise VerifyError(name, "calls", "it, or its function, is not in the graph")
        return self._bodies[function]

    def _compare_call(self, name: str, inner: Mapping[str, node_def_pb2.NodeDef]) -> None:
        call, body, own = self._now[name], self._body(name), self._called[name]
        given = dict(zip(body.arguments, self._sources(call), strict=False))

        def outside(op: str, port: int) -> Tensor:
            return given.get(op) or (inner[op].name if op in inner else op, port)

        for op, was in inner.items():
            _compare(was, body.computed[op], [outside(*port) for port in body.reads[op]])
        waits = {p for i in own for p in self._index.control_preds[i]} - self._constants
        self._compare_place(call, own, waits)

    def _compare_place(self, now: node_def_pb2.NodeDef, ops: Sequence[int], waits: Iterable[int]) -> None:
        for i in ops:
            if now.device != self._nodes[i].device:
                raise VerifyError(self._nodes[i].name, "devices", f"is on {now.device!r}")
        expected = {self._call_of.get(i) or self._index.names[i] for i in waits} - {now.name}
        if differing := expected ^ {split_input(text)[0] for text in control_inputs(now)}:
            raise VerifyError(now.name, "waits", f"{min(differing)!r} is waited for in one graph only")

    def _sources(self, node: node_def_pb2.NodeDef) -> list[Tensor]:
        """Return the tensors that a node reads, by their names in the graph without calls."""
        ports = map(split_input, data_inputs(node))
        return [self._results.get(port, port) for port in ports]


def _compare(was: node_def_pb2.NodeDef, now: node_def_pb2.NodeDef, read: list[Tensor]) -> None:
    """Compare what an op computes (``now`` holds only that) and what it reads."""
    if now != computed(was):
        raise VerifyError(was.name, "attributes", f"was a {was.op}, is another {now.op}")
    expected = list(map(split_input, data_inputs(was)))
    if read != expected and not (was.op in COMMUTATIVE and sorted(read) == sorted(expected)):
        raise VerifyError(was.name, "data inputs", f"read {expected}, reads {read}")
