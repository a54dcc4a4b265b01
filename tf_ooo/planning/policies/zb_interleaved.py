"""Puts several stages on each device, wherever they balance, with dW in the bubbles (ours)."""

from __future__ import annotations

import functools
from dataclasses import replace

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import fastest
from tf_ooo.planning.building.lane_search import placements, searched
from tf_ooo.planning.building.pipeline import StagedLayers, interleaved
from tf_ooo.planning.building.stages import Bounds
from tf_ooo.planning.building.step_tasks import ListChoices, StepTasks, listed_each, shortest_justified
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Ints
from tf_ooo.planning.policies.policy import Chunks, Needs, Policy

NAME = "zb_interleaved"
_CHUNKS = (2, 3, 4)
_WITH_LIMIT = 0.25
_FEW_TASKS = 100
# Above this a few changes would be all that is tried in some seconds.
_MANY_TASKS = 30_000


def make(problem: Problem) -> Schedule:
    """Put ``chunks`` stages on each of p devices: as the option says, else as many of 2 to 4 as layers allow.

    A device has one of the first p stages, one of the next p and so on, chosen so that F, dO and dW of all
    devices take about as long: layers of unequal costs need no equal stages.  Placement and order are
    searched together, placement for 4p micro-batches at most.  At most 2p micro-batches are in flight on a
    stage, as with ZB-H2.  If the searched order is above the memory limit, a list schedule has as many as
    there is room for.  The fixed order of PyTorch's InterleavedZeroBubble is compared, too.
    """
    chunks = problem.option("chunks", _most_chunks(problem), least=1)
    stages = StagedLayers.of(problem, chunks)
    in_turn = interleaved(stages, chunks, problem.microbatches, 1, delayed=True)
    # Each has at most as many micro-batches in flight as memory has room for.
    in_flight = (stages.most_in_flight(most) for most in (2 * problem.devices, problem.devices))
    lists = listed_each(NAME, stages, (ListChoices(most, by_room=False) for most in in_flight))
    return fastest(problem, [_searched(stages), *lists, stages.schedule(NAME, in_turn)])


def _searched(stages: StagedLayers) -> Schedule:
    """Search places for the stages and an order of all tasks."""
    problem = stages.problem
    shape = problem.devices, problem.microbatches, problem.link, stages.bounds
    place, orders = _placed(tuple(problem.layers), *shape, _effort(problem))
    return replace(stages, place=tuple(place)).with_updates(NAME, orders)


@functools.lru_cache(maxsize=16)
def _placed(
    layers: tuple[LayerCosts, ...], devices: int, microbatches: int, link: Link, bounds: Bounds, effort: float
) -> tuple[list[int], list[Ints]]:
    """Return the device of each stage and each device's order, both found for few micro-batches.

    The result is cached: plans with and without a memory limit ask for the same.
    """
    problem, in_flight = Problem(layers, devices, microbatches, link), 2 * devices
    stages = StagedLayers(problem, bounds)
    tasks = few = StepTasks(stages, in_flight)
    if problem.shortened.microbatches < microbatches:
        few = StepTasks(replace(stages, problem=problem.shortened), in_flight)
    # Where devices differ, stages are cut for those that they are dealt out to in turn.
    unequal = len(set(link.speeds_of(range(devices)))) > 1
    places = [stages.devices] if unequal else placements(stages.seconds, devices)
    best = searched(few, stages.seconds.sum(axis=0), places, 0.0 if unequal else effort)
    times = best.times if few is tasks else shortest_justified(tasks, best.place)
    return best.place, tasks.orders(best.place, times)


def _effort(problem: Problem) -> float:
    """Return the effort: smaller with a limit, where several cuts are tried; 0 where layers run again.

    Small problems get the same effort, so that the leanest plan needs no more memory than the fastest.
    """
    limit = problem.memory_limit_bytes
    if problem.recomputed:  # one of many sets of layers that are tried
        return 0.0
    if limit is None or len(problem.layers) * problem.microbatches <= _FEW_TASKS:
        return 1.0
    return _WITH_LIMIT if limit else 0.0


def _most_chunks(problem: Problem) -> int:
    if problem.cut:
        return max(1, len(problem.cut) // problem.devices)
    layers, devices = len(problem.layers), problem.devices
    most = layers // devices
    if most < _CHUNKS[0]:
        stages = f"{_CHUNKS[0]} stages on each of {devices} devices"
        raise OptionsError(f"schedule {NAME!r}: {stages} are more than the {layers} layers")
    return min(most, _CHUNKS[-1])


POLICY = Policy(
    NAME,
    ("pipeline",),
    make,
    ("chunks",),
    needs=Needs(costs=True, link=True, chunks=Chunks(_CHUNKS, option="chunks", largest=True)),
    auto_tasks=_MANY_TASKS,
)
