"""Adds the plan's joins: ops that do nothing, for many ops to wait for many others with few edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult
from grappler_passes.passes.edit import GraphEditor
from grappler_passes.passes.relaxations import Relaxation
from grappler_passes.passes.rewrite_plan import RewritePlan


@dataclass(frozen=True)
class JoinsPass(Pass):
    """Adds a NoOp for each of ``plan.joins``, on its device; the edges come with the order pass."""

    plan: RewritePlan
    name: ClassVar[str] = "joins"
    relaxes = frozenset({Relaxation.NEW_NODES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        editor = GraphEditor(graph_def)
        for name, device in self.plan.joins.items():
            if name not in editor.nodes:
                editor.add(name, "NoOp", (), device)
        return PassResult(editor.graph_def, editor.modified)
