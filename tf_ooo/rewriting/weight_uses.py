"""Finds forward ops that depend on data, those that depend on weights alone, and where weights are used."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from grappler_passes.graph.contexts import SWITCHES
from grappler_passes.graph.training_graph import TrainingGraph

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


def layers_of_weights(graph: TrainingGraph, of_data: Collection[str]) -> dict[str, set[int]]:
    """Return the layers of the weights that an op depends on, for ops that depend on no data; handles too."""
    owner = {variable: layer.index for layer in graph.layers for variable in layer.variables}
    layers: dict[str, set[int]] = {}
    for variable in graph.variables:
        if variable.name in owner:
            layers.setdefault(variable.handle, set()).add(owner[variable.name])
    for name, op in graph.ops.items():
        read = (
            () if name in of_data else [layers[producer] for producer in op.producers if producer in layers]
        )
        if read:
            layers[name] = layers.get(name, set()).union(*read)
    return layers


def layers_using(
    graph: TrainingGraph, forward: Mapping[str, int], of_data: Collection[str]
) -> list[set[int]]:
    """Return for each layer the layers whose forward ops apply its weights to data: several if tied."""
    layers = layers_of_weights(graph, of_data)
    using: list[set[int]] = [set() for _ in graph.layers]
    for name in forward.keys() & of_data:
        for producer in graph.ops[name].producers:
            for layer in layers.get(producer, ()):
                using[layer].add(forward[name])
    return using


def _handles(graph: TrainingGraph) -> set[str]:
    using = (op for op in graph.ops.values() if op.type.startswith(_USING))
    return {_source(graph, op.inputs[0][0]) for op in using if op.inputs}


def _source(graph: TrainingGraph, name: str) -> str:
    """Return what comes into a loop or a branch under this name."""
    while name in graph.ops and graph.ops[name].type in _PASSING_ON and graph.ops[name].inputs:
        name = graph.ops[name].inputs[0][0]
    return name
