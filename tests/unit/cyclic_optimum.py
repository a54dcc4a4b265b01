"""A second formulation of the optimum in exact_optimum.py, which assumes nothing of rounds.

One step's tasks have start times, the step is repeated every ``period``, and whatever shares a machine must
not overlap with itself nor with the two steps that follow, so that a dW may also run beside the next step's
forward.  It takes seconds for five layers.
"""

from __future__ import annotations

from tests.unit.exact_optimum import MACHINES, durations, solved, waits

STEPS = 3


def cyclic_optimum(layers, limit_s):
    from ortools.sat.python import cp_model

    model, took = cp_model.CpModel(), durations(layers)
    horizon = sum(took.values()) + 1
    period = model.new_int_var(0, horizon, "period")
    start = {task: model.new_int_var(0, 2 * horizon, f"start {task}") for task in took}
    for earlier, later in waits(layers):
        model.add(start[later] >= start[earlier] + took[earlier])
    for i in range(len(layers)):
        model.add(start["F", i] + period >= start["U", i] + took["U", i])
    for kinds in MACHINES:
        intervals = []
        for task in took:
            if task[0] in kinds and took[task]:
                for step in range(STEPS):
                    shifted = model.new_int_var(0, 6 * horizon, f"start {task} of {step}")
                    model.add(shifted == start[task] + step * period)
                    intervals.append(model.new_fixed_size_interval_var(shifted, took[task], f"{task} {step}"))
        model.add_no_overlap(intervals)
    model.minimize(period)
    return solved(model, limit_s)
