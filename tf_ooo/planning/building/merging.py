"""Stages as layers: the costs of each stage of a model, as those of one layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tf_ooo.costs.layer_costs import LayerCosts, layer_inputs
from tf_ooo.planning.building.by_name import Bounds

# Layers of a stage whose gradients of one micro-batch are not added up yet.
_SUMMANDS = 2


def stage_of_layer(bounds: Bounds) -> list[int]:
    """Return the stage of each layer, given the first and last layer of each stage."""
    return [stage for stage, (first, last) in enumerate(bounds) for _ in range(first, last + 1)]


def merged(layers: tuple[LayerCosts, ...], bounds: Bounds, microbatches: int = 1) -> tuple[LayerCosts, ...]:
    """The costs of stages, each as one layer.

    With several micro-batches the gradients of two layers, the one that is computed and the one that is
    being added up, are there besides the sums.
    """
    stage_of = stage_of_layer(bounds)
    inputs: list[set[int]] = [set() for _ in bounds]
    sent: list[set[int]] = [set() for _ in bounds]
    for layer in range(len(layers)):
        for source in layer_inputs(layers, layer):
            if stage_of[source] != stage_of[layer]:
                inputs[stage_of[layer]].add(stage_of[source])
                sent[stage_of[source]].add(source)
    stages = (
        _sum(layers[first : last + 1], tuple(sorted(inputs[stage])), [layers[i] for i in sorted(sent[stage])])
        for stage, (first, last) in enumerate(bounds)
    )
    if microbatches == 1:
        return tuple(stages)
    largest = [sorted(layer.weight_bytes for layer in layers[a : b + 1])[-_SUMMANDS:] for a, b in bounds]
    return tuple(
        dataclasses.replace(stage, summand_bytes=stage.summand_bytes + sum(sizes))
        for stage, sizes in zip(stages, largest, strict=True)
    )


def _sum(group: Sequence[LayerCosts], inputs: tuple[int, ...], sent: Sequence[LayerCosts]) -> LayerCosts:
    def total(attribute: str) -> float:
        return float(sum(getattr(layer, attribute) for layer in group))

    names = [layer.name for layer in group]
    return LayerCosts(
        forward_s=total("forward_s"),
        output_grad_s=total("output_grad_s"),
        weight_grad_s=total("weight_grad_s"),
        update_s=total("update_s"),
        activation_bytes=total("activation_bytes"),
        weight_bytes=total("weight_bytes"),
        output_bytes=float(sum(layer.output_bytes for layer in sent)),
        weight_grad_bytes=total("kept_bytes"),
        inputs=inputs,
        name=names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
        slot_bytes=total("slot_bytes"),
        summand_bytes=max(layer.summand_bytes for layer in group),
        occupancy=_occupancy(group),
        recomputed_bytes=total("recomputed_bytes"),
        recomputed_s=total("recomputed_s"),
    )


def _occupancy(group: Sequence[LayerCosts]) -> tuple[float, float, float] | None:
    """Mean shares of the device over the seconds of all; None where not all are known."""
    if any(layer.occupancy is None for layer in group):
        return None
    shares = np.array([layer.occupancy for layer in group])
    seconds = np.array([(layer.forward_s, layer.output_grad_s, layer.weight_grad_s) for layer in group])
    weights = np.where(seconds.sum(axis=0) > 0, seconds, 1.0)
    forward, output_grad, weight_grad = np.average(shares, axis=0, weights=weights).tolist()
    return forward, output_grad, weight_grad
