"""Deep models of unequal layers: their parts, and how busy the planner keeps many devices."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import OptionsError
from tf_ooo.modes.pipeline.partition import units_of
from tf_ooo.modes.pipeline.planning import PlanRequest, make_plan
from tf_ooo.rewriting.parts import divided, least_share

# F, dO and dW of a layer are drawn by themselves: 1 to 4 ms, all magnitudes alike.
SHORTEST_S, RANGE, UPDATE_S = 1e-3, 4.0, 1e-4
ACTIVATION_BYTES, OUTPUT_BYTES, WEIGHT_BYTES = 16 << 20, 2 << 20, 8 << 20
# Every other layer computes so much without its weights, by so many equal ops behind them.
BEHIND, OPS_BEHIND = 0.6, 12


def whole_layers(count: int, seed: int) -> tuple[LayerCosts, ...]:
    """Costs of one micro-batch."""
    draw = random.Random(seed)

    def drawn_s() -> float:
        return float(SHORTEST_S * RANGE ** draw.random())

    return tuple(
        LayerCosts(
            drawn_s(),
            drawn_s(),
            drawn_s(),
            UPDATE_S,
            activation_bytes=ACTIVATION_BYTES,
            weight_bytes=WEIGHT_BYTES,
            output_bytes=OUTPUT_BYTES,
            name=f"layer{number}",
        )
        for number in range(count)
    )


def divided_layers(layers: Sequence[LayerCosts], devices: int) -> tuple[LayerCosts, ...]:
    """The same, every other layer with its parts for so many devices."""
    graph, seconds = _graph(layers)
    forward = {name: int(name.split("/")[0]) for name in graph.ops if name != "x"}
    parts, where = divided(graph, forward, seconds, share=least_share(devices))
    taken_s = [0.0] * len(parts.layers)
    for name, part in where.items():
        taken_s[part] += seconds.get(name, 0.0)
    of_part = dict(sorted((part, forward[name]) for name, part in where.items()))
    return tuple(
        _share(layers[of_part[part.index]], taken_s[part.index], bool(part.variables), part.name)
        for part in parts.layers
    )


def _graph(layers: Sequence[LayerCosts]) -> tuple[TrainingGraph, dict[str, float]]:
    """One op with the weights of each layer, and those behind it; the seconds of each."""
    ops, seconds, last = [Op("x", "_Arg", OpKind.FORWARD)], dict[str, float](), "x"

    def add(name: str, kind: str, *inputs: str) -> None:
        read = tuple((source, 0) for source in inputs)
        ops.append(Op(name, kind, OpKind.FORWARD, inputs=read, output_bytes=OUTPUT_BYTES))

    for number, layer in enumerate(layers):
        behind = OPS_BEHIND if number % 2 else 0
        add(f"{number}/handle", "_Arg")
        add(f"{number}/read", "ReadVariableOp", f"{number}/handle")
        add(f"{number}/product", "MatMul", last, f"{number}/read")
        last = f"{number}/product"
        seconds[last] = layer.forward_s * (1 - BEHIND if behind else 1)
        for place in range(behind):
            add(f"{number}/behind{place}", "Tanh", last)
            last = f"{number}/behind{place}"
            seconds[last] = layer.forward_s * BEHIND / behind
    variables = tuple(Variable(f"{number}/kernel", f"{number}/handle") for number in range(len(layers)))
    of_layers = tuple(Layer(number, (variable.name,)) for number, variable in enumerate(variables))
    return TrainingGraph({op.name: op for op in ops}, of_layers, variables), seconds


def _share(layer: LayerCosts, forward_s: float, with_weights: bool, name: str) -> LayerCosts:
    """The part of a layer that takes so long; dW and the update are where its weights are."""
    share = forward_s / layer.forward_s
    return dataclasses.replace(
        layer,
        forward_s=forward_s,
        output_grad_s=layer.output_grad_s * share,
        weight_grad_s=layer.weight_grad_s * with_weights,
        update_s=layer.update_s * with_weights,
        activation_bytes=layer.activation_bytes * share,
        weight_bytes=layer.weight_bytes * with_weights,
        name=name,
    )


def efficiency(layers, devices, microbatches, link):
    """Seconds of one device over those of all devices together."""
    planned = make_plan(layers, units_of(len(layers), ()), PlanRequest("auto", devices, microbatches, link))
    serial_s = microbatches * sum(layer.busy_s for layer in layers) + sum(layer.update_s for layer in layers)
    return serial_s / devices / planned.trial.step_s


@pytest.mark.parametrize("devices", [4, 16, 64])
def test_parts_have_the_seconds_of_their_layers(devices):
    whole = whole_layers(48, 0)
    parts = divided_layers(whole, devices)
    for field in ("forward_s", "output_grad_s", "weight_grad_s", "update_s", "weight_bytes"):
        total = sum(getattr(layer, field) for layer in whole)
        assert sum(getattr(layer, field) for layer in parts) == pytest.approx(total)
    assert sum(layer.weight_grad_s > 0 for layer in parts) == 48
    assert all(1e-3 <= layer.forward_s <= 4e-3 for layer in whole)


def test_fewer_layers_than_devices():
    with pytest.raises(OptionsError, match="16 stages are more than the 8 layers"):
        efficiency(whole_layers(8, 1), 16, 4, Link())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sixteen_devices_are_busy_for_nine_tenths_of_a_step(seed):
    assert efficiency(whole_layers(48, seed), 16, 32, Link()) >= 0.9
