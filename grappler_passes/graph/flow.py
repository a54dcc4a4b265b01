"""Defines value flow: which op's output can change which op's result, loops and variables included.

This is not the order of execution (``dependencies.py``): control edges carry no value.  A variable does: a
write flows into every later read of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import rustworkx as rx
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import is_communication, split_input
from grappler_passes.compat.shape_inference import OutputInfo

CALL_OPS = frozenset(
    {"PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf",
     "Case", "StatelessCase"}
)  # fmt: skip
BACK_EDGE_OP = "NextIteration"
GROUPED_COMMUNICATION = ("HorovodGrouped",)
SPLIT_OPS = frozenset({"SplitV", "Split", "Unpack"})
PACK_OPS = frozenset({"ConcatV2", "Pack"})
# These ops may stand between packing, communicating and splitting: scaling, compression, shape.
ON_THE_WAY = frozenset({"Identity", "Reshape", "Cast", "Mul", "RealDiv"})


# A set of small numbers is kept as one int: bit i stands for i.


def several(bits: int) -> bool:
    """Return whether a set has more than one element."""
    return bool(bits & (bits - 1))


def bits_of(bits: int) -> Iterator[int]:
    """Yield the numbers in a set, smallest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def memberships(groups: Iterable[Iterable[int]]) -> dict[int, int]:
    """Return for each member the groups that it is in: bit i for the i-th group."""
    groups_of: dict[int, int] = {}
    for i, members in enumerate(groups):
        for member in members:
            groups_of[member] = groups_of.get(member, 0) | 1 << i
    return groups_of


def marks(members: Iterable[int]) -> dict[int, int]:
    """Return 1 for each member."""
    return dict.fromkeys(members, 1)


def union(sets: Iterable[int]) -> int:
    """Return the elements of all sets as one set."""
    return functools.reduce(operator.or_, sets, 0)


@dataclass(frozen=True)
class Edge:
    """Holds a data edge from output ``port`` of node ``source``; ``scalar`` if it carries a rank-0 number."""

    source: int
    port: int
    scalar: bool


@dataclass
class FlowGraph:
    """Holds a GraphDef as integer arrays.

    ``data[i]`` are the data edges into node i, gates looked through; ``raw_sources[i]`` the producers
    of its inputs as written; ``control[i]`` its control predecessors; ``outputs[i]`` dtype and shape
    of each output (empty where TensorFlow could not tell).
    """

    names: list[str]
    types: list[str]
    devices: list[str]
    data: list[list[Edge]]
    control: list[list[int]]
    outputs: list[tuple[OutputInfo, ...]]
    index: dict[str, int] = field(repr=False)
    raw_sources: list[list[int]] = field(repr=False)

    @cached_property
    def raw_targets(self) -> list[list[int]]:
        """Return the consumers of each node's outputs, as written."""
        return _targets(self.raw_sources)

    @cached_property
    def targets(self) -> list[list[int]]:
        """Return the consumers of each node's outputs, seen through gates."""
        return _targets([[edge.source for edge in edges] for edges in self.data])

    @cached_property
    def waits(self) -> list[list[int]]:
        """Return the nodes that each node waits for by data and control edges, without loops' back edges."""
        sources = ({*(e.source for e in edges), *self.control[node]} for node, edges in enumerate(self.data))
        return [[pred for pred in preds if self.types[pred] != BACK_EDGE_OP] for preds in sources]

    def __len__(self) -> int:
        return len(self.names)

    def execution_order(self) -> list[int]:
        """Return a topological order of the nodes by :attr:`waits`."""
        return list(rx.topological_sort(_digraph(len(self), self.waits)))


def _targets(sources_of: Sequence[Iterable[int]]) -> list[list[int]]:
    targets: list[list[int]] = [[] for _ in sources_of]
    for node, sources in enumerate(sources_of):
        for source in sources:
            targets[source].append(node)
    return targets


def _digraph(count: int, preds: Sequence[Iterable[int]]) -> rx.PyDiGraph:
    graph = rx.PyDiGraph()
    graph.add_nodes_from(range(count))
    graph.extend_from_edge_list([(pred, node) for node, sources in enumerate(preds) for pred in sources])
    return graph


def build_flow_graph(graph_def: graph_pb2.GraphDef, infos: dict[str, tuple[OutputInfo, ...]]) -> FlowGraph:
    """Read the nodes of a flat GraphDef; ``infos`` maps a node's name to its outputs."""
    names = [node.name for node in graph_def.node]
    index = {name: i for i, name in enumerate(names)}
    outputs = [infos.get(name, ()) for name in names]
    data: list[list[Edge]] = []
    control: list[list[int]] = []
    for node in graph_def.node:
        inputs = [(index[name], port) for name, port in map(split_input, node.input)]
        data.append([Edge(i, port, _is_scalar(outputs[i], port)) for i, port in inputs if port >= 0])
        control.append([i for i, port in inputs if port < 0])
    types = [node.op for node in graph_def.node]
    return FlowGraph(
        names,
        types,
        [node.device for node in graph_def.node],
        [[_behind_gate(edge, types, data) for edge in edges] for edges in data],
        control,
        outputs,
        index,
        [[edge.source for edge in edges] for edges in data],
    )


