"""Lets one read of a variable take the place of several reads of the same value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.compat.graph_protos import split_input
from grappler_passes.errors import PlanError
from grappler_passes.graph.dependencies import has_side_effects, only_reads
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, Relaxation, copy_of


@dataclass(frozen=True)
class ReadOncePass(Pass):
    """Rewires the readers of each key of ``stands_for`` to the op that stands for it.

    The replaced reads stay, and the one that stands for them waits for them: a write of the variable still
    comes after all of them.  Ops with side effects keep their inputs.
    """

    stands_for: Mapping[str, str]
    name: ClassVar[str] = "read_once"
    relaxes = frozenset({Relaxation.REPLACED_NODES, Relaxation.MORE_WAITS})

    def preconditions(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> None:
        ops = {node.name: node.op for node in graph_def.node}
        for name in {*self.stands_for, *self.stands_for.values()}:
            if not only_reads(ops.get(name, "")):
                raise PlanError(f"{name!r} is no op that reads a variable")

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        after = copy_of(graph_def)
        replaced: set[str] = set()
        stood_for: dict[str, list[str]] = {}
        for name, first in self.stands_for.items():
            stood_for.setdefault(first, []).append(name)
        for node in after.node:
            node.input.extend(f"^{name}" for name in stood_for.get(node.name, ()))
            for place, text in enumerate([] if has_side_effects(node.op) else node.input):
                producer, port = split_input(text)
                if port >= 0 and producer in self.stands_for:
                    node.input[place] = self.stands_for[producer]
                    replaced.add(node.name)
        return PassResult(after, bool(self.stands_for), (), frozenset(replaced))
