"""Which dW goes to which stream: the schedules that are compared for a compiled step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from grappler_passes.graph import TrainingGraph
from tf_ooo.costs.analytic import analytic_ops
from tf_ooo.costs.devices import device
from tf_ooo.costs.from_graph import graph_costs
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.occupancy import with_occupancy
from tf_ooo.lowering import TaskOps
from tf_ooo.schedule import Schedule, Task, TaskList
from tf_ooo.schedulers import multi_stream
from tf_ooo.schedulers.problem import Problem
from tf_ooo.schedulers.regions import SUB, own, schedule
from tf_ooo.xla.gains import Gains

MAIN = (0, 0)


def every_layer(
    graph: TrainingGraph, tasks: TaskOps, movable: Collection[int], graph_def: Any = None, *, streams: int = 1
) -> Schedule:
    """Each dW that can be moved starts as soon as its dO is there, on the side streams in turn.

    The layer that backward reaches last stays on the main stream: nothing is left to run beside it.
    Needs no costs.
    """
    del graph, graph_def
    moved = {layer for layer in tasks.backward_layers if layer in movable} - set(tasks.backward_layers[-1:])
    lanes: dict[tuple[int, int], list[Task]] = {MAIN: []}
    turn = 0
    for layer in tasks.backward_layers:
        for task in (Task("dO", layer), Task("dW", layer)):
            if task not in tasks.ops:
                continue
            lane = MAIN
            if task.kind == "dW" and layer in moved:
                lane, turn = (0, 1 + turn % streams), turn + 1
            lanes.setdefault(lane, []).append(task)
    made: dict[tuple[int, int], Any] = {lane: TaskList(order) for lane, order in lanes.items()}
    return Schedule("single_device", multi_stream.NAME, made)


def joint(
    graph: TrainingGraph,
    tasks: TaskOps,
    movable: Collection[int],
    graph_def: Any,
    *,
    streams: int = 1,
    gains: Gains | None = None,
    device_name: str = "h100",
    delay: bool = False,
    memory_limit_bytes: int | None = None,
) -> Schedule:
    """Joint scheduling over regions: each dW into the region beside which it saves most.

    Args:
        graph, tasks: the classified step.
        movable: layers whose dW can leave the main stream.
        graph_def: the step, flat, with static shapes.
        streams: side streams, taken in turn.
        gains: measured seconds; None: calculated from the shapes, for ``device_name``.
        device_name: a device that ``tf_ooo.costs`` knows.
        delay: dW may wait for the next step's forward pass; the graph has several steps.
        memory_limit_bytes: what weights, activations and gradients may take, by the simulator's count.

    Raises:
        MemoryLimitError: even the stock order needs more.
        OptionsError: gains of regions or layers that the step does not have.
    """
    layers = layer_costs(graph, tasks, graph_def, device_name)
    options = {} if gains is None else {"gains": dict(gains)}
    problem = Problem(layers, memory_limit_bytes=memory_limit_bytes, options=options)
    multi_stream.check(problem)
    # Simulation knows no measured gains: what they say is taken as it is.
    placement = multi_stream.best_placement(problem) if gains is None else multi_stream.fill(problem)
    if gains is not None and memory_limit_bytes is not None:
        placement = multi_stream.least_retreat(problem, placement)
    for layer, region in placement.items():
        if layer not in movable or region is None:
            placement[layer] = None
        elif region.kind == "F" and not delay:  # there is no next step: as early as it can be
            placement[layer] = own(layer)
    made = schedule(multi_stream.NAME, problem, placement)
    return dealt_out(only_of(made, tasks), streams)


def layer_costs(
    graph: TrainingGraph, tasks: TaskOps, graph_def: Any, device_name: str
) -> tuple[LayerCosts, ...]:
    """Calculated costs and shares of the device; what has no formula counts as nothing."""
    model = device(device_name)
    found = analytic_ops(graph_def, model)
    seconds = {name: found.seconds.get(name, 0.0) for name in graph.ops}
    layers = graph_costs(graph, seconds, tasks).layers
    return with_occupancy(layers, graph, found.work, model, tasks)


def only_of(made: Schedule, tasks: TaskOps) -> Schedule:
    """The schedule without dO and dW that the graph does not have, and pins that name them."""
    lanes = {
        lane: TaskList([task for task in order if task in tasks.ops or task.kind not in ("dO", "dW")])
        for lane, order in made.lanes.items()
    }
    there = {task for order in lanes.values() for task in order}
    pins = tuple(pin for pin in made.after if pin[0] in there and pin[1] in there)
    return dataclasses.replace(made, lanes=lanes, after=pins)


def dealt_out(made: Schedule, streams: int) -> Schedule:
    """The side lane's dW, each with its update, on so many streams in turn."""
    lane = made.lanes.get(SUB)
    if lane is None or streams == 1:
        return made
    lanes: dict[tuple[int, int], list[Task]] = {}
    stream_of: dict[int, int] = {}
    for task in lane:
        stream_of.setdefault(task.stage, 1 + len(stream_of) % streams)
        lanes.setdefault((0, stream_of[task.stage]), []).append(task)
    rest: Mapping[Any, Any] = {key: order for key, order in made.lanes.items() if key != SUB}
    return dataclasses.replace(made, lanes={**rest, **{k: TaskList(v) for k, v in lanes.items()}})
