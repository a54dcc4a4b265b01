"""The steps of a graph in which several training steps are unrolled, each as a graph of its own.

Whoever unrolls them marks the nodes of step t with :data:`STEP_ATTR` and puts their names into a
scope ``tf_ooo_step_t``.
"""

from __future__ import annotations

import re

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.parts import part_of, with_inputs

STEP_ATTR = "_ooo_step"
STEP_SCOPE = "tf_ooo_step_"
_IN_SCOPE = re.compile(rf"(?:^|/){STEP_SCOPE}(\d+)(?:/|$)")


def steps_of(graph_def: graph_pb2.GraphDef, index: GraphIndex | None = None) -> list[int | None]:
    """The step of each node; None: it belongs to none, or to all.

    A node without a mark (graph optimizers make some) belongs to the latest step of its inputs.
    """
    index = index or GraphIndex(graph_def)
    steps = [_marked(node) for node in graph_def.node]
    for i in index.order:
        if steps[i] is None:
            above = [step for p in index.preds(i) if (step := steps[p]) is not None]
            steps[i] = max(above, default=None)
    return steps


def _marked(node: node_def_pb2.NodeDef) -> int | None:
    if STEP_ATTR in node.attr:
        return int(node.attr[STEP_ATTR].i)
    match = _IN_SCOPE.search(node.name)
    return int(match[1]) if match else None


def split_steps(graph_def: graph_pb2.GraphDef) -> list[graph_pb2.GraphDef]:
    """One graph for each step, the earliest first: its nodes and the data they are computed from.

    Control edges from other steps are left out: each reads variables as if it were the first.
    """
    index = GraphIndex(graph_def)
    steps = steps_of(graph_def, index)
    by_step: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        if step is not None:
            by_step.setdefault(step, []).append(i)
    return [part_of(graph_def, index, with_inputs(index, by_step[step])) for step in sorted(by_step)]
