"""What can be drawn: a run, simulated or measured, whatever holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from tf_ooo.planning.model.arrays import Floats
from tf_ooo.planning.model.memory import MemoryCurve
from tf_ooo.planning.model.messages import MessageColumns
from tf_ooo.planning.model.schedule import Lane, Schedule


class Drawable(Protocol):
    """What pictures read of a :class:`tf_ooo.Timeline`, whose docstrings say what each of these is."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def start_s(self) -> Floats: ...

    @property
    def end_s(self) -> Floats: ...

    @property
    def memory(self) -> Sequence[MemoryCurve]: ...

    @property
    def message_columns(self) -> MessageColumns: ...

    @property
    def steps(self) -> int: ...

    @property
    def makespan_s(self) -> float: ...

    @property
    def steady_step_s(self) -> float: ...

    @property
    def bubble_fraction(self) -> float: ...

    @property
    def peak_bytes(self) -> list[int]: ...

    def lane_slices(self) -> Iterator[tuple[Lane, slice]]: ...
