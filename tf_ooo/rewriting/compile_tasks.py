"""The pass that has XLA compile the tasks of a placed step, each as one call, and its check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.errors import GraphError, VerifyError
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.node_input import data_inputs, split_input, tensor
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Note, Pass, PassResult, Relaxation
from grappler_passes.passes.verify import verify
from tf_ooo.compat import xla
from tf_ooo.rewriting import fused_ops, task_calls
from tf_ooo.rewriting.task_calls import TaskCall, TaskKey
from tf_ooo.rewriting.task_functions import COMMUTATIVE, CalledOps, Functions, Port, graph_input

PREFIX = "ooo_task"
# Calls are marked with these, as their first op is.
_MARKS = ("_ooo_kind", "_ooo_layer", "_ooo_stream", "_ooo_priority", "_ooo_stage", "_ooo_step")
COMPILED, LEFT = "compiled", "left"


@dataclass(frozen=True)
class CompileTasksPass(Pass):
    """Puts the ops of each task into a function that XLA compiles, and calls it in their place.

    The graph that comes out has a library of functions, which no plug-in of Grappler can hand to TensorFlow:
    it runs by :class:`tf_ooo.compat.func_graphs.OptimizedGraph`.

    Attributes:
        tasks: whose call each op is in, by name.
        general: names that ops of all micro-batches have in common.
    """

    tasks: Mapping[str, TaskKey]
    general: Mapping[str, str]
    name: ClassVar[str] = "compile_tasks"
    relaxes = frozenset(
        {
            Relaxation.NEW_NODES,
            Relaxation.REPLACED_NODES,
            Relaxation.FUNCTIONS,
            Relaxation.MORE_WAITS,  # who waited for an op waits for all of its call
            Relaxation.FEWER_WAITS,  # inside of a call there is no order but that of data
        }
    )

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        chosen = task_calls.choose(graph_def, self.tasks)
        functions = Functions(graph_def, chosen, self.general)
        made = {name: (call, *functions.of(call)) for name, call in _named(chosen.calls).items()}
        called = {name: ops for name, (_, _, ops) in made.items()}
        moved = _Moved(graph_def, called)
        result = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
        result.library.function.extend(functions.made.values())
        for name, (call, function, ops) in made.items():
            types = [[chosen.outputs[op][port] for op, port in ports] for ports in (ops.inputs, ops.outputs)]
            node = xla.compiled_call_node(name, function, moved.inputs_of_call(name, ops), types)
            _mark(node, graph_def.node[call.ops[0]])
            result.node.append(node)
        result.node.extend(moved.others(graph_def))
        check(graph_def, result, called)
        names = chosen.index.names
        notes = [
            Note(COMPILED, function, (name, *(names[i] for i in call.ops)))
            for name, (call, function, _) in made.items()
        ]
        left = (Note(LEFT, f"{reason}: {op}", (str(count),)) for (reason, op), count in chosen.left.items())
        return PassResult(result, bool(made), (*notes, *left), frozenset(moved.gone))


def _mark(node: node_def_pb2.NodeDef, first: node_def_pb2.NodeDef) -> None:
    """Put a call where its first op was, with that one's marks."""
    node.device = first.device
    for mark in _MARKS:
        if mark in first.attr:
            node.attr[mark].CopyFrom(first.attr[mark])


def _named(calls: Iterable[TaskCall]) -> dict[str, TaskCall]:
    """Return the calls by names that say which task's they are."""
    named: dict[str, TaskCall] = {}
    parts: Counter[TaskKey] = Counter()
    for call in calls:
        key = call.key
        layer = "" if key.layer is None else f"_layer_{key.layer}"
        name = f"{PREFIX}/{key.kind}_stage_{key.stage}{layer}_{key.microbatch}"
        parts[key] += 1
        named[name if parts[key] == 1 else f"{name}/part_{parts[key]}"] = call
    return named


class _Moved:
    """Where the ops that became calls, and their results, are now."""

    def __init__(self, graph_def: graph_pb2.GraphDef, called: Mapping[str, CalledOps]) -> None:
        self.gone: dict[str, str] = {}
        self._now: dict[Port, Port] = {}
        constants = {node.name for node in graph_def.node if node.op == "Const"}
        for name, ops in called.items():
            self.gone.update((op, name) for op in ops.inner if op not in constants)
            self._now.update((port, (name, place)) for place, port in enumerate(ops.outputs))
        kept = (node for node in graph_def.node if node.name not in self.gone)
        read = {split_input(text)[0] for node in kept for text in node.input}
        copied = {op for ops in called.values() for op in ops.inner if op in constants}
        self._unread = copied - read  # only calls read them, which have copies

    def inputs_of_call(self, name: str, ops: CalledOps) -> list[str]:
        texts = [*(tensor(*port) for port in ops.inputs), *(f"^{op}" for op in ops.controls)]
        return [text for text in self._inputs(texts) if text != f"^{name}"]

    def others(self, graph_def: graph_pb2.GraphDef) -> Iterator[node_def_pb2.NodeDef]:
        """Yield the nodes that stay, which read the calls' results."""
        for node in graph_def.node:
            if node.name in self.gone or node.name in self._unread:
                continue
            copied = node_def_pb2.NodeDef()
            copied.CopyFrom(node)
            copied.input[:] = self._inputs(node.input)
            graph_protos.keep_colocations(copied, lambda op: op not in self.gone)
            yield copied

    def _inputs(self, texts: Iterable[str]) -> list[str]:
        """Return the inputs as they are now, control inputs last and once."""
        data, controls = [], []
        for producer, port in map(split_input, texts):
            if port < 0:
                controls.append(f"^{self.gone.get(producer, producer)}")
            else:
                data.append(tensor(*self._now.get((producer, port), (producer, port))))
        return [*data, *dict.fromkeys(controls)]


