"""Makes zb_v, v_half and v_min from what they share: a building block, squeezed for the real costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tf_ooo.planning.building import v_block
from tf_ooo.planning.building.choice import on_paper, rank, within_limit
from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.squeeze import Style, squeezed
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule

# From the most memory to the least.
_FAMILY = (v_block.ZB, v_block.HALF, v_block.MIN)
STYLES = (Style(), Style(patience=0.0), Style(fill="F"), Style(yielding=False))
# Beyond this many tasks styles are compared for fewer micro-batches.
_TASKS_TO_COMPARE = 4_000
# Micro-batches for each device that show the steady state.
_PERIODS = 4


def make(policy: str, steps: v_block.Steps, problem: Problem) -> Schedule:
    """A block's schedule; over the memory limit leaner blocks, then less often, last one after the other."""
    stages = v_stages(problem)
    for leaner in _blocks(steps, problem.devices) if problem.memory_limit_bytes != 0 else ():
        # Squeezed orders store as many micro-batches as the block's own.
        if within_limit(
            problem, stages.with_updates(policy, v_block.lanes(leaner, problem.microbatches), back=True)
        ):
            over, schedule = _fastest(policy, stages, leaner)
            if not over:
                return schedule
    return _fastest(policy, stages, v_block.sequential(problem.devices))[1]


def _blocks(steps: v_block.Steps, devices: int) -> Iterator[v_block.Block]:
    for leaner in _FAMILY[_FAMILY.index(steps) :]:
        yield v_block.block(leaner, devices)
    last = v_block.sequential(devices)
    period = v_block.FULL_PERIOD + 2
    while period < last.period:
        yield v_block.block(v_block.MIN, devices, period)
        period += 2 * (period // 8)  # even: in odd ones, ticks of the way there and back meet


def _fastest(policy: str, stages: StagedLayers, of: v_block.Block) -> tuple[bool, Schedule]:
    """The best of the block's own order and of what each style makes of it; whether it is over the limit."""
    order = v_block.lanes(of, stages.problem.microbatches)
    schedules = [squeezed(policy, stages, order, of.limit, style) for style in _styles(policy, stages, of)]
    rows = [_ranked(stages, each) for each in (*schedules, stages.with_updates(policy, order, back=True))]
    (over, _), schedule = min(rows, key=lambda row: row[0])
    return over, schedule


def _ranked(stages: StagedLayers, schedule: Schedule) -> tuple[tuple[bool, float], Schedule]:
    return rank(stages.problem, on_paper(stages.problem, schedule)), schedule


def _styles(policy: str, stages: StagedLayers, of: v_block.Block) -> tuple[Style, ...]:
    """Return all; with many tasks the one that is best for so few micro-batches as show the steady state."""
    count, some = stages.problem.microbatches, _PERIODS * stages.problem.devices
    if 3 * len(stages.bounds) * count <= _TASKS_TO_COMPARE or count <= some:
        return STYLES
    few = dataclasses.replace(stages, problem=dataclasses.replace(stages.problem, microbatches=some))
    order = v_block.lanes(of, some)

    def seconds(style: Style) -> tuple[bool, float]:
        return _ranked(few, squeezed(policy, few, order, of.limit, style))[0]

    return (min(STYLES, key=seconds),)


def v_stages(problem: Problem) -> StagedLayers:
    """Two stages on each device, the second on the way back.  OptionsError as of :meth:`StagedLayers.of`."""
    return StagedLayers.of(problem, 2, v_places(problem.devices))


def v_places(devices: int) -> tuple[int, ...]:
    """Return the device of each stage of a V."""
    return (*range(devices), *reversed(range(devices)))
