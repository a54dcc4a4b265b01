"""Describes what was done to the graph of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.planning.model.schedule import Schedule

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2


@dataclass(frozen=True)
class Orders:
    """The orders of a step's ops, as planned and as TensorFlow would choose, that a memory limit is checked
    with.

    ``open_sizes``: inputs of another size may come without another trace.
    """

    planned: tuple[str, ...]
    stock: tuple[str, ...]
    stock_peak_bytes: int
    open_sizes: bool


@dataclass(frozen=True)
class RewriteResult:
    """A rewritten graph, and what was done to it.

    Attributes:
        training_graph: the step as it was classified; of several in one graph the last.
        moved_ops: ops of the tasks that wait for a control edge that was added, or run on another stream.
        added_edges: control edges, or barriers, that were added.
        plan_seconds: from the graph's arrival to the rewritten one.
        mixed: ops that compute dO and dW together, each with the reason why they were not taken apart.
        notes: what was left out, for the report.
        orders: with a memory limit only.
    """

    training_graph: TrainingGraph
    schedule: Schedule
    graph_def: graph_pb2.GraphDef
    moved_ops: int
    added_edges: int
    plan_seconds: float
    mixed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    orders: Orders | None = None
    modified: ClassVar[bool] = True  # ops are at least annotated
