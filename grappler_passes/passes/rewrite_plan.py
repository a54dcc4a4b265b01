"""Says as plain data what to do to a graph. A schedule lowers to one; ``apply_plan.py`` carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType


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
