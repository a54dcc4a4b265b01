"""Makes LayerPipe: dO and dW apart, heavy layers divided, delayed gradients (arXiv 2108.06629)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import first_within, on_paper, rank
from tf_ooo.planning.building.layerpipe_cuts import NO_SHARES, Cut, TaskLine, best_cuts, seconds
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.model.task import KIND_NUMBER
from tf_ooo.planning.policies.policy import BY_COSTS, Policy
from tf_ooo.planning.simulation.clock import Tasks, run

# The slowest processor may be so much slower than the best, if that sends less; simulated one by one.
_SLACKS = (0, 2, 5, 10, 20, 50)
_SLACK, _SHARES = "slack_percent", "lower_shares"


@dataclass(frozen=True)
class Placement:
    """Says which processor runs which tasks of micro-batch 0, in which shares, and how long each is busy."""

    processor: Mapping[Task, int]
    shares: Mapping[tuple[str, int], tuple[float, ...]]
    busy_s: tuple[float, ...]


def make(problem: Problem) -> Schedule:
    """Return a schedule in which every layer is a stage and all processors are about equally busy.

    Time goes in rounds.  In each round a processor runs all its tasks once, each for the micro-batch whose
    inputs have come: one round later for each step to another processor, so that none waits.  A gradient is
    applied 2 S rounds after its forward pass, S processors lying between the layer and the loss (LayerPipe2,
    arXiv 2512.08160).  Option ``slack_percent``: how much slower than the best the slowest processor may be
    to save communication; without it, the fastest schedule on the link is taken. Option ``lower_shares``:
    ``{layer: (least, most)}``, the share of its dO that the lower of two processors can have; (1, 1): the dO
    cannot be divided. Under a memory limit a micro-batch starts only every second, third, ... round.

    Raises:
        OptionsError: more processors than tasks.
    """
    schedules = [_within_limit(problem, placement) for placement in _placements(problem)]
    if len(schedules) == 1:
        return schedules[0]

    def order(schedule: Schedule) -> tuple[bool, float, float]:
        timeline = on_paper(problem, schedule)
        return rank(problem, timeline)[0], timeline.steady_step_s, timeline.message_bytes

    return min(schedules, key=order)


def placed(problem: Problem, cuts: Sequence[Cut]) -> Schedule:
    """Return the schedule of given cuts, within the memory limit if that is possible."""
    return _within_limit(problem, place(problem.layers, cuts))


def _placements(problem: Problem) -> list[Placement]:
    line = TaskLine.of(problem.layers, inside=True, lower_shares=problem.options.get(_SHARES, NO_SHARES))
    slacks: Sequence[int] = _SLACKS
    if _SLACK in problem.options or not problem.link.of_idle_ends.seconds(1.0):
        slacks = (problem.option(_SLACK, 0),)
    placements = []
    for slack in slacks:
        cuts = best_cuts(line, problem.devices, slack / 100)
        if cuts is None:
            raise OptionsError(
                f"{problem.devices} processors are more than the tasks of {len(problem.layers)} layers; "
                "use fewer devices"
            )
        placements.append(place(problem.layers, cuts))
    return placements


def place(layers: Sequence[LayerCosts], cuts: Sequence[Cut]) -> Placement:
    """Give each task to the processor of its piece of the line."""
    processor, shares = dict[Task, int](), dict[tuple[str, int], tuple[float, ...]]()
    busy_s = [0.0] * (len(cuts) + 1)
    for layer, costs in enumerate(layers):
        inside = [cut for cut in cuts if cut.order and cut.layer == layer]
        first = sum(cut.layer < layer or (cut.layer == layer and not cut.order) for cut in cuts)
        takes = seconds(costs)
        for kind, pieces in _pieces(takes, inside).items():
            for part, (after, share) in enumerate(pieces):
                processor[Task(kind, layer, 0, part)] = first + after
                busy_s[first + after] += takes[kind] * share
            if len(pieces) > 1:
                shares[kind, layer] = tuple(share for _, share in pieces)
        processor[Task("U", layer)] = processor[Task("dW", layer)]
    return Placement(processor, shares, tuple(busy_s))


def _pieces(takes: Mapping[str, float], inside: Sequence[Cut]) -> dict[str, list[tuple[int, float]]]:
    """Return the parts of each task: how many of the layer's cuts lie before a part, and its share."""
    order = inside[0].order if inside else ("F", "dO", "dW")
    pieces: dict[str, list[tuple[int, float]]] = {}
    for number, kind in enumerate(order):
        before = sum(cut.before < number or (cut.before == number and not cut.share) for cut in inside)
        split = [cut.share for cut in inside if cut.before == number and cut.share]
        ends = itertools.pairwise([0.0, *split, 1.0])
        pieces[kind] = [(before + i, b - a) for i, (a, b) in enumerate(ends)]
    for kind, partner in (("dW", "dO"), ("dO", "dW"), ("F", "dO")):
        if kind not in pieces:  # takes no time: beside another task
            known = pieces.get(partner) or next(iter(pieces.values()), [(0, 1.0)])
            pieces[kind] = [(known[-1][0], 1.0)]
    return pieces


