"""``tf_ooo.plan``: the schedule of a named policy, or the best of all, checked by simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link, check_layers
from tf_ooo.errors import CostError, OptionsError
from tf_ooo.planning.choosing.candidates import best, candidates, make, policy_named, predicted
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, TaskList

DEFAULT_POLICY = "fast_forward"


def plan(
    training_graph: Any = None,
    costs: Any = None,
    schedule: str = DEFAULT_POLICY,
    memory_limit_bytes: int | None = None,
    *,
    layers: Sequence[LayerCosts] | None = None,
    devices: int = 1,
    microbatches: int = 1,
    link: Link | None = None,
    mode: str | None = None,
    **options: Any,
) -> Schedule:
    """An order of all tasks of a training step.

    Args:
        training_graph: from :func:`tf_ooo.classify`; or None, and ``layers``.
        costs: seconds of the graph's ops by name, or a CostTable that holds them; None: the backward
            pass of one device is ordered, and no time predicted.
        schedule: a policy's name, or ``"auto"``: the fastest of the mode, by simulation.
        memory_limit_bytes: of each device.
        layers: planning without a model: a LayerCosts each, for one micro-batch.
        devices: devices of a pipeline, or workers of data parallel training.
        microbatches: micro-batches of one step.
        link: between each two devices.
        mode: single_device, data_parallel, pipeline or layerpipe; None: the policy's own, for
            ``"auto"`` pipeline if there are several devices.
        options: what a policy offers, for example ``group=2`` of modulo.

    Raises:
        OptionsError: an unknown policy, mode or option, or more stages than layers.
        CostError: costs are missing or no numbers.
        MemoryLimitError: no schedule of that name stays within the limit; says the smallest limit
            that one can keep.
    """
    if training_graph is not None and costs is None:
        from tf_ooo.rewriting.planner import plan_graph  # noqa: PLC0415 - imports TensorFlow

        return plan_graph(training_graph, schedule, memory_limit_bytes)
    if training_graph is not None:
        layers = layers_of_graph(training_graph, costs)
        between = link if link is not None else getattr(costs, "link", None)
        problem = _problem(layers, devices, microbatches, between, memory_limit_bytes, options)
        return _only_tasks_of(training_graph, _plan(problem, schedule, mode))
    table = getattr(layers, "layers", layers)
    if table is None:
        raise OptionsError("plan() needs a training graph, or layers=[LayerCosts, ...]")
    between = link if link is not None else getattr(layers, "link", None)
    return _plan(_problem(table, devices, microbatches, between, memory_limit_bytes, options), schedule, mode)


def _problem(
    layers: Any, devices: int, microbatches: int, link: Link | None, limit_bytes: int | None, options: Any
) -> Problem:
    between = Link() if link is None else link
    problem = Problem(check_layers(layers), devices, microbatches, between, limit_bytes, options)
    check_problem(problem)
    return problem


def _plan(problem: Problem, schedule: str, mode: str | None) -> Schedule:
    if schedule == "auto":
        return best(candidates(problem, mode), problem)
    return predicted(make(policy_named(schedule, mode), dataclasses.replace(problem, mode=mode)), problem)


def _only_tasks_of(training_graph: Any, schedule: Schedule) -> Schedule:
    """Layers of a graph may lack a dO of their own; a pipeline's stages are made of whole layers."""
    from tf_ooo.rewriting.lowering import task_ops  # noqa: PLC0415 - with a graph only

    if schedule.stages:
        return schedule
    there = task_ops(training_graph).ops
    lanes = {
        lane: TaskList([task for task in tasks if task in there or task.kind not in ("dO", "dW")])
        for lane, tasks in schedule.lanes.items()
    }
    return dataclasses.replace(schedule, lanes=lanes)


def layers_of_graph(training_graph: Any, costs: Any) -> tuple[LayerCosts, ...]:
    """The costs of a graph's layers; CostError names an op without seconds."""
    from tf_ooo.costs.from_graph import graph_costs  # noqa: PLC0415 - with a graph only

    seconds = getattr(costs, "op_seconds", costs)
    if isinstance(seconds, Mapping) and seconds:
        return graph_costs(training_graph, seconds).layers
    layers = getattr(costs, "layers", ())
    if len(layers) != len(training_graph.layers):
        raise CostError(
            "costs of a graph are seconds by op name, or a CostTable with op_seconds or with the graph's "
            f"{len(training_graph.layers)} layers"
        )
    return tuple(layers)


def check_problem(problem: Problem) -> None:
    """OptionsError unless the numbers are whole and above 0."""
    for name in ("devices", "microbatches"):
        value = getattr(problem, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionsError(f"{name} must be a whole number of at least 1, got {value!r}")
    limit = problem.memory_limit_bytes
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0
    ):
        raise OptionsError(f"memory_limit_bytes must be above 0, got {limit!r}")
    if not isinstance(problem.link, Link):
        raise CostError(f"link must be a tf_ooo.Link, got {problem.link!r:.80}")
