"""Fixed orders of ``torch.distributed.pipelining``; our policies with these names search for the costs.

:func:`schedule_of` plans a way of a case by its options: one of these orders, or a policy.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.table import CostTable
from tf_ooo.modes.pipeline.planning import PlanRequest, make_plan
from tf_ooo.planning.building.pipeline import StagedLayers, interleaved
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.model.schedule_file import ScheduleFile


def interleaved_zero_bubble(devices: int, microbatches: int, chunks: int) -> Schedule:
    """ScheduleInterleavedZeroBubble; ValueError where torch does not take so many micro-batches."""
    if microbatches % max(1, microbatches // devices):
        raise ValueError(f"torch does not divide {microbatches} micro-batches among {devices} devices")
    layers = (LayerCosts(1.0, 1.0, 1.0),) * (devices * chunks)
    stages = StagedLayers.of(Problem(layers, devices, microbatches, mode="pipeline"), chunks)
    lanes = interleaved(stages, chunks, microbatches, 1, delayed=True)
    return Schedule("pipeline", "torch_interleaved_zb", lanes, microbatches=microbatches)


def zbv(devices: int, microbatches: int) -> Schedule:
    """ScheduleZBVZeroBubble: two stages on each device, in a V; needless micro-batches are left out."""
    lanes = {}
    for device in range(devices):
        counts: Counter[tuple[str, int]] = Counter()
        tasks = []
        for kind, stage in _zbv(device, devices, max(2 * devices - 1, microbatches)):
            tasks.append(Task(kind, stage, counts[kind, stage]))
            counts[kind, stage] += 1
        kept = [task for task in tasks if task.microbatch < microbatches]
        lanes[device, 0] = TaskList([*kept, Task("U", 2 * devices - 1 - device), Task("U", device)])
    return Schedule("pipeline", "torch_zbv", lanes, microbatches=microbatches)


def _zbv(device: int, devices: int, count: int) -> Iterator[tuple[str, int]]:
    down, back, after = device, 2 * devices - 1 - device, devices - device
    backward, backward_back = [("dO", down), ("dW", down)], [("dO", back), ("dW", back)]
    yield from [("F", down)] * (2 * after - 1)
    yield from [("F", back), ("F", down)] * device
    yield from [("F", back), *backward_back] * after
    for forward in range(2 * devices - 1 - device, devices - 1 - device + count):
        yield from [("F", down)] * (forward < count)
        yield from (*backward, ("F", back), *backward_back)
    yield from [("dO", down), ("dO", back)] * device
    yield from backward * after
    yield from [("dW", back)] * device
    yield from [("dW", down)] * device


_ORDERS: Mapping[str, Callable[..., Schedule]] = {of.__name__: of for of in (interleaved_zero_bubble, zbv)}


def schedule_of(options: Mapping[str, Any], table: CostTable, devices: int, microbatches: int) -> Schedule:
    """Plan a way of others, with the number of chunks that is fastest on paper, where it takes the sizes."""
    if options.get("least_microbatches", 0) * devices > microbatches:
        raise ValueError(f"torch takes no fewer micro-batches than stages, got {microbatches}")
    units = tuple((layer, layer) for layer in range(len(table.layers)))
    basic = PlanRequest(options.get("schedule", "auto"), devices, microbatches, table.link)
    counts = range(2, len(units) // devices + 1)
    plans = []
    for chunks in [{"chunks": count} for count in counts] if "chunked" in options else [{}]:
        wanted = replace(basic, options=chunks)
        if "torch" in options:
            order = _ORDERS[options["torch"]](devices, microbatches, **chunks)
            wanted = replace(basic, own=ScheduleFile(order.policy, order.to_text(), order))
        plans.append(make_plan(table.layers, units, wanted))
    if not plans:
        raise ValueError(f"{len(units)} layers are too few for two stages on each of {devices} devices")
    plan = min(plans, key=lambda plan: plan.trial.step_s)
    fused = plan.schedule.fused_backward and not options.get("unfused")
    return replace(plan.schedule, stages=plan.problem.bounds, fused_backward=fused)
