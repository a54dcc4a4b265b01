"""Smaller learning rates for late gradients at first (PipeMare, arXiv 1910.05124, technique 1).

In the first ``rate_warmup_steps`` rounds the learning rate of a layer whose gradients are d steps late is
divided by d to the power of 1 - n / rounds: by d at first, by nothing in the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.effects import states_of
from tf_ooo.errors import BackendError
from tf_ooo.modes.layerpipe.stages import Stages
from tf_ooo.modes.layerpipe.traced import Traced

RATE = "_ooo_rate"


def factor_name(delay: int) -> str:
    """The placeholder for what the learning rate of such layers is multiplied with."""
    return f"{RATE}/{delay}"


def factors(delays: set[int], step: Any, steps: int) -> dict[str, Any]:
    """The factors in a step, by placeholder; ``step`` is a tensor."""
    import tensorflow as tf

    left = 1.0 - tf.minimum(tf.cast(step, tf.float32) / float(steps), 1.0)
    return {factor_name(delay): tf.pow(float(delay), -left) for delay in delays}


def with_factors(traced: Traced, stages: Stages, rate_handle: str | None) -> tuple[Traced, set[int]]:
    """The step with learning rates that are multiplied by :func:`factors`; for which delays.

    Args:
        traced: the step.
        stages: where tasks run.
        rate_handle: the placeholder of the learning rate's variable.

    Raises:
        BackendError: the learning rate is no variable that updates read, but a schedule.
    """
    layers = rate_reads(traced, rate_handle)
    late = {name: stages.delay_steps(layer) for name, layer in layers.items() if stages.delay_steps(layer)}
    return _multiplied(traced, late), set(late.values())


def rate_reads(traced: Traced, rate_handle: str | None) -> dict[str, int]:
    """The reads of the learning rate by updates, and the layers of these; raises as :func:`with_factors`."""
    index = traced.index
    found: dict[str, int] = {}
    for i, op in enumerate(index.ops):
        kind, layer = traced.where.get(index.names[i], ("", 0))
        if op == "ReadVariableOp" and kind == "U" and rate_handle in states_of(index, i):
            found[index.names[i]] = layer
    if not found:
        raise BackendError(
            "rate_warmup_steps= needs a learning rate that is a number, and no legacy optimizer; "
            "a LearningRateSchedule can warm up itself"
        )
    return found


def _multiplied(traced: Traced, late: Mapping[str, int]) -> Traced:
    graph_def = type(traced.graph_def)()
    graph_def.CopyFrom(traced.graph_def)
    for node in graph_def.node:
        for place, text in enumerate(node.input):
            if text in late:
                node.input[place] = f"{text}/{RATE}"
    where = dict(traced.where)
    outputs: dict[str, Any] = {node.name: traced.outputs[node.name] for node in traced.graph_def.node}
    dtype = next(node.attr["dtype"] for node in traced.graph_def.node if node.name in late) if late else None
    for delay in set(late.values()):
        placeholder = graph_def.node.add(name=factor_name(delay), op="Placeholder")
        placeholder.attr["dtype"].CopyFrom(dtype)
        outputs[placeholder.name] = outputs[next(name for name in late if late[name] == delay)]
    for name, delay in late.items():
        product = graph_def.node.add(name=f"{name}/{RATE}", op="Mul", input=[name, factor_name(delay)])
        product.attr["T"].CopyFrom(dtype)
        where[product.name], outputs[product.name] = traced.where[name], outputs[name]
    return dataclasses.replace(
        traced, graph_def=graph_def, index=GraphIndex(graph_def), where=where, outputs=outputs
    )
