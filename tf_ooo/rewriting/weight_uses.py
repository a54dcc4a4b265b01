"""Finds forward ops that depend on data, those that depend on weights alone, and where weights are used."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from grappler_passes.graph.contexts import SWITCHES
from grappler_passes.graph.training_graph import Layer, TrainingGraph

_USING = ("ReadVariable", "ResourceGather", "Assign", "ResourceApply", "ResourceSparse", "ResourceScatter")
_PASSING_ON = ("Enter", *SWITCHES, "Identity")
_DATA = ("_Arg", "Placeholder", "PlaceholderWithDefault")


def ops_of_data(graph: TrainingGraph) -> set[str]:
    """Return the ops that depend on data, not only on variables and constants."""
    handles = _handles(graph)
    names: set[str] = set()
    for name, op in graph.ops.items():
        starts = op.type in _DATA and name not in handles
        if starts or any(producer in names for producer in op.producers):
            names.add(name)
    return names


def from_weights(graph: TrainingGraph, layer: Layer, of_data: Collection[str]) -> set[str]:
    """Return ops that depend on the layer's weights, perhaps other variables, and no data; handles too."""
    names = {v.handle for v in graph.variables if v.name in layer.variables}
    for name, op in graph.ops.items():
        if name not in of_data and any(producer in names for producer in op.producers):
            names.add(name)
    return names


def layers_using(
    graph: TrainingGraph, forward: Mapping[str, int], of_data: Collection[str]
) -> list[set[int]]:
    """Return for each layer the layers whose forward ops apply its weights to data: several if tied."""
    applying = [name for name in forward if name in of_data]
    using: list[set[int]] = []
    for layer in graph.layers:
        weights = from_weights(graph, layer, of_data)
        users = (name for name in applying if any(p in weights for p in graph.ops[name].producers))
        using.append({forward[name] for name in users})
    return using


def _handles(graph: TrainingGraph) -> set[str]:
    using = (op for op in graph.ops.values() if op.type.startswith(_USING))
    return {_source(graph, op.inputs[0][0]) for op in using if op.inputs}


def _source(graph: TrainingGraph, name: str) -> str:
    """Return what comes into a loop or a branch under this name."""
    while name in graph.ops and graph.ops[name].type in _PASSING_ON and graph.ops[name].inputs:
        name = graph.ops[name].inputs[0][0]
    return name
