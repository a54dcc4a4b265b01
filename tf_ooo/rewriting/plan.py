"""Defines ``tf_ooo.plan``: it makes a schedule from a classified graph, or from the costs of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from grappler_passes.graph.training_graph import TrainingGraph, backward_tasks
from tf_ooo.costs.from_graph import GraphCosts, graph_costs
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.sources import costs_for_model, refuse_of_models, rows_of_micro_batch, with_rows
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, OptionsError, did_you_mean
from tf_ooo.planning.building.stages import Stages
from tf_ooo.planning.choosing.figures import stated
from tf_ooo.planning.choosing.on_paper import (
    best_split,
    microbatches_of,
    plan_problem,
    problem_of,
    refuse_beside_splits,
)
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.policies import POLICIES
from tf_ooo.rewriting.lowering import only_tasks


def plan(
    training_graph: TrainingGraph | None = None,
    costs: CostTable | GraphCosts | Mapping[str, float] | None = None,
    schedule: str = "auto",
    memory_limit_bytes: int | list[int] | tuple[int, ...] | None = None,
    *,
    layers: Sequence[LayerCosts] | CostTable | None = None,
    model: Any = None,
    batch: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    measure: bool = False,
    input_shape: Any = None,
    devices: int = 1,
    microbatches: int | None = None,
    link: Link | None = None,
    mode: str | None = None,
    stages: Stages | None = None,
    splits: bool = False,
    recompute: str = "none",
    **options: Any,
) -> Schedule:
    """Return an order of all tasks of a training step; its ``assumptions`` say what the predictions hold for.

    Args:
        training_graph: a graph from :func:`tf_ooo.classify`; or None, with ``layers`` or ``model``.
        costs: seconds of the graph's ops by name, or a CostTable that holds them; None: the backward pass of
            one device is ordered, without predicting its time.
        schedule: a policy's name, or ``"auto"``: the fastest policy of the mode, by simulation.
        memory_limit_bytes: every device's limit, or a list with one limit per device, in order.
        layers: to plan without a model: the LayerCosts of each layer, for one micro-batch.
        model: a Keras model, the path of a saved one, or ``"MODULE:NAME"`` of a class, function or model; its
            training step is traced.
        batch: rows of the whole batch; None: 32 per micro-batch of a model, else the CostTable's rows.
        device: the device to plan a model for, a name in ``tf_ooo/costs/devices.py``; None: a V100.
        precision: the model's precision, ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp16"``; None: the one in
            which TensorFlow multiplies the model's types.
        measure: whether a model's ops are measured on this machine, not calculated.
        input_shape: for a model that is not built, or whose sizes are open: ``(128, 64)``, without the batch,
            or ``"ids=128:int32"``; a list or a map for several inputs.
        devices: devices of a pipeline, or workers of data parallel training.
        microbatches: micro-batches of one step; None: 8 in a pipeline of several devices, as a fit takes
            (with BatchNormalization and few rows it takes fewer), one in other modes.
        link: the link between each two devices.
        mode: single_device, data_parallel, pipeline or layerpipe; None: the policy's own mode; with
            ``"auto"`` a pipeline if there are several devices.
        stages: a pipeline's stages by hand: the names of the layers (numbers as texts if they have none) at
            which stages begin, or a list of names for each stage; None: the schedules cut the stages.
        splits: whether to compare all divisions of the devices into replicas of a pipeline, each with its
            share of the micro-batches and its best schedule.  The result is the schedule of one replica in
            the fastest division: ``workers`` counts replicas, ``predicted_step_s`` includes averaging.
        recompute: layers whose forward runs again before their dO, so that less is kept: ``"none"``,
            ``"all"`` layers that then keep less, or ``"auto"``: as few seconds of them as the memory limit
            needs.  The schedule's ``recompute`` names these layers.
        options: a policy's own options, for example ``group=2`` of modulo.

    Raises:
        OptionsError: an unknown policy, mode or option, or more stages than layers; a model that cannot be
            loaded or traced.
        CostError: costs are missing or no numbers; the device is unknown or lacks the precision.
        MemoryLimitError: no schedule of that name stays within the limit; the error says the smallest limit
            that one of them can keep.
    """
    _refuse_unknown(options)
    of_model = {"device": device, "precision": precision, "measure": measure, "input_shape": input_shape}
    microbatches = microbatches_of(microbatches, devices, schedule, mode, batch)
    rows = rows_of_micro_batch(batch, microbatches)
    if model is None:
        refuse_of_models(**of_model)
    elif training_graph is not None or layers is not None:
        raise OptionsError("plan(): give a model, or a training graph, or layers; not two of them")
    else:
        layers = costs_for_model(model, batch=rows, **of_model)
    if training_graph is not None and (stages is not None or splits or recompute != "none"):
        raise OptionsError(
            "stages=, splits= and recompute= are for a model or layers; a training graph is of one device"
        )
    if training_graph is not None and costs is None:
        return _order_of(training_graph, schedule, memory_limit_bytes)
    own_costs, table = _costs_of(training_graph, costs, layers, rows)
    if link is None and table is not None:
        link = table.link
    problem = problem_of(
        own_costs, devices, microbatches, link, memory_limit_bytes, options, stages, recompute
    )
    if splits:
        refuse_beside_splits(problem, schedule, mode)
        return best_split(problem, table)
    chosen = plan_problem(problem, schedule, mode)
    planned = dataclasses.replace(chosen.schedule, assumptions=stated(chosen, table))
    if training_graph is None or planned.stages:  # a pipeline's stages are made of whole layers
        return planned
    return only_tasks(planned, {Task(*task) for task in backward_tasks(training_graph).ops})


def _costs_of(
    training_graph: TrainingGraph | None,
    costs: CostTable | GraphCosts | Mapping[str, float] | None,
    layers: Sequence[LayerCosts] | CostTable | None,
    batch: int | None,
) -> tuple[Sequence[LayerCosts], CostTable | None]:
    """Return the costs of all layers for micro-batches of ``batch`` rows, and their table, if any."""
    given = layers if training_graph is None else costs
    table = with_rows(given, batch) if isinstance(given, CostTable) else None
    if training_graph is not None:
        return _layers_of(training_graph, costs), table
    if layers is None:
        raise OptionsError("plan() needs a model, a training graph, or layers=[LayerCosts, ...]")
    return layers.layers if isinstance(layers, CostTable) else layers, table


def _order_of(
    graph: TrainingGraph, schedule: str, limit_bytes: int | list[int] | tuple[int, ...] | None
) -> Schedule:
    """Order a graph whose ops have no costs; OptionsError if several devices' limits are given."""
    from tf_ooo.rewriting.one_device import plan_graph  # noqa: PLC0415 - imports TensorFlow

    if isinstance(limit_bytes, (list, tuple)):
        raise OptionsError(
            f"memory_limit_bytes={limit_bytes!r:.80}: a training graph is of one device, which has one limit"
        )
    return plan_graph(graph, schedule, limit_bytes)


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    offered = {name for policy in POLICIES.values() for name in policy.options}
    for name, value in options.items():
        if name not in offered:
            hint = did_you_mean(name, [*signature(plan).parameters, *offered])
            raise OptionsError(f"plan(): unknown option {name}={value!r:.80}{hint}")


def _layers_of(
    training_graph: TrainingGraph, costs: CostTable | GraphCosts | Mapping[str, float] | None
) -> tuple[LayerCosts, ...]:
    """Return the costs of a graph's layers; CostError names an op without seconds."""
    seconds = costs.op_seconds if isinstance(costs, CostTable) else costs
    if isinstance(seconds, Mapping) and seconds:
        return graph_costs(training_graph, seconds).layers
    layers = costs.layers if isinstance(costs, (CostTable, GraphCosts)) else ()
    if len(layers) != len(training_graph.layers):
        raise CostError(
            "costs of a graph are seconds by op name, or a CostTable with op_seconds or with the graph's "
            f"{len(training_graph.layers)} layers"
        )
    return layers
