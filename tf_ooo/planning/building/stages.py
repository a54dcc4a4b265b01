"""Reads stages that are given by hand, by names of layers; sums up the costs of each stage."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np

from tf_ooo.costs.layer_costs import SECONDS, LayerCosts, layer_inputs
from tf_ooo.errors import OptionsError, did_you_mean
from tf_ooo.planning.model.relation import tied_stages

Bounds = tuple[tuple[int, int], ...]
Stages = Sequence[str] | Sequence[Sequence[str]]


def bounds_of(
    names: Sequence[str],
    stages: Stages,
    units: Bounds = (),
    layer_of_part: Callable[[str], str | None] = lambda _: None,
) -> Bounds:
    """Return (first, last) layer of each stage.

    Args:
        names: the names of all layers.
        stages: names of layers at which stages begin, or a list of names for each stage.  A name also stands
            for all layers below it: ``"block_1"`` for ``"block_1/dense"``.
        units: ranges of layers that stay whole; empty: each layer may be cut from the next.
        layer_of_part: the layer that a part of a divided layer goes with, where it is named in no stage.

    Raises:
        OptionsError: no such layer; stages that begin out of order, or not with the first layer; a layer that
            is in two stages, in none or out of order; a place that cannot be cut.
    """
    starts = _starts_of_groups(names, stages, layer_of_part) if is_nested(stages) else _starts(names, stages)
    for start in starts:
        if units and start not in {first for first, _ in units}:
            raise OptionsError(
                f"stages: no cut is possible at {names[start]!r}: a loop or a split layer stays whole"
            )
    return tuple(zip(starts, [*(start - 1 for start in starts[1:]), len(names) - 1], strict=True))


def is_nested(stages: object) -> TypeGuard[Sequence[Sequence[str]]]:
    """Return whether stages are lists of names."""
    return isinstance(stages, (list, tuple)) and any(isinstance(each, (list, tuple)) for each in stages)


def check_stages(name: str, value: object) -> None:
    """Raise OptionsError unless ``value`` is None, different names, or a list of names for each stage."""
    groups = value if is_nested(value) else [value]
    if value is not None and not all(_are_names(group) for group in groups):
        raise OptionsError(
            f"{name}={value!r:.80} is not accepted; accepted: None, different layers' names, or a list of "
            "layers' names for each stage"
        )


def _are_names(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(text, str) and text for text in value) and len(set(value)) == len(value)


def _starts(names: Sequence[str], stages: Sequence[object]) -> list[int]:
    """Return the number of each stage's first layer, given by its name."""
    starts = [_places(names, str(stage))[0] for stage in stages]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise OptionsError(
            f"stages={list(stages)!r:.200}: the first has to be {names[0]!r}, the others in the model's order"
        )
    return starts


def _starts_of_groups(
    names: Sequence[str], stages: Sequence[Sequence[str]], layer_of_part: Callable[[str], str | None]
) -> list[int]:
    stage_of: dict[int, int] = {}
    for stage, group in enumerate(stages):
        for place in [place for name in group for place in _places(names, name)]:
            if place in stage_of:
                raise OptionsError(
                    f"stages: layer {names[place]!r} is there twice, in stage {stage_of[place]} and in stage "
                    f"{stage}; name it in one of them"
                )
            stage_of[place] = stage
    for place, name in enumerate(names):  # a part that nobody named goes with its layer
        layer = layer_of_part(name)
        if place not in stage_of and layer in names and names.index(layer) in stage_of:
            stage_of[place] = stage_of[names.index(layer)]
    if left := [name for place, name in enumerate(names) if place not in stage_of]:
        more = f" nor are {len(left) - 1} more" if len(left) > 1 else ""
        raise OptionsError(f"stages: layer {left[0]!r} is in no stage{more}: each layer has to be in one")
    order = [stage_of[place] for place in range(len(names))]
    for place, (before, after) in enumerate(itertools.pairwise(order), 1):
        if after < before:
            raise OptionsError(
                f"stages: layer {names[place]!r} of stage {after} stands behind {names[place - 1]!r} of "
                f"stage {before} in the model; stages hold neighbours, in the model's order"
            )
    return [order.index(stage) for stage in range(len(stages))]


