"""Decides which dW goes to which stream: the schedules that are compared for a compiled step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grappler_passes.graph.training_graph import forward_layers, ops_by_task
from tf_ooo.costs.analytic import analytic_ops
from tf_ooo.costs.devices import GRAPH_LAUNCH_S, device
from tf_ooo.costs.from_graph import graph_costs, with_occupancy
from tf_ooo.costs.layer_costs import SECONDS, LayerCosts
from tf_ooo.costs.table import GainTable
from tf_ooo.errors import BackendError
from tf_ooo.modes.compiled.barriers import DEVICE
from tf_ooo.modes.compiled.calls import StepToPlan
from tf_ooo.modes.compiled.measuring import MeasuredGains
from tf_ooo.modes.compiled.regions import CONTRACTIONS, VIEWS
from tf_ooo.modes.compiled.session import CompiledModule
from tf_ooo.planning.building.joint import best_placement, fill, least_retreat
from tf_ooo.planning.building.regions import SUB, Capture, write
from tf_ooo.planning.choosing.plan import as_asked
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.policies import POLICIES, Policy, schedules_of
from tf_ooo.rewriting.lowering import TaskOps, only_tasks

MAIN = (0, 0)
# Auto takes this policy.
USUAL = POLICIES[schedules_of("single_device", streams=True)[0]]


def every_layer(what: StepToPlan, *, policy: Policy = USUAL, streams: int = 1) -> Schedule:
    """Start each dW that can be moved as soon as its dO is there, on the side streams in turn.

    The layer that backward reaches last stays on the main stream, since nothing is left to run beside it. No
    costs are needed.
    """
    tasks = what.parts.tasks
    moved = what.movable.intersection(tasks.backward_layers) - set(tasks.backward_layers[-1:])
    lanes: dict[tuple[int, int], list[Task]] = {MAIN: []}
    for layer in tasks.backward_layers:
        for task in (Task("dO", layer), Task("dW", layer)):
            if task in tasks.ops:
                lane = SUB if task.kind == "dW" and layer in moved else MAIN
                lanes.setdefault(lane, []).append(task)
    lists = {lane: TaskList(order) for lane, order in lanes.items()}
    return dealt_out(Schedule("single_device", policy.name, lists), streams)


def joint(
    what: StepToPlan,
    *,
    policy: Policy = USUAL,
    streams: int = 1,
    gains: GainTable | MeasuredGains | None = None,
    capture: Callable[[StepToPlan], Capture | None] | None = None,
    delay: bool = False,
    memory_limit_bytes: int | None = None,
    must_gain: bool = False,
) -> Schedule:
    """Schedule jointly over regions: each dW goes into the region beside which it saves most.

    Args:
        gains: measured seconds, or an object that measures them; None: calculated from the shapes.
        capture: the seconds that kernels would lose outside of CUDA graphs; None: none.
        delay: whether dW may wait for the next step's forward pass; the graph has several steps.
        memory_limit_bytes: the most bytes of weights, activations and gradients in the simulation.
        must_gain: raise BackendError where every dW stays on the main stream.

    Raises:
        MemoryLimitError: even the stock order needs more.
        OptionsError: gains of regions or layers that the step does not have.
    """
    layers = layer_costs(what, DEVICE)
    table = gains(what, layers) if callable(gains) else gains
    losses = None if capture is None else capture(what)
    options: dict[str, Any] = {"delay": delay} if losses is None else {"delay": delay, "capture": losses}
    if table is not None:
        layers = with_measured(layers, table)
        options["gains"] = dict(table.saved_s)
        if losses is not None:
            launch_s = losses.launch_s if table.launch_s is None else table.launch_s
            options["capture"] = replace(losses, launch_s=launch_s, own=not table.alone_s)
    problem = Problem(layers, memory_limit_bytes=memory_limit_bytes, options=options)
    if table is None:
        placement = best_placement(problem)
    else:  # it decides alone: the simulator knows none of it
        placement = fill(problem)
        placement = placement if memory_limit_bytes is None else least_retreat(problem, placement)
    placement = {layer: region if layer in what.movable else None for layer, region in placement.items()}
    if must_gain and not any(placement.values()):
        raise BackendError("no dW saves time beside the main stream, all would stay on it")
    plan = as_asked(policy, Problem(layers, options={"placement": write(placement)}))
    return dealt_out(only_of(plan.trial.schedule, what.parts.tasks), streams)


def layer_costs(what: StepToPlan, device_name: str) -> tuple[LayerCosts, ...]:
    """Return calculated costs and shares of the device; ops without a formula count as nothing."""
    model, parts = device(device_name), what.parts
    ops = analytic_ops(what.lowered, model)
    seconds = {name: ops.seconds.get(name, 0.0) for name in parts.graph.ops}
    tasks = parts.tasks.by_layer
    layers = graph_costs(parts.graph, seconds, tasks).layers
    return with_occupancy(layers, parts.graph, ops.work, model, tasks)


def with_measured(layers: Sequence[LayerCosts], table: GainTable) -> tuple[LayerCosts, ...]:
    """Return the layers with the seconds in the table.

    Others keep calculated seconds, scaled by the measured tasks' ratio of measured to calculated ones.
    """
    measured = {}
    for task, task_s in table.alone_s.items():
        kind, _, place = task.partition(":")
        if int(place) < len(layers):
            measured[int(place), SECONDS[kind]] = task_s
    calculated_s = sum(getattr(layers[layer], name) for layer, name in measured)
    factor = sum(measured.values()) / calculated_s if calculated_s else 1.0

    def filled(number: int, layer: LayerCosts) -> LayerCosts:
        calculated = {name: getattr(layer, name) * factor for name in SECONDS.values()}
        own = {name: measured[number, name] for name in calculated if (number, name) in measured}
        return replace(layer, **{**calculated, **own})

    return tuple(map(filled, range(len(layers)), layers))


def only_of(schedule: Schedule, tasks: TaskOps) -> Schedule:
    """Return the schedule without dO and dW missing in the graph; pins name earlier tasks instead."""
    kept = only_tasks(schedule, tasks.ops)
    there = {task for order in kept.lanes.values() for task in order}
    pins = []
    for task, earlier, steps in schedule.after:
        pinned_to = earlier if earlier in there else _before(earlier, task, there)
        if task in there and pinned_to is not None:
            pins.append((task, pinned_to, steps))
    return replace(kept, after=tuple(pins))


def _before(missing: Task, task: Task, there: set[Task]) -> Task | None:
    """Return the last existing dO before a missing one, searched from dW's own layer downwards."""
    between = range(missing.stage + 1, task.stage + 1) if missing.kind == "dO" else ()
    return next((earlier for stage in between if (earlier := Task("dO", stage)) in there), None)


