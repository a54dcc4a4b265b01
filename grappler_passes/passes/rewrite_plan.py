"""What to do to a graph, as plain data.  A schedule lowers to one; the passes read it and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from grappler_passes.errors import PlanError

_FORMAT = "tf_ooo.rewrite_plan.v1"
_STRING_MAPS = ("kinds", "devices", "joins")
_INT_MAPS = ("layers", "streams", "priorities", "stages")


@dataclass(frozen=True)
class RewritePlan:
    """Control edges, attributes and devices to give to named nodes.

    ``edges`` are ``(before, after)`` pairs: ``before`` must have run when ``after`` starts.
    ``kinds`` is F, dO, dW, U, comm or other; ``streams`` 0 is the main stream, 1 the sub stream;
    ``priorities`` lower is more urgent; ``separate`` names ops to split into dO and dW parts;
    ``stages`` are those of a pipeline; ``joins`` are ops to add that do nothing, with their devices, for
    edges to lead through.
    The mappings are copied and read-only; iteration keeps the order given.
    """

    edges: tuple[tuple[str, str], ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    priorities: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    separate: tuple[str, ...] = ()
    stages: Mapping[str, int] = field(default_factory=dict)
    joins: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pairs = tuple((str(before), str(after)) for before, after in self.edges)
        object.__setattr__(self, "edges", pairs)
        object.__setattr__(self, "separate", tuple(self.separate))
        for name in (*_STRING_MAPS, *_INT_MAPS):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __hash__(self) -> int:
        return hash(
            (
                self.edges,
                self.separate,
                *(tuple(sorted(getattr(self, m).items())) for m in (*_STRING_MAPS, *_INT_MAPS)),
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping does not pickle, so a plan travels as its text.
        return RewritePlan.from_json, (self.to_json(),)

    @property
    def annotated_nodes(self) -> set[str]:
        """Names of all nodes that get at least one attribute."""
        return {*self.kinds, *self.layers, *self.streams, *self.priorities, *self.stages}

    def to_json(self) -> str:
        """The plan as text; ``from_json`` gives an equal plan back."""
        data: dict[str, Any] = {"format": _FORMAT}
        for item in fields(self):
            value = getattr(self, item.name)
            data[item.name] = dict(value) if isinstance(value, Mapping) else [*value]
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> RewritePlan:
        """Read :meth:`to_json` text.  Raises PlanError where it is not such a text."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
            raise PlanError(f"not a rewrite plan: 'format' must be {_FORMAT!r}")
        unknown = set(data) - {item.name for item in fields(cls)}
        if unknown:
            raise PlanError(f"unknown fields in rewrite plan: {sorted(unknown)}")
        return cls(
            edges=_edges(data.get("edges", [])),
            separate=_strings(data.get("separate", [])),
            **{name: _mapping(name, data.get(name, {}), str) for name in _STRING_MAPS},
            **{name: _mapping(name, data.get(name, {}), int) for name in _INT_MAPS},
        )


def _edges(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list):
        raise PlanError("'edges' must be a list of [before, after]")
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(end, str) for end in pair):
            raise PlanError(f"'edges' must be a list of [before, after], got {pair!r}")
    return tuple((before, after) for before, after in value)


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PlanError("'separate' must be a list of node names")
    return tuple(value)


def _mapping(name: str, value: Any, value_type: type) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{name!r} must be an object")
    for key, item in value.items():
        if not isinstance(item, value_type) or isinstance(item, bool):
            raise PlanError(f"{name!r}[{key!r}] must be {value_type.__name__}, got {item!r}")
    return value