def check(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, called: Mapping[str, CalledOps]) -> None:
    """Put the ops of all calls back: the graph must be the one before but for what waits for what.

    Raises VerifyError, naming an op or a call.
    """
    try:
        GraphIndex(after)
    except GraphError as error:
        raise VerifyError(error.node or "?", "acyclic", str(error)) from error
    verify(before, _PutBack(before, after, called).graph_def(), relaxes=_DIFFERING)


_DIFFERING = frozenset(
    {
        Relaxation.MORE_WAITS,
        Relaxation.FEWER_WAITS,
        Relaxation.NOTES,
        Relaxation.NEW_NODES,
        Relaxation.FUNCTIONS,
    }
)


class _PutBack:
    """The ops of a graph's calls, by the functions that it has, under the names that they had before.

    A NoOp stands before the ops of a call, for what they wait for, and one behind them.
    """

    def __init__(
        self, before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, called: Mapping[str, CalledOps]
    ) -> None:
        self._after, self._called = after, called
        self._before = {node.name: node for node in before.node}
        self._functions = {function.signature.name: function for function in after.library.function}
        self._stands_for: dict[Port, str] = {}
        self._opened: list[node_def_pb2.NodeDef] = []
        calls = {node.name: node for node in after.node if node.name in called}
        for name, ops in called.items():
            if name not in calls:
                raise VerifyError(name, "calls", "it is not in the graph")
            self._open(calls[name], ops)

    def _open(self, call: node_def_pb2.NodeDef, ops: CalledOps) -> None:
        function = self._functions[call.attr["f"].func.name]
        outer = {inner: op for op, inner in ops.inner.items()}
        given = {
            arg.name: text for arg, text in zip(function.signature.input_arg, data_inputs(call), strict=True)
        }
        body = {node.name: node for node in function.node_def}

        def outside(text: str) -> str:
            producer, port = split_input(graph_input(body, text))
            if producer in given:
                return given[producer]
            name, slash, part = producer.partition("/")
            return tensor(outer[name] + slash + part, port)

        for node in body.values():
            opened = node_def_pb2.NodeDef()
            opened.CopyFrom(node)
            opened.name = outside(node.name)
            opened.input[:] = map(outside, data_inputs(node))
            opened.device = call.device
            if node.op != "Const":
                opened.input.append(f"^{_begin(call.name)}")
            elif opened.attr["value"] != self._before[opened.name].attr["value"]:
                raise VerifyError(opened.name, "calls", f"has another value in {function.signature.name!r}")
            if node.op != "Const":
                self._opened.append(opened)
        for place, result in enumerate(function.signature.output_arg):
            self._stands_for[call.name, place] = outside(function.ret[result.name])
        waited_for = [text for text in call.input if text[0] == "^"]
        names = [op for op in ops.inner if self._before[op].op != "Const"]
        self._opened += [
            node_def_pb2.NodeDef(name=_begin(call.name), op="NoOp", input=waited_for, device=call.device),
            node_def_pb2.NodeDef(
                name=_end(call.name), op="NoOp", input=[f"^{op}" for op in names], device=call.device
            ),
        ]

    def graph_def(self) -> graph_pb2.GraphDef:
        kept = [node for node in self._after.node if node.name not in self._called]
        result = graph_pb2.GraphDef(versions=self._after.versions)
        result.node.extend(kept)
        result.node.extend(self._opened)
        for node in result.node:
            node.input[:] = map(self._source, node.input)
        return self._fused(result)

    def _source(self, text: str) -> str:
        name, port = split_input(text)
        if port < 0:
            return f"^{_end(name)}" if name in self._called else text
        while (name, port) in self._stands_for:
            name, port = split_input(self._stands_for[name, port])
        return tensor(name, port)

    def _fused(self, graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
        """Put fused ops in the place of their parts, inputs of sums in their order, and constants back."""
        there = {node.name: node for node in graph_def.node}
        result = graph_pb2.GraphDef(versions=graph_def.versions)
        parts: set[str] = set()
        for name, was in self._before.items():
            now = there.get(name)
            expected = fused_ops.parts_of(was)
            if now is None:
                result.node.extend([was] if was.op == "Const" else [])
            elif expected and now.op != was.op:
                self._check_parts(expected, there)
                parts.update(part.name for part in expected)
                fused = result.node.add()
                fused.CopyFrom(was)
                fused.device = now.device
                fused.input[:] = [*data_inputs(was), *(text for text in now.input if text[0] == "^")]
            else:
                if was.op in COMMUTATIVE and sorted(data_inputs(now)) == sorted(data_inputs(was)):
                    now.input[:2] = data_inputs(was)
                result.node.append(now)
        result.node.extend(n for n in graph_def.node if n.name not in self._before and n.name not in parts)
        return result

    def _check_parts(
        self, expected: Iterable[node_def_pb2.NodeDef], there: Mapping[str, node_def_pb2.NodeDef]
    ) -> None:
        for part in expected:
            now = there.get(part.name)
            if now is None or _said(now) != _said(part):
                raise VerifyError(part.name, "calls", "is another op inside of its call")


def _said(node: node_def_pb2.NodeDef) -> tuple[str, list[str], dict[str, object]]:
    """Return what a node computes, without marks."""
    attributes = {name: value for name, value in node.attr.items() if not name.startswith("_")}
    return node.op, data_inputs(node), attributes


def _begin(call: str) -> str:
    return f"{call}/begin"


def _end(call: str) -> str:
    return f"{call}/end"
