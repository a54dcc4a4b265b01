"""One device: the regions of all dW together, improved by simulation from where joint scheduling ends."""

from __future__ import annotations

import random

from tf_ooo.planning.building import joint
from tf_ooo.planning.building.common import peak_bytes
from tf_ooo.planning.building.joint import Placed
from tf_ooo.planning.building.regions import MainStream, Region, own, schedule
from tf_ooo.planning.building.search_order import Effort
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule

_AT_ONCE = 4


def make(policy: str, problem: Problem, effort: Effort, seed: int) -> Schedule:
    """Moves a few dW at a time to other regions and keeps what is faster and fits into memory."""
    joint.check(problem, policy)
    best = joint.best_placement(problem)
    best_s = joint.step_s(problem, best)
    bound_s = sum(layer.forward_s + layer.output_grad_s for layer in problem.layers)
    draw = random.Random(seed)
    while len(problem.layers) > 1 and not effort.over and best_s > bound_s:
        effort.spend(best_s)
        trial = _changed(best, draw)
        step_s = joint.step_s(problem, trial)
        if step_s < best_s * (1 - 1e-9) and _fits(problem, trial):
            best, best_s = trial, step_s
    return schedule(policy, problem, best)


def _changed(placement: Placed, draw: random.Random) -> Placed:
    stream = MainStream(len(placement))
    changed = dict(placement)
    for _ in range(draw.randint(1, min(_AT_ONCE, len(placement) - 1))):
        layer = draw.randrange(1, len(placement))
        anywhere = stream.regions[draw.choice(stream.allowed(layer))]
        changed[layer] = draw.choice((None, own(layer), anywhere, _beside(placement, layer, stream, draw)))
    return changed


def _beside(placement: Placed, layer: int, stream: MainStream, draw: random.Random) -> Region:
    """A region near the present one."""
    region, allowed = placement[layer] or own(layer), stream.allowed(layer)
    here = allowed.start if region is None else stream.place(region)
    place = here + draw.choice((-2, -1, 1, 2))
    return stream.regions[min(max(place, allowed.start), allowed.stop - 1)]


def _fits(problem: Problem, placement: Placed) -> bool:
    limit = problem.memory_limit_bytes
    return limit is None or peak_bytes(problem, schedule("tried", problem, placement)) <= limit