def _within_limit(problem: Problem, placement: Placement) -> Schedule:
    depths = _depths(problem, placement)
    slowest = max(depths.values()) + 1
    pauses = _pauses(slowest) if problem.memory_limit_bytes != 0 else [slowest]
    return first_within(problem, (_schedule(problem, placement, depths, pause) for pause in pauses))


def _pauses(slowest: int) -> Iterator[int]:
    """Yield pauses, up to one micro-batch at a time; on a slow link that is millions of rounds."""
    pause = 1
    while pause < slowest:
        yield pause
        pause += max(1, pause // 8)
    yield slowest


def _depths(problem: Problem, placement: Placement) -> dict[Task, int]:
    """Return how many rounds after its micro-batch's first task each task runs."""
    at_once = dict.fromkeys(placement.processor, 0)
    one_batch = replace(problem, microbatches=1)
    relation = Relation(_schedule(one_batch, placement, at_once, 1), problem.layers)
    period_s = max(placement.busy_s) or math.inf
    source, target, travel_s = relation.within_step(problem.link.of_idle_ends)
    away = relation.device[source] != relation.device[target]
    rounds = np.where(away, 1 + np.ceil(travel_s / period_s), 0.0)
    nodes = range(len(relation))
    # Rounds are the seconds of tasks that take none.
    depths = run(Tasks(np.zeros(len(nodes)), source, target, rounds), [[node] for node in nodes]).start_s
    return {relation.task(node): int(depths[node]) for node in nodes}


def _turn(task: Task) -> tuple[bool, int, int, int]:
    """Return a key that sorts one micro-batch's tasks so that each comes after what it needs."""
    down = task.kind != "F"
    return down, -task.stage if down else task.stage, KIND_NUMBER[task.kind], task.part


def _schedule(problem: Problem, placement: Placement, depths: Mapping[Task, int], pause: int) -> Schedule:
    """Return the schedule in which micro-batch m runs a task in round ``m * pause + depth``."""
    count = problem.microbatches
    rounds: dict[int, list[tuple[int, int, Task]]] = {}
    for turn, task in enumerate(sorted(placement.processor, key=_turn)):
        lane = rounds.setdefault(placement.processor[task], [])
        for m in range(count):
            lane.append((m * pause + depths[task], turn, Task(task.kind, task.stage, m, task.part)))
    lanes = {(number, 0): TaskList([row[-1] for row in sorted(lane)]) for number, lane in rounds.items()}
    shares = placement.shares
    return Schedule("layerpipe", "layerpipe", lanes, microbatches=count, asynchronous=True, parts=shares)


POLICY = Policy("layerpipe", ("layerpipe",), make, (_SLACK, _SHARES), of_programs=(_SHARES,), needs=BY_COSTS)