def _places(names: Sequence[str], stage: str) -> list[int]:
    """Return the numbers of the layer of this name, or of the layers below it."""
    places = [place for place, name in enumerate(names) if f"/{stage}/" in f"/{name}/"]
    if not places:
        hint = did_you_mean(stage, names)
        raise OptionsError(f"stages: unknown layer {stage!r}{hint}; known: {', '.join(names)}")
    return places


# Layers of a stage whose gradients of one micro-batch are not added up yet.
_SUMMANDS = 2


def stage_of_layer(bounds: Bounds) -> list[int]:
    """Return the stage of each layer, given the first and last layer of each stage."""
    return [stage for stage, (first, last) in enumerate(bounds) for _ in range(first, last + 1)]


def one_each(layers: Sequence[LayerCosts]) -> Bounds:
    """Return the cut in which each layer is a stage."""
    return tuple((number, number) for number in range(len(layers)))


def merged(layers: tuple[LayerCosts, ...], bounds: Bounds, microbatches: int = 1) -> tuple[LayerCosts, ...]:
    """Return the costs of stages, each as one layer.

    With several micro-batches the gradients of two layers, one being computed and one being added up, take
    memory besides the sums; compiled, those of all layers do.
    """
    stage_of = stage_of_layer(bounds)
    inputs: list[set[int]] = [set() for _ in bounds]
    sent: list[set[int]] = [set() for _ in bounds]
    for layer in range(len(layers)):
        for source in layer_inputs(layers, layer):
            if stage_of[source] != stage_of[layer]:
                inputs[stage_of[layer]].add(stage_of[source])
                sent[stage_of[source]].add(source)
    tied = tied_stages(layers, stage_of)
    return tuple(
        dataclasses.replace(
            _sum(layers[first : last + 1], microbatches),
            inputs=tuple(sorted(inputs[stage])),
            tied=tuple(sorted(tied[stage].items())),
            output_bytes=float(sum(layers[source].output_bytes for source in sorted(sent[stage]))),
        )
        for stage, (first, last) in enumerate(bounds)
    )


def summand_bytes(group: Sequence[LayerCosts], microbatches: int) -> float:
    """Return the bytes of partial gradients not yet added up while a stage of these layers runs its dW."""
    summands = _SUMMANDS if microbatches > 1 else 0
    count = len(group) if any(layer.compiled for layer in group) else summands
    added_up_bytes = sum(heapq.nlargest(count, (layer.weight_bytes for layer in group)))
    return max(layer.summand_bytes for layer in group) + added_up_bytes


def _sum(group: Sequence[LayerCosts], microbatches: int) -> LayerCosts:
    sums: dict[str, Any] = {
        cost: float(sum(getattr(layer, cost) for layer in group))
        for cost in (*SECONDS.values(), "activation_bytes", "weight_bytes", "slot_bytes", "recomputed_bytes")
    }
    names = [layer.name for layer in group]
    return LayerCosts(
        **sums,
        weight_grad_bytes=float(sum(layer.kept_bytes for layer in group)),
        recomputed_s=float(sum(layer.recomputed_s for layer in group)),
        name=names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
        summand_bytes=summand_bytes(group, microbatches),
        occupancy=_occupancy(group),
        compiled=any(layer.compiled for layer in group),
    )


def _occupancy(group: Sequence[LayerCosts]) -> tuple[float, float, float] | None:
    """Return the mean occupancy of the device over the seconds of all; None where not all are known."""
    if any(layer.occupancy is None for layer in group):
        return None
    shares = np.array([layer.occupancy for layer in group])
    seconds = np.array([(layer.forward_s, layer.output_grad_s, layer.weight_grad_s) for layer in group])
    weights = np.where(seconds.sum(axis=0) > 0, seconds, 1.0)
    forward, output_grad, weight_grad = np.average(shares, axis=0, weights=weights).tolist()
    return forward, output_grad, weight_grad
