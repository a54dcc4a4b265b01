"""Smaller learning rates for late gradients at first (PipeMare, arXiv 1910.05124, technique 1).

In the first ``rate_warmup_steps`` rounds the learning rate of a layer whose gradients are d steps late is
divided by d to the power of 1 - n / rounds: by d at first, by nothing in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassResult, copy_of
from grappler_passes.passes.relaxations import Relaxation
from tf_ooo.errors import BackendError
from tf_ooo.modes.layerpipe.accesses import accesses
from tf_ooo.modes.layerpipe.stages import Stages
from tf_ooo.modes.layerpipe.traced import Traced

RATE = "_ooo_rate"


def factor_name(delay: int) -> str:
    """Return the placeholder for what the learning rate of such layers is multiplied with."""
    return f"{RATE}/{delay}"


@dataclass(frozen=True)
class Factors:
    """Holds the factors of learning rates, by delay; ``count``: of the batches that have come in."""

    delays: frozenset[int] = frozenset()
    warmup_steps: int = 1
    count: tf.Variable | None = None

    def given(self) -> dict[str, tf.Tensor]:
        """Return the factors in this round, by placeholder."""
        if self.count is None or not self.delays:
            return {}
        step = tf.cast(self.count.read_value(), tf.float32)
        left = 1.0 - tf.minimum(step / float(self.warmup_steps), 1.0)
        return {factor_name(delay): tf.pow(float(delay), -left) for delay in self.delays}


def with_factors(traced: Traced, stages: Stages, rate_handle: str | None) -> tuple[Traced, frozenset[int]]:
    """Return the step with learning rates that are multiplied by :class:`Factors`; for which delays.

    ``rate_handle``: the placeholder of the learning rate's variable.  Raises BackendError where that is no
    variable that updates read, but a schedule.
    """
    layers = rate_reads(traced, rate_handle)
    late = {name: stages.delay_steps(layer) for name, layer in layers.items() if stages.delay_steps(layer)}
    where = {f"{name}/{RATE}": traced.where[name] for name in late}
    outputs = {factor_name(delay): traced.outputs[name] for name, delay in late.items()}
    outputs |= {f"{name}/{RATE}": traced.outputs[name] for name in late}
    return traced.rewritten(FactorsPass(late), where, outputs), frozenset(late.values())


def rate_reads(traced: Traced, rate_handle: str | None) -> dict[str, int]:
    """The reads of the learning rate by updates, and the layers of these; raises as :func:`with_factors`."""
    readings = {
        access.name: traced.where[access.name][1]
        for access in accesses(traced.index)
        if access.op == "ReadVariableOp"
        and rate_handle in access.states
        and traced.where.get(access.name, ("",))[0] == "U"
    }
    if not readings:
        raise BackendError(
            "rate_warmup_steps= needs a learning rate that is a number, and no legacy optimizer; "
            "a LearningRateSchedule can warm up itself"
        )
    return readings


@dataclass(frozen=True)
class FactorsPass(Pass):
    """Updates read the product of the learning rate and a factor; ``late``: the delay of each reading."""

    late: Mapping[str, int]
    name: ClassVar[str] = "factors"
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.SIDE_EFFECTS})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """The readings stay, each with one product for all its readers."""
        multiplied = copy_of(graph_def)
        readers = [node for node in multiplied.node if any(text in self.late for text in node.input)]
        for node in readers:
            node.input[:] = [f"{text}/{RATE}" if text in self.late else text for text in node.input]
        dtype = next((node.attr["dtype"] for node in graph_def.node if node.name in self.late), None)
        for delay in set(self.late.values()):
            placeholder = multiplied.node.add(name=factor_name(delay), op="Placeholder")
            placeholder.attr["dtype"].CopyFrom(dtype)
        for name, delay in self.late.items():
            product = multiplied.node.add(name=f"{name}/{RATE}", op="Mul", input=[name, factor_name(delay)])
            product.attr["T"].CopyFrom(dtype)
        return PassResult(multiplied, bool(self.late), replaced=frozenset(node.name for node in readers))
