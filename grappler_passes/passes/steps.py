"""Gives the nodes of an unrolled graph what passes have added to the graphs of its single steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import attr_value_pb2, graph_pb2

from grappler_passes.analysis.steps import steps_of
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, Relaxation, copy_of


@dataclass(frozen=True)
class Additions:
    """Holds the control inputs (``^name``) and the ``_ooo_`` attributes that each node has gained."""

    controls: Mapping[str, Sequence[str]]
    attributes: Mapping[str, Mapping[str, attr_value_pb2.AttrValue]]


def additions(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> Additions:
    """Return what passes have added to a graph with the same nodes in the same order."""
    controls, attributes = {}, {}
    for old, new in zip(before.node, after.node, strict=True):
        if len(new.input) > len(old.input):
            controls[new.name] = list(new.input[len(old.input) :])
        gained = {key: value for key, value in new.attr.items() if key.startswith("_ooo_")}
        if gained:
            attributes[new.name] = gained
    return Additions(controls, attributes)


@dataclass(frozen=True)
class StepsPass(Pass):
    """Adds to each step's nodes what their copies in that step's own graph have gained.

    A node that stands in the graphs of several steps gains what it has gained in the graph of its own step.
    """

    by_step: Sequence[Additions]
    name: ClassVar[str] = "steps"
    relaxes = frozenset({Relaxation.MORE_WAITS, Relaxation.NOTES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        after = copy_of(graph_def)
        modified = False
        for node, number in zip(after.node, steps_of(graph_def), strict=True):
            if number is None:
                continue
            gained = self.by_step[number]
            controls, attributes = gained.controls.get(node.name, ()), gained.attributes.get(node.name, {})
            node.input.extend(controls)
            for key, value in attributes.items():
                node.attr[key].CopyFrom(value)
            modified = modified or bool(controls or attributes)
        return PassResult(after, modified)