def _behind_gate(edge: Edge, types: list[str], data: list[list[Edge]]) -> Edge:
    """Return the tensor that an edge really carries, seen through IdentityN and grouped communications."""
    while True:
        kind = types[edge.source]
        if kind == "IdentityN" or kind.startswith(GROUPED_COMMUNICATION):
            edge = data[edge.source][edge.port]
            continue
        packed = _pack_behind_split(edge.source, types, data) if kind in SPLIT_OPS else None
        if packed is None or edge.port >= len(packed):
            return edge
        edge = packed[edge.port]


def _pack_behind_split(split: int, types: list[str], data: list[list[Edge]]) -> list[Edge] | None:
    """Return the tensors that are packed, communicated and split here; None for any other split."""
    edge, communicated = data[split][1 if types[split] == "Split" else 0], False
    while types[edge.source] not in PACK_OPS:
        communicated |= is_communication(types[edge.source])
        tensors = [e for e in data[edge.source] if not e.scalar]
        if types[edge.source] not in ON_THE_WAY and not is_communication(types[edge.source]) or not tensors:
            return None
        edge = tensors[0]
    inputs = data[edge.source]
    return (inputs[:-1] if types[edge.source] == "ConcatV2" else inputs) if communicated else None


def _is_scalar(outputs: Sequence[OutputInfo], port: int) -> bool:
    """Return whether the output is a number of rank 0; variants (tensor lists) and handles are not."""
    return port < len(outputs) and outputs[port].shape == () and outputs[port].is_number


class Propagation:
    """Pushes bit sets along value edges, once forwards or backwards; a cycle is handled as one node.

    ``preds[i]`` are the nodes whose value flows into i; ``groups`` the cycles (single nodes mostly)
    in topological order.
    """

    def __init__(self, preds: Sequence[Iterable[int]], order: Sequence[int], cyclic: bool):
        self.preds = [list(p) for p in preds]
        self.groups = self._components(order) if cyclic else [[node] for node in order]

    def _components(self, order: Sequence[int]) -> list[list[int]]:
        graph = _digraph(len(order), self.preds)
        components = [list(c) for c in rx.strongly_connected_components(graph)]
        of = {node: c for c, nodes in enumerate(components) for node in nodes}
        condensed = rx.PyDiGraph()
        condensed.add_nodes_from(range(len(components)))
        edges = {(of[p], of[n]) for n, preds in enumerate(self.preds) for p in preds if of[p] != of[n]}
        condensed.extend_from_edge_list(sorted(edges))
        return [components[c] for c in rx.topological_sort(condensed)]

    def downstream(self, seeds: dict[int, int]) -> list[int]:
        """Return for each node the OR of its seeds and of those of all nodes that flow into it."""
        bits = [0] * len(self.preds)
        for group in self.groups:
            total = 0
            for node in group:
                total |= seeds.get(node, 0)
                for pred in self.preds[node]:
                    total |= bits[pred]
            if total:
                for node in group:
                    bits[node] = total
        return bits

    def upstream(self, seeds: dict[int, int], stop: Callable[[int], bool] | None = None) -> list[int]:
        """Return for each node the OR of its seeds and of all that it flows into, up to ``stop`` nodes."""
        bits = [seeds.get(node, 0) for node in range(len(self.preds))]
        for group in reversed(self.groups):
            total = 0
            for node in group:
                total |= bits[node]
            if not total:
                continue
            for node in group:
                bits[node] = total
                if stop is None or not stop(node):
                    for pred in self.preds[node]:
                        bits[pred] |= total
        return bits

    def dominators(self, nodes: Sequence[int], entries: Collection[int]) -> list[int]:
        """Return the nodes that no edge passes by: x and y in ``x -> h -> y, x -> y``, where x is the entry.

        ``nodes`` are in a topological order; no node before the last of ``entries`` is returned.
        """
        position = {node: i for i, node in enumerate(nodes)}
        last_reader = list(range(len(nodes)))
        for i, node in enumerate(nodes):
            for pred in self.preds[node]:
                if pred in position:
                    last_reader[position[pred]] = max(i, last_reader[position[pred]])
        furthest = max((position[node] for node in entries), default=0)
        passed_by_all = []
        for i, node in enumerate(nodes):
            if furthest <= i:
                passed_by_all.append(node)
            furthest = max(furthest, last_reader[i])
        return passed_by_all
