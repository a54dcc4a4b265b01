"""A micro-batch that is traced once and copied for those of as many rows: tracing is Python's, op by op."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE
from grappler_passes.compat import graph_protos, op_types
from grappler_passes.graph.node_input import split_input
from tf_ooo.compat import func_graphs
from tf_ooo.tracing.intercepting import ops_so_far

# Each of them is known to the other processes by a name or a number of its own.
_SENDS = ("Collective", "Horovod", "Nccl")
# TensorFlow gives ops of a graph seeds by their number, which stays below.
_BETWEEN_SEEDS = 10_000_019


class TracedPart:
    """The ops of a micro-batch's train step in the graph that is being traced: made from here on.

    Copies have the names that another trace would give them, so that graph optimizers, which sort by name,
    treat all micro-batches alike.  Outside stay what the function captures, and the ops ``left_out``.

    It may come in several parts, with others' ops between: :meth:`go_on`.

    Args:
        number: of the micro-batch; its scope and its mark stand in names and attributes.
        part: its rows, a nest.
        draws_anew: copies draw other random numbers, by other seeds; False: then there are none.
    """

    def __init__(self, number: int, part: object, draws_anew: bool = False) -> None:
        self._number, self.part, self._draws_anew = number, part, draws_anew
        self._nodes: dict[str, Any] = {}
        self._earlier: set[str] = set()  # of parts before
        self._versions: Any = None
        self.why_not = ""
        self.go_on()

    def go_on(self) -> None:
        """Its next part, made from here on, which reads the parts before."""
        self._earlier.update(self._nodes)
        self._nodes, self.begin = {}, ops_so_far()  # the number of its first op

    def end(self, left_out: Sequence[tuple[int, int]]) -> None:
        """Its last op was made, or that of this part.

        ``left_out``: ranges of ops, from and up to that number of the graph's, that are made anew each time.
        Sets ``why_not`` where it has to be traced again instead.
        """
        graph = tf.compat.v1.get_default_graph()
        operations = graph.get_operations()[self.begin :]
        kept_out = {self.begin + number for number, op in enumerate(operations) if op.type == "Placeholder"}
        kept_out |= {number for begin, end in left_out for number in range(begin, end)}
        captures = func_graphs.captures_so_far(graph)
        inside = {
            op.name: op
            for number, op in enumerate(operations, self.begin)
            if number not in kept_out and op.name not in captures
        }
        self.why_not = _why_not_types(graph, {op.type for op in inside.values()}, self._draws_anew)
        if self.why_not:
            return
        graph_def = graph.as_graph_def()
        self._versions = graph_def.versions
        self._nodes = {node.name: node for node in graph_def.node if node.name in inside}
        self.why_not = _why_not_nodes(self._nodes)

    def copy(self, number: int, part: object, wanted: Sequence[Any]) -> list[Any]:
        """The tensors ``wanted`` of this micro-batch, in a copy of it, or of its latest part, for other rows.

        ``part`` has the structure and the shapes of the first one's.  Tensors from outside stay themselves.
        """
        graph = tf.compat.v1.get_default_graph()
        graph_def = graph_pb2.GraphDef(versions=self._versions)
        graph_def.node.extend(self._nodes.values())
        renamed = _Renamed(self._number, number, self._nodes)
        for node in graph_def.node:
            renamed.change(node)
        inside = [tensor for tensor in wanted if tf.is_tensor(tensor) and tensor.op.name in self._nodes]
        copies = tf.graph_util.import_graph_def(
            graph_def,
            self._given(graph, part, renamed),
            [renamed.tensor(tensor.name) for tensor in inside],
            name="",
        )
        for tensor, copied in zip(inside, copies, strict=True):
            copied.set_shape(tensor.shape)  # what Python code has said of it
        by_id = {id(tensor): copied for tensor, copied in zip(inside, copies, strict=True)}
        for tensor in wanted:
            if tf.is_tensor(tensor) and tensor.op.name in self._earlier:
                by_id[id(tensor)] = graph.get_tensor_by_name(renamed.tensor(tensor.name))
        return [by_id.get(id(tensor), tensor) for tensor in wanted]

    def _given(self, graph: Any, part: Any, renamed: _Renamed) -> dict[str, Any]:
        """Return what the copied ops read of other ops: the other rows, and what all micro-batches read."""
        flat = (tf.nest.flatten(each, expand_composites=True) for each in (self.part, part))
        rows = {first.name: other for first, other in zip(*flat, strict=True) if tf.is_tensor(first)}
        given = {}
        for node in self._nodes.values():
            for text in node.input:
                name, port = split_input(text)
                if name not in self._nodes:
                    tensor = f"{name}:{port}"
                    there = renamed.tensor(tensor) if name in self._earlier else tensor
                    given[tensor] = rows[tensor] if tensor in rows else graph.get_tensor_by_name(there)
        return given


class _Renamed:
    """Nodes of one micro-batch as those of another."""

    def __init__(self, number: int, other: int, names: Collection[str]) -> None:
        self._scope = re.compile(rf"(^|[/@]){STEP_SCOPE}{number}(?=/|$)")
        self._by, self._other, self._names = rf"\g<1>{STEP_SCOPE}{other}", other, names
        self._more_seed = _BETWEEN_SEEDS * (other - number)

    def name(self, name: str) -> str:
        return self._scope.sub(self._by, name)

    def tensor(self, name: str) -> str:
        op, _, port = name.partition(":")
        return f"{self.name(op)}:{port}"

    def change(self, node: Any) -> None:
        """Names, inputs from inside, colocations, the mark, and seeds that are not drawn themselves."""
        node.name = self.name(node.name)
        if op_types.keeps_random_state(node.op) and (node.attr["seed"].i or node.attr["seed2"].i):
            node.attr["seed2"].i += self._more_seed
        for place, text in enumerate(node.input):
            name, _ = split_input(text)
            if name in self._names:
                node.input[place] = text.replace(name, self.name(name), 1)
        if STEP_ATTR in node.attr:
            node.attr[STEP_ATTR].i = self._other
        if "_class" in node.attr:
            graph_protos.keep_colocations(node, self._names.__contains__)
        if "_class" in node.attr:
            beside = node.attr["_class"].list.s
            beside[:] = [self._scope.sub(self._by, wish.decode()).encode() for wish in beside]


def _why_not_types(graph: object, own: set[str], draws_anew: bool) -> str:
    """Say why copies of these ops would not do what others traced do; empty: they would."""
    called = {kind for _, kind in func_graphs.ops_called_from(graph)}
    for kind in sorted(own | called):
        if op_types.keeps_random_state(kind) and not (draws_anew and kind not in called):
            return f"{kind} draws random numbers from a state of its own"
        if kind.startswith(_SENDS):
            return f"{kind} has a name that other processes know"
    return ""


def _why_not_nodes(nodes: Mapping[str, Any]) -> str:
    for node in nodes.values():
        if "shared_name" in node.attr and node.attr["shared_name"].s:
            return f"{node.name} has a state that is known by a name"
        if any(text[0] == "^" and text[1:] not in nodes for text in node.input):
            return f"{node.name} waits for what was made before its micro-batch"
    return ""
