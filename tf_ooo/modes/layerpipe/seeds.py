"""Random ops with seeds of their own, in a step that is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, copy_of
from grappler_passes.passes.relaxations import Relaxation

_SEED, _SECOND = "seed", "seed2"


@dataclass(frozen=True)
class ReseedPass(Pass):
    """Ops that draw from a seed of their own (``tf.random.normal``) get another one in each copy of a step.

    Each copy of such an op begins its stream anew: with one seed, all copies would draw the same numbers.
    Stateless ops, which Keras 3 uses, read their seeds from variables.  ``number``: of the copy, from 1.
    """

    number: int
    name: ClassVar[str] = "reseed"
    relaxes = frozenset({Relaxation.REPLACED_NODES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """The graph itself where there is no such op."""
        seeded = frozenset(node.name for node in graph_def.node if _is_seeded(node))
        if not seeded:
            return PassResult(graph_def, False)
        copy = copy_of(graph_def)
        for node in copy.node:
            if node.name in seeded:
                node.attr[_SECOND].i += self.number
        return PassResult(copy, True, replaced=seeded)


def _is_seeded(node: node_def_pb2.NodeDef) -> bool:
    """Whether it has seeds, and not both 0, which means any."""
    return _SEED in node.attr and _SECOND in node.attr and bool(node.attr[_SEED].i or node.attr[_SECOND].i)
