"""Says as plain data what to do to a graph (a schedule lowers to it), and holds the passes that do it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import rustworkx as rx

from grappler_passes.errors import GraphError, PlanError
from grappler_passes.graph.dependencies import GraphIndex, places_in
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import GraphEditor, Note, Pass, PassResult, Relaxation, copy_of

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2


@dataclass(frozen=True)
class RewritePlan:
    """Holds control edges, attributes and devices to give to named nodes.

    ``edges`` are ``(before, after)`` pairs: ``before`` must have run when ``after`` starts. ``kinds`` maps a
    node to F, dO, dW, U, comm or other; in ``streams`` 0 is the main stream, 1 the sub stream; in
    ``priorities`` lower is more urgent; ``stages`` are pipeline stages; ``joins`` are ops to add that do
    nothing, with their devices, for edges to lead through. The mappings are copied and read-only; iteration
    keeps the order given.
    """

    edges: tuple[tuple[str, str], ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    priorities: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)
    joins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self)[1:]:
            object.__setattr__(self, item.name, MappingProxyType(dict(getattr(self, item.name))))

    @property
    def annotated_nodes(self) -> set[str]:
        return {*self.kinds, *self.layers, *self.streams, *self.priorities, *self.stages}


def require_nodes(graph_def: graph_pb2.GraphDef, names: Iterable[str], done: str) -> None:
    """Raise PlanError for a node of the plan that the graph lacks; ``done`` says what the plan does to it."""
    there = {node.name for node in graph_def.node}
    if (unknown := next((name for name in names if name not in there), None)) is not None:
        raise PlanError(
            f"the plan {done} {unknown!r}, which the graph does not have: it is another graph's plan"
        )


_FULL_NAME = re.compile(r"/job:[A-Za-z][\w.-]*/replica:\d+/task:\d+/device:[A-Z][\w]*:\d+")


@dataclass(frozen=True)
class PlacementPass(Pass):
    """Sets the device of each node in ``plan.devices``; full names, all of which must be ``available``.

    TensorFlow ends the process when a graph names a device that does not exist.
    """

    plan: RewritePlan
    available: tuple[str, ...]
    name: ClassVar[str] = "placement"
    relaxes = frozenset({Relaxation.DEVICES})

    def preconditions(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> None:
        require_nodes(graph_def, self.plan.devices, "places")
        for device in sorted(set(self.plan.devices.values())):
            if not _FULL_NAME.fullmatch(device):
                raise PlanError(f"not a full device name: {device!r}")
            if device not in self.available:
                raise PlanError(f"no device {device!r}; there are {', '.join(self.available) or 'none'}")

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        after = copy_of(graph_def)
        modified = False
        for node in after.node:
            device = self.plan.devices.get(node.name, node.device)
            if device != node.device:
                node.device, modified = device, True
        return PassResult(after, modified)


@dataclass(frozen=True)
class JoinsPass(Pass):
    """Adds a NoOp for each of ``plan.joins`` on its device; the order pass adds its edges."""

    plan: RewritePlan
    name: ClassVar[str] = "joins"
    relaxes = frozenset({Relaxation.NEW_NODES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        editor = GraphEditor(graph_def)
        for name, device in self.plan.joins.items():
            if name not in editor.nodes:
                editor.add(name, "NoOp", (), device)
        return PassResult(editor.graph_def, editor.modified)


CLOSES_A_CYCLE = "closes a cycle with edges that come earlier in the plan"
# A pair holds the indices of the nodes before and after.
Pair = tuple[int, int]


@dataclass(frozen=True)
class OrderPass(Pass):
    """Adds each edge of the plan that is legal and not already implied.

    The edges added are a minimum: none follows from the graph and the others.  Illegal edges, and edges that
    would close a cycle with earlier ones, are skipped with a note.
    """

    plan: RewritePlan
    name: ClassVar[str] = "order"
    relaxes = frozenset({Relaxation.MORE_WAITS})

    def preconditions(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> None:
        """Raise PlanError for an edge of missing ops: else the order would be lost silently."""
        require_nodes(graph_def, (name for edge in self.plan.edges for name in edge), "orders")

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        index = GraphIndex(graph_def)
        notes: list[Note] = []
        legal = _legal(index, self.plan.edges, notes)
        acyclic = _without_cycles(index, legal, notes)
        needed = _not_implied(index, acyclic)
        after = copy_of(graph_def)
        for target, sources in needed.items():
            after.node[target].input.extend(f"^{index.names[source]}" for source in sources)
        return PassResult(after, bool(needed), tuple(notes))

    def postconditions(
        self, before: graph_pb2.GraphDef, result: PassResult, training_graph: TrainingGraph | None
    ) -> None:
        """Check that edges were added only if the result says so; run() has sorted the new graph."""
        if not result.modified and any(
            a.input != b.input for a, b in zip(before.node, result.graph_def.node, strict=True)
        ):
            raise PlanError("edges were added and not reported")


def _legal(index: GraphIndex, edges: Iterable[tuple[str, str]], notes: list[Note]) -> list[Pair]:
    """Return the edges that are legal by themselves, without repeats, as indices."""
    kept: dict[Pair, None] = {}
    for before, after in edges:
        legal, reason = index.edge_is_legal(before, after)
        if legal:
            kept[index.index[before], index.index[after]] = None
        else:
            notes.append(Note("skipped", reason, (before, after)))
    return list(kept)


def _without_cycles(index: GraphIndex, edges: list[Pair], notes: list[Note]) -> list[Pair]:
    """Leave out edges that close a cycle with earlier ones; usually there is no cycle, and no search."""
    try:
        index.topological_order(edges)
    except GraphError:
        pass
    else:
        return edges
    graph = _as_rustworkx(index, edges)
    components = enumerate(rx.strongly_connected_components(graph))
    component = {member: number for number, members in components for member in members}
    accepted = [edge for edge in edges if component[edge[0]] != component[edge[1]]]
    trial = _as_rustworkx(index, accepted)
    for before, after in (edge for edge in edges if component[edge[0]] == component[edge[1]]):
        if rx.has_path(trial, after, before):
            notes.append(Note("skipped", CLOSES_A_CYCLE, (index.names[before], index.names[after])))
        else:
            trial.add_edge(before, after, None)
            accepted.append((before, after))
    return accepted


def _as_rustworkx(index: GraphIndex, edges: list[Pair]) -> rx.PyDiGraph:
    graph: rx.PyDiGraph = rx.PyDiGraph(multigraph=False)
    graph.add_nodes_from(range(len(index)))
    graph.add_edges_from_no_data([(i, s) for i, succs in enumerate(index.succs) for s in succs])
    graph.add_edges_from_no_data(edges)
    return graph


def _not_implied(index: GraphIndex, edges: list[Pair]) -> dict[int, list[int]]:
    """Return ``{after: [before, ...]}`` of the edges that follow neither from the graph nor from the others.
    u -> v follows exactly if u is an ancestor of another predecessor of v: taking the latest first needs only
    one walk."""
    wanted: dict[int, list[int]] = {}
    for before, after in edges:
        wanted.setdefault(after, []).append(before)
    order = index.topological_order(edges)
    place = places_in(order)
    reach = index.ancestor_bits(order, wanted)
    needed: dict[int, list[int]] = {}
    for target, sources in wanted.items():
        covered = 0
        for pred in index.preds(target):
            covered |= reach[pred] | (1 << place[pred])
        for source in sorted(sources, key=lambda i: -place[i]):
            if not (covered >> place[source]) & 1:
                needed.setdefault(target, []).append(source)
                covered |= reach[source] | (1 << place[source])
    return needed


@dataclass(frozen=True)
class AnnotatePass(Pass):
    """Sets ``_ooo_kind``, ``_ooo_layer``, ``_ooo_stream``, ``_ooo_priority`` and ``_ooo_stage``."""

    plan: RewritePlan
    name: ClassVar[str] = "annotate"
    relaxes = frozenset({Relaxation.NOTES})

    def preconditions(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> None:
        require_nodes(graph_def, sorted(self.plan.annotated_nodes), "annotates")

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        after = copy_of(graph_def)
        planned, modified = self.plan.annotated_nodes, False
        for node in after.node:
            if node.name in planned:
                modified |= self._annotate(node)
        return PassResult(after, modified)

    def _annotate(self, node: node_def_pb2.NodeDef) -> bool:
        plan, name, modified = self.plan, node.name, False
        for what, numbers in (
            ("layer", plan.layers),
            ("stream", plan.streams),
            ("priority", plan.priorities),
            ("stage", plan.stages),
        ):
            if (number := numbers.get(name)) is not None:
                value = node.attr[f"_ooo_{what}"]
                if value.WhichOneof("value") != "i" or value.i != number:
                    value.i, modified = number, True
        if (kind := plan.kinds.get(name)) is not None and node.attr["_ooo_kind"].s != kind.encode():
            node.attr["_ooo_kind"].s, modified = kind.encode(), True
        return modified
