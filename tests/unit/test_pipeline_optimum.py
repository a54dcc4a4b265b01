"""zb_auto against the optimum of small pipelines, found by OR-Tools CP-SAT from a model of its own."""

from __future__ import annotations

import random

import pytest

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

cp_model = pytest.importorskip("ortools.sat.python.cp_model")


def optimum_s(costs, microbatches):
    """Shortest makespan; micro-batches of one kind and stage keep their order, as equal tasks may."""
    model, stages = cp_model.CpModel(), range(len(costs))
    horizon = sum(map(sum, costs)) * microbatches
    start = {}
    for stage in stages:
        intervals = []
        for batch in range(microbatches):
            for kind in range(3):
                at = start[kind, stage, batch] = model.new_int_var(0, horizon, "")
                intervals.append(model.new_fixed_size_interval_var(at, costs[stage][kind], ""))
        model.add_no_overlap(intervals)
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
            model.add(start[kind, reader, batch] >= done)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = 60, 2
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value


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
