"""Writes what the plan says about a node into the node's attributes, for users and tools to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Note, Pass, PassResult, copy_of
from grappler_passes.passes.relaxations import Relaxation
from grappler_passes.passes.rewrite_plan import RewritePlan


@dataclass(frozen=True)
class AnnotatePass(Pass):
    """Sets ``_ooo_kind``, ``_ooo_layer``, ``_ooo_stream``, ``_ooo_priority`` and ``_ooo_stage``."""

    plan: RewritePlan
    name: ClassVar[str] = "annotate"
    relaxes = frozenset({Relaxation.NOTES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        after = copy_of(graph_def)
        planned = self.plan.annotated_nodes
        modified, marked = False, 0
        for node in after.node:
            if node.name in planned:
                modified |= self._annotate(node)
                marked += 1
        return PassResult(after, modified, tuple(self._unknown(graph_def, planned, marked)))

    def _annotate(self, node: node_def_pb2.NodeDef) -> bool:
        plan, name, values = self.plan, node.name, {}
        if name in plan.kinds:
            values["_ooo_kind"] = AttrValue(s=plan.kinds[name].encode())
        for attribute, numbers in (
            ("_ooo_layer", plan.layers),
            ("_ooo_stream", plan.streams),
            ("_ooo_priority", plan.priorities),
            ("_ooo_stage", plan.stages),
        ):
            if name in numbers:
                values[attribute] = AttrValue(i=numbers[name])
        changed = {key: value for key, value in values.items() if node.attr[key] != value}
        for key, value in changed.items():
            node.attr[key].CopyFrom(value)
        return bool(changed)

    def _unknown(self, graph_def: graph_pb2.GraphDef, planned: set[str], marked: int) -> list[Note]:
        if marked == len(planned):
            return []
        lacking = sorted(planned - {node.name for node in graph_def.node})
        return [Note("skipped", "the graph has no such node to annotate", tuple(lacking))]