def dealt_out(schedule: Schedule, streams: int) -> Schedule:
    """Return the schedule with the side lane's dW, each with its update, spread over streams in turn."""
    lane = schedule.lanes.get(SUB)
    if lane is None or streams == 1:
        return schedule
    lanes: dict[tuple[int, int], list[Task]] = {}
    stream_of: dict[int, int] = {}
    for task in lane:
        stream_of.setdefault(task.stage, 1 + len(stream_of) % streams)
        lanes.setdefault((0, stream_of[task.stage]), []).append(task)
    rest = {key: order for key, order in schedule.lanes.items() if key != SUB}
    dealt = {key: TaskList(tasks) for key, tasks in lanes.items()}
    return replace(schedule, lanes=rest | dealt)


def capture_of(what: StepToPlan, stock: CompiledModule | None) -> Capture | None:
    """Return the schedule's launch costs; None if no kernel is captured anyway.

    Kernels are scaled to the number in ``stock``, XLA's module of the stock step, and the launch time to its
    share in CUDA graphs.  If ``stock`` is None, all kernels are taken to be captured.
    """
    kernels, share = kernels_by_task(what), 1.0
    if stock is not None:
        if not stock.launches or not stock.in_graphs:
            return None
        share = stock.share_in_graphs or 0.0
        counted = sum(kernels.values())
        scale = stock.launches / counted if counted else 1.0
        kernels = {task: count * scale for task, count in kernels.items()}
    movable = {f"dW:{layer}" for layer in what.movable}
    for task in [task for task in kernels if task.startswith("dW:") and task not in movable]:
        of_main = task.replace("dW", "dO")  # it stays there
        kernels[of_main] = kernels.get(of_main, 0.0) + kernels.pop(task)
    kernels = {task: count for task, count in kernels.items() if not task.startswith("U:")}
    return Capture(kernels, share * (device(DEVICE).launch_s - GRAPH_LAUNCH_S))


def kernels_by_task(what: StepToPlan) -> dict[str, float]:
    """Return ``{"dO:3": 2.0}``: each matrix product or convolution is one, the rest of a task one more."""
    graph, tasks = what.parts.graph, what.parts.tasks
    by_task = ops_by_task(graph, tasks.by_layer, forward_layers(graph))
    kernels = {}
    for (kind, layer), names in by_task.items():
        types = [graph.ops[name].type for name in names if name in graph.ops]
        heavy = sum(op in CONTRACTIONS for op in types)
        light = any(op not in CONTRACTIONS and op not in VIEWS for op in types)
        kernels[f"{kind}:{layer}"] = float(heavy + light)
    return kernels
