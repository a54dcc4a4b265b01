"""Writes what the plan says about a node into the node's attributes, for users and tools to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, copy_of
from grappler_passes.passes.relaxations import Relaxation
from grappler_passes.passes.rewrite_plan import RewritePlan, require_nodes


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
