"""Which limit of memory plans keep: what was asked for, or the least that devices report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from tf_ooo.errors import MemoryLimitError
from tf_ooo.hosts.memory_limits import least_of
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.target import Target
from tf_ooo.modes.pipeline.mesh import Mesh
from tf_ooo.modes.pipeline.planning import Wanted, peak_within

_ASKED = "as asked"
NONE_WANTED = 0


@dataclass(frozen=True)
class Limit:
    """Of each device; ``bytes`` None: there is none.

    Attributes:
        said: who says so, in words.
        reported: by a device, and not asked for: it changes no plan that keeps it, and a model whose sizes
            are not known is planned without it.
    """

    bytes: int | None = None
    said: str = ""
    reported: bool = False

    def explained(self, error: MemoryLimitError) -> MemoryLimitError:
        """With who says so, where nobody asked for the limit."""
        if not self.reported or self.bytes is None:
            return error
        said = f"{self.said}; memory_limit_bytes={NONE_WANTED} plans without a limit"
        return MemoryLimitError(self.bytes, error.smallest_bytes, error.unknown, error.because, said)

    @property
    def planned_bytes(self) -> int | None:
        """As :func:`tf_ooo.modes.pipeline.planning.peak_within`."""
        return None if self.bytes is None else peak_within(self.bytes)

    def is_far_from(self, peak_bytes: float) -> bool:
        """Whether a peak keeps a reported limit, so that nothing has to be planned for it."""
        return self.reported and self.planned_bytes is not None and peak_bytes <= self.planned_bytes


def limit_of(asked_bytes: int | None, target: Target, engine: Engine) -> Limit:
    """The limit for plans on these devices; ranks take the least that devices of one of them report.  Blocks.

    ``asked_bytes``: None: what devices report; 0: none.
    """
    least = least_of(target.memory_limits()) if asked_bytes is None else None
    mine = None if least is None else (least.bytes, least.said)
    if engine.size > 1:  # all plan alike
        reported = [each for each in engine.gather(mine) if each is not None]
        mine = min(map(tuple, reported), default=None)
    if asked_bytes is not None:
        return Limit(asked_bytes, _ASKED) if asked_bytes else Limit()
    return Limit() if mine is None else Limit(*mine, reported=True)


def mesh_within(make: Callable[[Wanted], Mesh], wanted: Wanted, limit: Limit) -> Mesh:
    """What ``make`` plans; under a reported limit that of no limit, where it keeps it.

    MemoryLimitError: no plan does.
    """
    if not limit.reported:
        return make(wanted)
    free = make(dataclasses.replace(wanted, memory_limit_bytes=None))
    if limit.is_far_from(free.peak_bytes):
        return free
    try:
        return make(wanted)
    except MemoryLimitError as error:
        raise limit.explained(error) from error
