"""Parts of a step that are timed on their own: the main stream's regions and the layers' dW."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorflow.core.framework import node_def_pb2

from grappler_passes.graph.node_input import split_input
from tf_ooo.costs.from_graph import forward_layers
from tf_ooo.modes.compiled.calls import Parts
from tf_ooo.modes.compiled.regions import (
    VIEWS,
    FlatStep,
    Port,
    Region,
    has_static_borders,
    is_pure,
    region_of,
)
from tf_ooo.planning.model.schedule import Task

# They name or place a node; they do not say what it computes.
_OF_PLACE = frozenset({"_class", "_output_shapes", "_XlaHasReferenceVars"})


@dataclass(frozen=True)
class Piece:
    """What one task of a schedule computes.

    Attributes:
        task: ``dO``, ``F`` or ``dW`` of a layer.
        regions: one for a part of the main stream, one for each gradient of a dW.
        kind: equal for pieces that take equally long: the same ops on the same shapes.
    """

    task: Task
    regions: tuple[Region, ...]
    kind: str


class Pieces:
    """The pieces of one step; ``F`` is that of the next step, which has the same shapes.

    What has state (variables that are read, counters) is left out of a piece and stands before it.
    """

    def __init__(self, step: FlatStep, parts: Parts) -> None:
        self.step, self.parts = step, parts
        self._forward: dict[int, list[str]] = {}
        for name, layer in forward_layers(parts.graph).items():
            self._forward.setdefault(layer, []).append(name)
        self._made: dict[Task, Piece | None] = {}

    def of(self, task: Task) -> Piece | None:
        """None where nothing of the task can be timed on its own."""
        if task not in self._made:
            self._made[task] = self._make(task)
        return self._made[task]

    def _make(self, task: Task) -> Piece | None:
        if task.kind == "dW":
            regions = tuple(self.parts.regions.get(task.stage, ()))
        else:
            regions = tuple(self._main(task))
        if not regions:
            return None
        return Piece(task, regions, kind_of(self.step, regions))

    def _main(self, task: Task) -> Iterator[Region]:
        names = self._forward.get(task.stage, []) if task.kind == "F" else self.parts.tasks.ops.get(task, ())
        graph, step = self.parts.graph, self.step
        wanted = {n for n in names if n in step.nodes and step.nodes[n].op == graph.ops[n].type}
        ordered = (name for name in graph.ops if name in wanted)
        chosen = [n for n in ordered if is_pure(step, n) and has_static_borders(step, n)]
        if not any(step.nodes[name].op not in VIEWS for name in chosen):
            return
        region = region_of(step, tuple(chosen), tuple(chosen))
        if floats(step, region.outputs):
            yield region


def floats(step: FlatStep, ports: Sequence[Port]) -> list[Port]:
    """Those that hold floating-point numbers."""
    infos = [(port, step.info(port)) for port in ports]
    return [port for port, info in infos if info is not None and info.dtype.startswith(("float", "bfloat"))]


def kind_of(step: FlatStep, regions: Sequence[Region]) -> str:
    """A digest of ops, attributes, shapes, constants and what reads what."""
    digest = hashlib.sha256()
    for region in regions:
        names: dict[Port, str] = {}
        for port in region.inputs:
            info = step.info(port)
            names[port] = f"in{len(names)}"
            digest.update(repr((names[port], info and (info.dtype, info.shape))).encode())
        for port, value in region.constants.items():
            names[port] = f"constant {np.asarray(value).tolist()}"
        for number, op in enumerate(region.ops):
            digest.update(_op_text(step.nodes[op], number, names).encode())
        digest.update(repr([names.get(port) for port in region.outputs]).encode())
    return digest.hexdigest()


def _op_text(node: node_def_pb2.NodeDef, number: int, names: dict[Port, str]) -> str:
    reads = [names.get(port, "") for port in map(split_input, node.input) if port[1] >= 0]
    for port in range(32):
        names.setdefault((node.name, port), f"op{number}:{port}")
    attributes: Mapping[str, Any] = node.attr
    said = [
        (key, attributes[key].SerializeToString(deterministic=True))
        for key in sorted(attributes)
        if key not in _OF_PLACE and not key.startswith("_ooo")
    ]
    return repr((node.op, reads, said))
