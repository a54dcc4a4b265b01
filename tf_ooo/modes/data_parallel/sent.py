"""Estimates the bytes that layers send to other ranks: their dW, or a table's rows that were looked up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from grappler_passes.graph.training_graph import Op, TrainingGraph
from tf_ooo.costs.communication import as_allreduce_bytes
from tf_ooo.costs.from_graph import variable_bytes
from tf_ooo.costs.layer_costs import LayerCosts

_REDUCES = ("HorovodAllreduce", "CollectiveReduceV2")
_GATHERS = ("HorovodAllgather", "CollectiveGatherV2")


def sent_bytes(graph: TrainingGraph, workers: int) -> list[float]:
    """Return for each layer the bytes of an allreduce that sends as much; if not known, its weights'."""
    weights = [weight_bytes for weight_bytes, _ in variable_bytes(graph, [])]
    return [
        _sent(graph, layer.communication_ops, workers) or weight_bytes
        for layer, weight_bytes in zip(graph.layers, weights, strict=True)
    ]


def with_weight_bytes(layers: Iterable[LayerCosts], sizes: Iterable[float]) -> tuple[LayerCosts, ...]:
    """Plans count what is sent as weights; reports have weights."""
    return tuple(replace(layer, weight_bytes=size) for layer, size in zip(layers, sizes, strict=True))


def _sent(graph: TrainingGraph, names: Sequence[str], workers: int) -> float:
    """0: something is sent of which no size, or in a way of which no cost, is known."""
    total = 0.0
    for op in (graph.ops[name] for name in names):
        if op.type in _REDUCES or op.type in _GATHERS:
            size = _input_bytes(graph, op)
            if size is None:
                return 0.0
            total += as_allreduce_bytes(size, workers) if op.type in _GATHERS else size
    return total


def _input_bytes(graph: TrainingGraph, op: Op) -> int | None:
    """Return the bytes of the tensor that an op is given."""
    producer = graph.ops.get(op.inputs[0][0]) if op.inputs else None
    return None if producer is None else producer.output_bytes
