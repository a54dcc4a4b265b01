"""What zb_v, v_half and v_min have in common: a building block, squeezed for the real costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.relation import stage_inputs
from tf_ooo.schedule import Schedule, Task, TaskList
from tf_ooo.schedulers.partition import balanced
from tf_ooo.schedulers.problem import Problem
from tf_ooo.schedulers.squeeze import StageTimes, Style, squeeze
from tf_ooo.schedulers.v_block import (
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
from tf_ooo.simulator import simulate, stage_seconds
from tf_ooo.timeline import Timeline

# From the most memory to the least.
_FAMILY = (ZB, HALF, MIN)
STYLES = (Style(), Style(patience=0.0), Style(fill="F"), Style(yielding=False))
# Beyond this many tasks one style is tried, not all.
_TASKS_TO_COMPARE = 50_000


def make(policy: str, steps: Steps, problem: Problem) -> Schedule:
    """The V-shaped schedule of a building block.

    Under a memory limit that it does not keep, the leaner blocks of the family follow, then blocks that
    are repeated less often, last one micro-batch after the other.
    """
    stages = v_stages(problem)
    limit = problem.memory_limit_bytes
    blocks = _blocks(steps, problem.devices) if limit != 0 else iter([sequential(problem.devices)])
    for one in blocks:
        schedule, timeline = _fastest(policy, problem, stages, one)
        if limit is None or max(timeline.peak_bytes, default=0) <= limit:
            break
    return schedule


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
    yield last


def _fastest(
    policy: str, problem: Problem, stages: tuple[tuple[int, int], ...], of: Block
) -> tuple[Schedule, Timeline]:
    """The block's own order, and what each style makes of it, simulated."""
    order = lanes(of, problem.microbatches)
    times = stage_times(problem, stages)
    styles = STYLES if sum(map(len, order)) <= _TASKS_TO_COMPARE else STYLES[:1]
    orders = [squeeze(order, times, of.limit, style) for style in styles] + [order]
    tried = []
    for candidate in orders:
        schedule = v_schedule(policy, problem, stages, candidate)
        tried.append((schedule, simulate(schedule, problem.layers, problem.link)))
    return min(tried, key=lambda row: row[1].makespan_s)


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
        for kind in ("F", "dO", "dW")
    }
    device = [device_of(stage, problem.devices) for stage in range(len(stages))]
    sizes = _sizes(shape, problem.layers, len(stages))
    return StageTimes(device, seconds, [problem.link.seconds(size) for size in sizes])


def _sizes(shape: Schedule, layers: Sequence[LayerCosts], stages: int) -> list[float]:
    inputs = stage_inputs(shape, layers, stages)
    return [max((size for _, size in read), default=0.0) for read in inputs[1:]]
