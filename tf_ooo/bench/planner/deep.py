"""Deep models of unequal layers on 4 to 64 devices: how busy the planner keeps them, and how long it takes.

Layers are divided, cut and planned as a pipeline's fit does it.  Efficiency: the seconds of one device over
those of all devices together.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tf_ooo.bench.planner.published import show
from tf_ooo.bench.shared.options import json_option, quick_option
from tf_ooo.bench.shared.rows import Row, link_text, write_rows
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import OptionsError
from tf_ooo.modes.pipeline.partition import Cutter, units_of
from tf_ooo.modes.pipeline.planning import Wanted, make_plan
from tf_ooo.planning.choosing.plan import Plan
from tf_ooo.rewriting.parts import divided, least_share

# How many layers: 48, or three for each device.
LAYERS, GROWING, SEEDS = 48, 3, (0, 1, 2)
DEVICES = (4, 8, 16, 32, 64)
MICROBATCHES = 32
# For these three seeds and both links.
ASKED_DEVICES = 16
# F, dO and dW of a layer are drawn by themselves: 1 to 4 ms, all magnitudes alike.
SHORTEST_S, RANGE, UPDATE_S = 1e-3, 4.0, 1e-4
ACTIVATION_BYTES, OUTPUT_BYTES, WEIGHT_BYTES = 16 << 20, 2 << 20, 8 << 20
# Of every other layer so much is computed without its weights, by so many equal ops behind them.
BEHIND, OPS_BEHIND = 0.6, 12
LINKS = (Link(), Link(10e-6, 25e9))
ASSUMPTIONS = (
    "48 layers, or three for each device; F, dO and dW of each drawn between 1 and 4 ms, whatever the others",
    "whole: no layer can be divided; parts: every other one has 60% of its F and dO in twelve ops behind its "
    "weights, and is divided as in a fit, by the least share for so many devices",
    "efficiency = seconds of one device / (devices x step); a step has ended when all devices have",
    "at most: the busiest device has 1/p of the work, the chain of all F and dO of one micro-batch, or the "
    "longest part in all micro-batches, whatever takes longest; one stage each: of the best cut into as many "
    "stages as devices the slowest one in all micro-batches",
    "messages of 2 MB take no time, or 80 us on links of 25 GB/s, and 10 us of latency",
    "no memory limit; seconds are those of all policies and cuts",
)


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


def rows(seeds: Sequence[int] = SEEDS, devices: Sequence[int] = DEVICES) -> Iterator[Row]:
    """One row for each model, number of devices and of micro-batches, and link."""
    for count, kind in itertools.product(devices, ("whole", "parts")):
        asked = count == ASKED_DEVICES
        for seed, microbatches in itertools.product(seeds[: None if asked else 1], _counts(count)):
            for link in LINKS if asked else LINKS[:1]:
                yield measured(kind, LAYERS, seed, count, microbatches, link)
    for count in devices:
        yield measured("whole", GROWING * count, seeds[0], count, 2 * count, LINKS[0])


def _counts(devices: int) -> list[int]:
    return list(dict.fromkeys((MICROBATCHES, 2 * devices)))


def measured(kind: str, count: int, seed: int, devices: int, microbatches: int, link: Link) -> Row:
    """Divides, cuts and plans."""
    layers = whole_layers(count, seed)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    if kind == "parts":
        layers = divided_layers(layers, devices)
    row: Row = {
        "workload": f"{count} layers, {kind}",
        "seed": seed,
        "mode": "pipeline",
        "devices": devices,
        "microbatches": microbatches,
        "layers": len(layers),
        **({} if link == Link() else {"bandwidth_bit_s": link.bytes_per_s * 8}),
    }
    units = units_of(len(layers), ())
    try:
        planned = make_plan(layers, units, Wanted("auto", devices, microbatches, link))
    except OptionsError as error:
        return row | {"impossible": str(error)}
    took = {"plan_s": time.perf_counter() - began_s, "plan_cpu_s": time.process_time() - began_cpu_s}
    longest_s = max(
        sum(layer.busy_s for layer in layers[first : last + 1])
        for first, last in Cutter(layers, units, link, microbatches).cut(tuple(range(devices)))
    )
    serial_s = microbatches * sum(layer.busy_s for layer in layers) + sum(layer.update_s for layer in layers)
    bound_s = _bound_s(layers, devices, microbatches)
    peak, reference = max(planned.timeline.peak_bytes), _reference_peak(planned)
    return (
        row
        | took
        | {
            "schedule": planned.schedule.policy,
            "stages": len(planned.problem.bounds),
            "predicted_step_s": planned.trial.step_s,
            "serial_step_s": serial_s,
            "bound_s": bound_s,
            "efficiency": serial_s / devices / planned.trial.step_s,
            "efficiency_bound": serial_s / devices / bound_s,
            "efficiency_bound_one_stage": serial_s / devices / (longest_s * microbatches),
            "efficiency_of": {
                name: serial_s / devices / step_s for name, step_s in sorted(_shortest(planned).items())
            },
            "peak_bytes": peak,
            "peak_bytes_1f1b": reference,
        }
    )


def _bound_s(layers: Sequence[LayerCosts], devices: int, microbatches: int) -> float:
    """No step is shorter, wherever layers run."""
    work_s = microbatches * sum(layer.busy_s for layer in layers) + sum(layer.update_s for layer in layers)
    chain_s = sum(layer.forward_s + layer.output_grad_s for layer in layers) + layers[0].weight_grad_s
    return max(work_s / devices, chain_s, microbatches * max(layer.busy_s for layer in layers))


def _shortest(planned: Plan) -> dict[str, float]:
    """The step of each policy on its best cut."""
    steps: dict[str, float] = {}
    for candidate in planned.candidates:
        if candidate.trial is not None:
            steps[candidate.name] = min(candidate.step_s, steps.get(candidate.name, candidate.step_s))
    return steps


def _reference_peak(planned: Plan) -> int | None:
    trials = [candidate.trial for candidate in planned.candidates if candidate.name == "1f1b"]
    return min((trial.peak_bytes for trial in trials if trial is not None), default=None)


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [
        "model                seed   p    m       link layers  schedule        stages efficiency  at most  "
        "one stage each  next best        seconds (CPU)  memory"
    ]
    for row in rows:
        head = (
            f"{row['workload']:<20} {row['seed']:>4} {row['devices']:>3} {row['microbatches']:>4} "
            f"{link_text(row):>10} {row['layers']:>6}"
        )
        if "impossible" in row:
            lines.append(f"{head}  {row['impossible']}")
            continue
        efficiency = {name: value for name, value in row["efficiency_of"].items() if name != row["schedule"]}
        following = max(efficiency, key=efficiency.__getitem__)
        lines.append(
            f"{head}  {row['schedule']:<15} {row['stages']:>6} {row['efficiency']:10.3f} "
            f"{row['efficiency_bound']:8.3f} {row['efficiency_bound_one_stage']:15.3f}  "
            f"{following:<10} {efficiency[following]:.3f} {row['plan_s']:7.1f} ({row['plan_cpu_s']:4.1f}) "
            f"{row['peak_bytes'] / row['peak_bytes_1f1b']:7.2f}"
        )
    return "\n".join(lines)


@click.command("deep")
@json_option
@quick_option("One model of each kind on 4 and 8 devices.")
def main(json_file: Path | None, quick: bool) -> None:
    """48 layers of unequal cost on 4 to 64 devices: efficiency, its bound, and seconds of planning."""
    planned = list(rows(SEEDS[:1], DEVICES[:2]) if quick else rows())
    show(planned, table, ASSUMPTIONS)
    write_rows(json_file, planned)
