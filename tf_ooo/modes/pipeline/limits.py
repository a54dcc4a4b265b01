"""Finds the limits of memory that plans keep: what was asked for, or what each device reports."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tf_ooo.errors import MemoryLimitError
from tf_ooo.hosts.cluster import Target
from tf_ooo.hosts.memory import ReportedLimit
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.modes.pipeline.mesh import Mesh
from tf_ooo.modes.pipeline.planning import PlanRequest, peak_within
from tf_ooo.planning.model.problem import lacking_text, most_and_less

_ASKED = "as asked"


@dataclass(frozen=True)
class Limit:
    """Holds the limits of all devices; ``bytes`` None: there is none.

    Attributes:
        bytes: of the device that has most.
        said: who says so, in words; where devices differ, of the one that has least.
        reported: by a device, and not asked for: it changes no plan that keeps it, and a model whose sizes
            are not known is planned without it.
        less_bytes: of each device, how much less it has than ``bytes``; (): all have as much.
    """

    bytes: int | None = None
    said: str = ""
    reported: bool = False
    less_bytes: tuple[int, ...] = ()

    @classmethod
    def of_devices(cls, sizes: Sequence[int], said: str, *, reported: bool = False) -> Limit:
        """Make the limit of devices that have so much each; none of them is empty."""
        most_bytes, less_bytes = most_and_less(sizes)
        return cls(most_bytes, said, reported, less_bytes)

    @property
    def least_bytes(self) -> int | None:
        """Return the limit of the device that has least."""
        return None if self.bytes is None else self.bytes - max(self.less_bytes, default=0)

    def of_each(self, devices: int) -> tuple[int, ...]:
        """Return the limits of so many devices; empty: there is none."""
        if self.bytes is None:
            return ()
        return tuple(self.bytes - less for less in self.less_bytes or (0,) * devices)

    def explained(self, error: MemoryLimitError) -> MemoryLimitError:
        """Add to an error who says so, where nobody asked for the limit, and limits, where they differ."""
        if self.bytes is None or not (self.reported or self.less_bytes):
            return error
        because = error.because
        if self.less_bytes and error.smallest_bytes is not None:
            lacking = lacking_text(self.of_each(len(self.less_bytes)), error.smallest_bytes)
            because = "; ".join(filter(None, (lacking, because)))
        said = f"{self.said}; memory_limit_bytes=0 plans without a limit" if self.reported else ""
        return MemoryLimitError(self.bytes, error.smallest_bytes, error.unknown, because, said)

    @property
    def planned_bytes(self) -> int | None:
        """Return what plans stay within on the device that has most, see :func:`.planning.peak_within`."""
        return None if self.bytes is None else peak_within(self.bytes)

    def is_far_from(self, kept_bytes: float) -> bool:
        """Return whether a plan that keeps a limit of ``kept_bytes`` keeps the reported one, as it is."""
        return self.reported and self.planned_bytes is not None and kept_bytes <= self.planned_bytes


def limit_of(asked_bytes: int | Sequence[int] | None, target: Target, engine: Engine) -> Limit:
    """Return the limit for plans on these devices; of ranks each device has the least of all.  Blocks.

    ``asked_bytes``: None: what devices report; 0: none; a number for each device.
    """
    reported: Mapping[str, ReportedLimit] = {} if asked_bytes is not None else target.memory_limits()
    own = [(limit.bytes, limit.said) if (limit := reported.get(name)) else None for name in target.devices]
    places = itertools.zip_longest(*engine.gather(own))  # all ranks plan alike
    each = [min(map(tuple, filter(None, place)), default=None) for place in places]
    if isinstance(asked_bytes, int):
        return Limit(asked_bytes, _ASKED) if asked_bytes else Limit()
    if asked_bytes is not None:
        return Limit.of_devices(asked_bytes, _ASKED)
    known = [said for said in each if said is not None]
    if not known:
        return Limit()
    most_bytes, _ = max(known)  # a device that says nothing is taken to have as much
    sizes = [most_bytes if said is None else said[0] for said in each]
    return Limit.of_devices(sizes, min(known)[1], reported=True)


def mesh_within(make: Callable[[PlanRequest], Mesh], wanted: PlanRequest, limit: Limit) -> Mesh:
    """Plan with ``make``; the plan without a reported limit stays if it fits. MemoryLimitError: none does."""
    if limit.reported:
        free = make(dataclasses.replace(wanted, memory_limit_bytes=None))
        if limit.is_far_from(free.chosen.limit_bytes):
            return free
    try:
        return make(wanted)
    except MemoryLimitError as error:
        raise limit.explained(error) from error
