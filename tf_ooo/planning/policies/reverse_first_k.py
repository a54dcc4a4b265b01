"""Runs reverse first-k for data parallel training (EuroSys 2022, doi 10.1145/3492321.3519563): dW of the
first layers come last, lowest first, as the next forward needs them."""

from __future__ import annotations

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import first_or_leanest, on_paper
from tf_ooo.planning.building.step_model import by_period, one_worker, order, tasks_of
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.policies.policy import Needs, Policy

NAME = "reverse_first_k"
_COMPARED = 5


def make(problem: Problem) -> Schedule:
    """Return the schedule for option ``k``; without it, for the k that simulates fastest within memory.

    All k are tried with up to 256 layers: the throughput need not rise and then fall with k.
    """
    layers = len(problem.layers)
    if "k" in problem.options:
        k = problem.option("k", 0)
        if k > layers:
            raise OptionsError(f"k must be within 0..{layers}, the number of layers, got {k}")
        return schedule(problem, k)
    if problem.devices == 1:
        return schedule(problem, 0)
    schedules = [schedule(problem, k) for k in by_period(problem)]
    if any(layer.occupancy for layer in problem.layers):
        # The simulator lets updates slow computation down, the model that sorted these does not.
        compared = sorted(schedules[:_COMPARED], key=lambda each: on_paper(problem, each).steady_step_s)
        schedules[:_COMPARED] = compared
    return first_or_leanest(problem, schedules)


def schedule(problem: Problem, k: int) -> Schedule:
    """Return reverse first-k with a given k, from 0 to the number of layers."""
    backward = tasks_of(order(len(problem.layers), k))
    sent = [Task("comm", task.stage) for task in backward if task.kind == "dW"]
    return one_worker(NAME, problem, backward, sent)


POLICY = Policy(NAME, ("data_parallel",), make, ("k",), needs=Needs(costs=True, link=True, unless=("k",)))
