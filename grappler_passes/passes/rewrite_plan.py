"""Says as plain data what to do to a graph. A schedule lowers to one; the passes read nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING

from grappler_passes.errors import PlanError

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2


@dataclass(frozen=True)
class RewritePlan:
    """Control edges, attributes and devices to give to named nodes.

    ``edges`` are ``(before, after)`` pairs: ``before`` must have run when ``after`` starts.
    ``kinds`` is F, dO, dW, U, comm or other; ``streams`` 0 is the main stream, 1 the sub stream;
    ``priorities`` lower is more urgent; ``stages`` are those of a pipeline; ``joins`` are ops to add that do
    nothing, with their devices, for edges to lead through.
    The mappings are copied and read-only; iteration keeps the order given.
    """

    edges: tuple[tuple[str, str], ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    priorities: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)
    joins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self)[1:]:
            object.__setattr__(self, item.name, MappingProxyType(dict(getattr(self, item.name))))

    @property
    def annotated_nodes(self) -> set[str]:
        return {*self.kinds, *self.layers, *self.streams, *self.priorities, *self.stages}


def require_nodes(graph_def: graph_pb2.GraphDef, names: Iterable[str], done: str) -> None:
    """Raise PlanError for a node of the plan that the graph does not have, and what is ``done`` to it."""
    there = {node.name for node in graph_def.node}
    unknown = next((name for name in names if name not in there), None)
    if unknown is not None:
        raise PlanError(
            f"the plan {done} {unknown!r}, which the graph does not have: it is another graph's plan"
        )
