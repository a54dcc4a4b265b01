"""Moves nodes to the devices that the plan gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import PlanError
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, copy_of
from grappler_passes.passes.relaxations import Relaxation
from grappler_passes.passes.rewrite_plan import RewritePlan, require_nodes

_FULL_NAME = re.compile(r"/job:[A-Za-z][\w.-]*/replica:\d+/task:\d+/device:[A-Z][\w]*:\d+")


@dataclass(frozen=True)
class PlacementPass(Pass):
    """Sets the device of each node of ``plan.devices``, full names, all of them ``available``.

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
