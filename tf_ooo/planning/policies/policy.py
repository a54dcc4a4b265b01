"""Defines a policy: one way to schedule, as a value that says what it can do and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tf_ooo.planning.building.v_shape import v_places
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Task

# For what is scheduled task by task in Python, in 50 to 300 us each.
MANY_TASKS = 10_000

# Orders the backward tasks of one device's graph, given the layers in the order in which backward reaches
# them, and the tasks that exist.
BackwardOrder = Callable[[Sequence[int], frozenset[Task]], list[Task]]


@dataclass(frozen=True)
class Chunks:
    """Says how many stages a policy puts on each device of a pipeline.

    Attributes:
        tried: the numbers to compare if none is asked for.
        option: the policy's option for that number; empty where it is always the same.
        group_option: the policy's option for the number of layers in a stage; empty where it has none.
        largest: whether only the largest possible number is compared.
        back: the second stage of each device is on the way back; else stages are dealt out in turn.
        own: whether the policy itself cuts layers into stages and places them.
    """

    tried: tuple[int, ...] = (1,)
    option: str = ""
    group_option: str = ""
    largest: bool = False
    back: bool = False
    own: bool = False

    def devices_of(self, stages: int, devices: int) -> tuple[int, ...]:
        """Return the device of each stage, where all devices have equally many."""
        if self.back:
            return v_places(devices)
        return tuple(stage % devices for stage in range(stages))

    def tried_with(self, most: int) -> tuple[int, ...]:
        """Return the numbers to compare, where layers suffice for ``most`` stages on each device."""
        possible = [count for count in self.tried if count <= most]
        return (possible[-1],) if self.largest and possible else self.tried

    def options(self, count: int) -> dict[str, int]:
        """Return options that make each layer of a problem a stage, with ``count`` of them on each device."""
        if self.group_option:
            return {self.group_option: 1}
        return {self.option: count} if self.option else {}


@dataclass(frozen=True)
class Needs:
    """Says what a policy's order depends on, besides the number of layers.

    Attributes:
        costs: whether the order depends on layers' relative costs, not only the cut into stages.
        link: whether it depends on the link between devices.
        unless: options with any of which costs are not needed.
        streams: whether a device must run dW on a stream of their own.
        chunks: how many stages go on each device.
    """

    costs: bool = False
    link: bool = False
    unless: tuple[str, ...] = ()
    streams: bool = False
    chunks: Chunks = field(default_factory=Chunks)

    def costs_with(self, options: Iterable[str]) -> bool:
        return self.costs and not set(self.unless).intersection(options)


# These orders follow from what layers and messages take; the others have two stages on each device, too.
BY_COSTS = Needs(costs=True, link=True)
V_SHAPED = replace(BY_COSTS, chunks=Chunks((2,), back=True))


@dataclass(frozen=True)
class Policy:
    """Represents one way to schedule.

    Attributes:
        name: what users ask for.
        modes: for which it makes schedules.
        make: returns a schedule without predictions.  It keeps the memory limit if it can, and returns its
            leanest schedule if it cannot; the caller checks by simulation.
        options: the names that ``Problem.options`` may hold.
        of_programs: the options that take functions or maps, which no command line can give.
        needs: what its order depends on.
        backward_order: orders the backward pass of one device's graph without costs; None: it cannot.
        auto_tasks: above so many F, dO and dW of one stage on each device planning takes long, and ``auto``
            leaves the policy out; None: never.
        costs_only: the ``modes`` for which it plans, but which cannot train by it.
    """

    name: str
    modes: tuple[str, ...]
    make: Callable[[Problem], Schedule]
    options: tuple[str, ...] = ()
    of_programs: tuple[str, ...] = ()
    needs: Needs = field(default_factory=Needs)
    backward_order: BackwardOrder | None = None
    auto_tasks: int | None = None
    costs_only: tuple[str, ...] = ()

    @property
    def trains(self) -> tuple[str, ...]:
        return tuple(mode for mode in self.modes if mode not in self.costs_only)

    @property
    def text_options(self) -> tuple[str, ...]:
        return tuple(name for name in self.options if name not in self.of_programs)
