"""Adds the plan's control edges to a graph: the only way to make stock TensorFlow run ops in an order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import rustworkx as rx
from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import GraphError, PlanError
from grappler_passes.graph.dependencies import GraphIndex, places_in
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Note, Pass, PassResult, copy_of
from grappler_passes.passes.relaxations import Relaxation
from grappler_passes.passes.rewrite_plan import RewritePlan, require_nodes

CLOSES_A_CYCLE = "closes a cycle with edges that come earlier in the plan"
# Indices of the nodes before and after.
Pair = tuple[int, int]


@dataclass(frozen=True)
class OrderPass(Pass):
    """Adds each edge of the plan that is legal and not implied already.

    The edges added are a minimum: none follows from the graph and the others.  Illegal edges, and
    those that would close a cycle with edges that come earlier in the plan, are skipped with a note.
    """

    plan: RewritePlan
    name: ClassVar[str] = "order"
    relaxes = frozenset({Relaxation.MORE_WAITS})

    def preconditions(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> None:
        """Raise PlanError for an edge of ops that are not there: without a word the order would be lost."""
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
        """Edges were added only if the result says so; run() has sorted the graph with its edges."""
        if not result.modified and any(
            a.input != b.input for a, b in zip(before.node, result.graph_def.node, strict=True)
        ):
            raise PlanError("edges were added and not reported")


def _legal(index: GraphIndex, edges: Iterable[tuple[str, str]], notes: list[Note]) -> list[Pair]:
    """Return the edges that are legal each on its own, once each, as indices."""
    kept: dict[Pair, None] = {}
    for before, after in edges:
        legal, reason = index.edge_is_legal(before, after)
        if legal:
            kept[index.index[before], index.index[after]] = None
        else:
            notes.append(Note("skipped", reason, (before, after)))
    return list(kept)


def _without_cycles(index: GraphIndex, edges: list[Pair], notes: list[Note]) -> list[Pair]:
    """Leave out edges that close a cycle with earlier ones; mostly there is none, and nothing is searched."""
    try:
        index.topological_order(edges)
    except GraphError:
        pass
    else:
        return edges
    graph = _as_rustworkx(index, edges)
    component = [0] * len(index)
    for number, members in enumerate(rx.strongly_connected_components(graph)):
        for member in members:
            component[member] = number
    accepted = [edge for edge in edges if component[edge[0]] != component[edge[1]]]
    trial = _as_rustworkx(index, accepted)
    for before, after in edges:
        if component[before] != component[after]:
            continue
        if rx.has_path(trial, after, before):
            notes.append(Note("skipped", CLOSES_A_CYCLE, (index.names[before], index.names[after])))
            continue
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
    """``{after: [before, ...]}`` of the edges that follow neither from the graph nor from the others.

    u -> v follows exactly if u is an ancestor of another predecessor of v: with the latest first it is one
    walk.
    """
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
