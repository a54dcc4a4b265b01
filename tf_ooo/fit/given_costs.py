"""Costs of a table of an earlier run, for the parts that layers are divided into now."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_ooo.costs.layer_costs import SECONDS, LayerCosts
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError
from tf_ooo.fit.measured import measured_costs
from tf_ooo.rewriting.parts import layer_of_part
from tf_ooo.rewriting.step_graph import StepGraph


def costs_of_parts(costs: CostTable, step: StepGraph) -> CostTable:
    """The table as it is where it has the step's layers; else the seconds of each layer shared by its parts.

    The shares are those of calculated seconds.  The table may have whole layers, or parts of other sizes,
    as for more devices or larger batches.  Bytes of such parts are those of the step's shapes.

    OptionsError: they are of another model.
    """
    names = [layer.name for layer in step.graph.layers]
    given, own = _groups([layer.name for layer in costs.layers]), _groups(names)
    if len(given) != len(own):
        raise OptionsError(
            f"costs= has {len(given)} layers, the model {len(own)}: not its costs; measure them again"
        )
    if [len(group) for group in given] == [len(group) for group in own]:
        return costs
    calculated = measured_costs(step, None).layers
    layers: list[LayerCosts] = []
    for there, here in zip(given, own, strict=True):
        measured = [costs.layers[layer] for layer in there]
        parts = [calculated[layer] for layer in here]
        if len(measured) == len(parts):
            layers += [
                dataclasses.replace(layer, inputs=part.inputs)
                for layer, part in zip(measured, parts, strict=True)
            ]
        else:
            layers += _shared(measured, parts)
    return dataclasses.replace(costs, layers=tuple(layers))


def _groups(names: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the parts of each layer, in order; a layer that is whole is its only part."""
    groups: list[list[int]] = []
    before, weights_there = "", False
    for number, name in enumerate(names):
        layer, of_weights = layer_of_part(name) or name, layer_of_part(name) is None
        if not groups or layer != before or of_weights and weights_there:
            groups.append([])
            weights_there = False
        groups[-1].append(number)
        before, weights_there = layer, weights_there or of_weights
    return groups


def _shared(measured: Sequence[LayerCosts], parts: Sequence[LayerCosts]) -> list[LayerCosts]:
    """Return the parts, with the measured seconds in proportion to their calculated ones."""
    shares = {field: _shares([getattr(part, field) for part in parts]) for field in SECONDS.values()}
    longest = max(measured, key=lambda layer: layer.busy_s)

    def seconds(field: str, number: int) -> float:
        return float(sum(getattr(layer, field) for layer in measured)) * shares[field][number]

    return [
        dataclasses.replace(
            part,
            forward_s=seconds("forward_s", number),
            output_grad_s=seconds("output_grad_s", number),
            weight_grad_s=seconds("weight_grad_s", number),
            update_s=seconds("update_s", number),
            occupancy=longest.occupancy,
        )
        for number, part in enumerate(parts)
    ]


def _shares(calculated_s: Sequence[float]) -> list[float]:
    """Return each part's share; if nothing is calculated to take time, all are alike."""
    total_s = sum(calculated_s)
    return [part_s / total_s if total_s else 1 / len(calculated_s) for part_s in calculated_s]
