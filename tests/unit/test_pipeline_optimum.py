"""zb_auto and zb_search against the optimum of small pipelines: OR-Tools CP-SAT has a model of its own."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

NO_LINK = Link()

cp_model = pytest.importorskip("ortools.sat.python.cp_model")


def optimum_s(costs, microbatches, place=None, link=NO_LINK, tied=False):
    """Shortest makespan; micro-batches of one kind and stage keep their order, as equal tasks may.

    ``place``: the device of each stage; None: each has its own.  Of ``link`` the whole latencies count.
    ``tied``: each gradient of the last stage goes to the first one.
    """
    model, stages = cp_model.CpModel(), range(len(costs))
    horizon = (sum(map(sum, costs)) + 2 * len(costs) * int(link.latency_s)) * microbatches
    start, intervals = {}, defaultdict(list)
    for kind, stage, batch in itertools.product(range(3), stages, range(microbatches)):
        at = start[kind, stage, batch] = model.new_int_var(0, horizon, "")
        device = stage if place is None else place[stage]
        intervals[device].append(model.new_fixed_size_interval_var(at, costs[stage][kind], ""))
    for of_device in intervals.values():
        model.add_no_overlap(of_device)
    end = model.new_int_var(0, horizon, "")
    for (kind, stage, batch), at in start.items():
        done = at + costs[stage][kind]
        model.add(end >= done)
        if kind < 2:
            model.add(start[kind + 1, stage, batch] >= done)
        if batch + 1 < microbatches:
            model.add(start[kind, stage, batch + 1] >= at)
        reader = stage + (1, -1, len(costs))[kind]
        if reader in stages:
            ends = (stage, reader) if place is None else (place[stage], place[reader])
            model.add(start[kind, reader, batch] >= done + lag_s(*ends, link))
        if tied and (kind, stage) == (2, len(costs) - 1):
            model.add(end >= done + lag_s(place[-1], place[0], link))
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = 60, 2
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value


def lag_s(one, other, link):
    return 0 if one == other else int(link.between(one, other).latency_s)


@pytest.mark.parametrize("seed", range(10))
def test_within_2_percent_of_the_optimum(seed):
    chance = random.Random(seed)
    stages, microbatches = chance.randint(2, 4), chance.randint(1, 5)
    costs = [tuple(chance.randint(1, 9) for _ in range(3)) for _ in range(stages)]
    layers = [LayerCosts(*row) for row in costs]
    made = plan(layers=layers, schedule="zb_auto", devices=stages, microbatches=microbatches, mode="pipeline")
    best_s = optimum_s(costs, microbatches)
    assert best_s <= simulate(made, layers).makespan_s <= 1.02 * best_s


def test_the_optimum_by_hand():
    """Two stages, one micro-batch: F 1 + 2, dO 3 + 1, then dW 4; stage 1's dW runs beside."""
    assert optimum_s([(1, 1, 4), (2, 3, 2)], 1) == 1 + 2 + 3 + 1 + 4


def best_cut_s(costs, devices, microbatches, link=NO_LINK, tied=False):
    """Shortest makespan of all cuts and placements, each layer on any device; neighbours are one stage."""
    best_s = float("inf")
    for owner in itertools.product(range(devices), repeat=len(costs)):
        first_seen = list(dict.fromkeys(owner))
        # The others are the same with devices renamed, or one has no layer.
        if len(first_seen) < devices or (link.near is None and first_seen != list(range(devices))):
            continue
        groups = [[i for i, _ in of] for _, of in itertools.groupby(enumerate(owner), lambda row: row[1])]
        stages = [tuple(map(sum, zip(*(costs[i] for i in group), strict=True))) for group in groups]
        best_s = min(
            best_s, optimum_s(stages, microbatches, [owner[group[0]] for group in groups], link, tied)
        )
    return best_s


@pytest.mark.parametrize("seed", range(14))
def test_searched_cuts_are_within_2_percent_of_the_optimum(seed):
    chance = random.Random(seed)
    devices, microbatches = chance.randint(2, 3), chance.randint(1, 3)
    costs = [tuple(chance.randint(1, 9) for _ in range(3)) for _ in range(chance.randint(devices, 5))]
    layers = [LayerCosts(*row) for row in costs]
    made = plan(layers=layers, schedule="zb_search", devices=devices, microbatches=microbatches)
    best_s = best_cut_s(costs, devices, microbatches)
    assert best_s <= simulate(made, layers).makespan_s <= 1.02 * best_s


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_where_stages_are_is_within_2_percent_of_the_optimum(seed, tied):
    """Devices 0 and 2 are near, or none is; with tied weights the last stage sends to the first one, too."""
    chance = random.Random(seed)
    microbatches, layers = chance.randint(1, 3), chance.randint(3, 4)
    costs = [tuple(chance.randint(1, 9) for _ in range(3)) for _ in range(layers)]
    link = Link(float(chance.randint(2, 9)), near=Link(float(chance.randint(0, 1))), groups=(0, 1, 0))
    if tied and seed % 2:
        link = link.of_one_tier
    rows = [LayerCosts(*row) for row in costs]
    if tied:
        rows[-1] = LayerCosts(*costs[-1], tied=((0, 1.0),))
    made = plan(layers=rows, schedule="zb_search", devices=3, microbatches=microbatches, link=link)
    best_s = best_cut_s(costs, 3, microbatches, link, tied)
    assert best_s <= simulate(made, rows, link).makespan_s <= 1.02 * best_s
