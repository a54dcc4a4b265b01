"""What zb_v, v_half and v_min have in common: a building block, squeezed for the real costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.building.partition import balanced
from tf_ooo.planning.building.squeeze import StageTimes, Style, squeeze
from tf_ooo.planning.building.v_block import (
    FULL_PERIOD,
    HALF,
    MIN,
    ZB,
    Block,
    Steps,
    block,
    device_of,
    lanes,
    sequential,
)
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.relation import stage_inputs
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.simulation.simulator import simulate, stage_seconds
from tf_ooo.planning.simulation.timeline import Timeline

# From the most memory to the least.
_FAMILY = (ZB, HALF, MIN)
STYLES = (Style(), Style(patience=0.0), Style(fill="F"), Style(yielding=False))
# Beyond this many tasks styles are compared for fewer micro-batches.
_TASKS_TO_COMPARE = 4_000
# Micro-batches for each device that show the steady state.
_PERIODS = 4
_KINDS = ("F", "dO", "dW")


def make(policy: str, steps: Steps, problem: Problem) -> Schedule:
    """A block's schedule; over the memory limit leaner blocks, then less often, last one after the other."""
    stages = v_stages(problem)
    last = sequential(problem.devices)
    for leaner in _blocks(steps, problem.devices) if problem.memory_limit_bytes != 0 else ():
        if not _fits(policy, problem, stages, leaner):
            continue
        schedule, timeline = _fastest(policy, problem, stages, leaner)
        if not _rank(problem, timeline)[0]:
            return schedule
    return _fastest(policy, problem, stages, last)[0]


def _fits(policy: str, problem: Problem, stages: tuple[tuple[int, int], ...], of: Block) -> bool:
    """Whether the block's own order keeps the limit; squeezed ones store as many micro-batches."""
    if problem.memory_limit_bytes is None:
        return True
    own = v_schedule(policy, problem, stages, lanes(of, problem.microbatches))
    return not _rank(problem, simulate(own, problem.layers, problem.link))[0]


def v_stages(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Two stages for each device, cut so that the slowest is as fast as possible."""
    return balanced(problem.layers, 2 * problem.devices)


def _blocks(steps: Steps, devices: int) -> Iterator[Block]:
    for leaner in _FAMILY[_FAMILY.index(steps) :]:
        yield block(leaner, devices)
    last = sequential(devices)
    period = FULL_PERIOD + 2
    while period < last.period:
        yield block(MIN, devices, period)
        period += 2 * (period // 8)  # even: in odd ones, ticks of the way there and back meet


def _fastest(
    policy: str, problem: Problem, stages: tuple[tuple[int, int], ...], of: Block
) -> tuple[Schedule, Timeline]:
    """The block's own order and what each style makes of it, simulated; the best."""
    order = lanes(of, problem.microbatches)
    times = stage_times(problem, stages)
    squeezed = [squeeze(order, times, of.limit, style) for style in _styles(policy, problem, stages, of)]
    schedules = [v_schedule(policy, problem, stages, lane) for lane in (*squeezed, order)]
    rows = [(schedule, simulate(schedule, problem.layers, problem.link)) for schedule in schedules]
    return min(rows, key=lambda row: _rank(problem, row[1]))


def _rank(problem: Problem, timeline: Timeline) -> tuple[bool, float]:
    peak, limit = max(timeline.peak_bytes, default=0), problem.memory_limit_bytes
    within = limit is None or peak <= limit
    return not within, timeline.makespan_s if within else peak


def _styles(
    policy: str, problem: Problem, stages: tuple[tuple[int, int], ...], of: Block
) -> tuple[Style, ...]:
    """All; with many tasks the one that is best for so few micro-batches as show the steady state."""
    few = dataclasses.replace(problem, microbatches=_PERIODS * problem.devices)
    tasks = len(_KINDS) * len(stages) * problem.microbatches
    if tasks <= _TASKS_TO_COMPARE or problem.microbatches <= few.microbatches:
        return STYLES
    order, times = lanes(of, few.microbatches), stage_times(few, stages)

    def rank(style: Style) -> tuple[bool, float]:
        schedule = v_schedule(policy, few, stages, squeeze(order, times, of.limit, style))
        return _rank(few, simulate(schedule, few.layers, few.link))

    return (min(STYLES, key=rank),)


def v_schedule(
    policy: str, problem: Problem, stages: tuple[tuple[int, int], ...], order: Sequence[Sequence[Task]]
) -> Schedule:
    """The schedule of each device's order; both stages are updated at the end."""
    last = 2 * problem.devices - 1
    return Schedule(
        "pipeline",
        policy,
        lanes={
            (device, 0): TaskList([*tasks, Task("U", last - device), Task("U", device)])
            for device, tasks in enumerate(order)
        },
        microbatches=problem.microbatches,
        stages=stages,
    )


def stage_times(problem: Problem, stages: tuple[tuple[int, int], ...]) -> StageTimes:
    """Seconds of the stages of a V, and of the messages between them on an idle link."""
    shape = Schedule("pipeline", "shape", stages=stages)
    seconds = {
        kind: stage_seconds(shape, problem.layers, kind, problem.link, len(stages)).tolist()
        for kind in _KINDS
    }
    device = [device_of(stage, problem.devices) for stage in range(len(stages))]
    sizes = _sizes(shape, problem.layers, len(stages))
    return StageTimes(device, seconds, [problem.link.seconds(size) for size in sizes])


def _sizes(shape: Schedule, layers: Sequence[LayerCosts], stages: int) -> list[float]:
    inputs = stage_inputs(shape, layers, stages)
    return [max((size for _, size in read), default=0.0) for read in inputs[1:]]
