"""Chooses a schedule and cuts within limits of memory by simulating each candidate; no TensorFlow here."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError, OOOError, OptionsError
from tf_ooo.modes.pipeline.partition import Cutter, as_run, check_layers, held_bytes, stages_of
from tf_ooo.planning.building.stages import Bounds, Stages, bounds_of, merged, one_each
from tf_ooo.planning.choosing.on_paper import auto_candidates, fastest_first
from tf_ooo.planning.choosing.plan import Candidate, Plan, StepTime, Trial, choose, policy_named, tried
from tf_ooo.planning.choosing.recomputing import NONE, recomputed
from tf_ooo.planning.model.problem import Problem, lacking_text, less_of_places, most_and_less
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.schedule_file import ScheduleFile
from tf_ooo.planning.policies import Policy, schedules_of

if TYPE_CHECKING:
    from tf_ooo.hosts.cluster import Target
    from tf_ooo.hosts.ranks.base import Engine
    from tf_ooo.hosts.system_memory import ReportedLimit
from tf_ooo.rewriting.parts import layer_of_part

MODE = "pipeline"
# Measured peaks were up to 1.103 of the predicted ones: plans stay as much below a limit.
PEAK_MARGIN = (9, 8)
SCHEDULES = schedules_of(MODE)
# A step has ended when all devices are done: only then fit begins the next.
_STEP_TIME = StepTime(lambda timeline: timeline.makespan_s)
_ASKED = "as asked"


@dataclass(frozen=True)
class PlanRequest:
    """Holds a request for a plan; ``options`` are the policy's: without those for stages, several are tried.

    ``stages`` are names of layers at which they begin, or of the layers of each; None: cuts are tried.
    ``own`` is the user's own checked schedule, which replaces ``schedule``. ``less_bytes``: how much less
    each device has than ``memory_limit_bytes``; (): all have as much. ``recompute``: which layers run their
    forward again, ``fixed``: the layers that cannot. Predicted peaks of a device stay below its limit by
    :data:`PEAK_MARGIN`.
    """

    schedule: str
    devices: int
    microbatches: int
    link: Link = Link()
    memory_limit_bytes: int | None = None
    less_bytes: tuple[int, ...] = ()
    options: Mapping[str, int] = field(default_factory=dict)
    stages: Stages | None = None
    own: ScheduleFile | None = None
    recompute: str = NONE
    fixed: frozenset[int] = frozenset()

    @property
    def planned_limit_bytes(self) -> int | None:
        """Return the limit for plans, see :func:`peak_within`."""
        return None if self.memory_limit_bytes is None else peak_within(self.memory_limit_bytes)

    def rooms_of(self, devices: Sequence[int]) -> tuple[float, ...]:
        """Return the bytes for each stage on these devices, which stages share evenly; (): no limit."""
        if self.memory_limit_bytes is None:
            return ()
        stages = Counter(devices)
        limits = zip(devices, self.less_of(devices), strict=True)
        sizes = ((peak_within(self.memory_limit_bytes - less), stages[number]) for number, less in limits)
        return tuple(max(1, size) / count for size, count in sizes)

    def less_of(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the :attr:`less_bytes` of these devices; 0 each if there are none."""
        return tuple(self.less_bytes[number] if self.less_bytes else 0 for number in numbers)

    def among(self, numbers: Sequence[int]) -> PlanRequest:
        """Return the same request for these devices alone."""
        less = self.less_of(numbers) if self.less_bytes else ()
        link = self.link.among(numbers)
        return dataclasses.replace(self, devices=len(numbers), link=link, less_bytes=less)

    def of_replica(self, count: int) -> PlanRequest:
        """Return the request for a replica: each place counts as its slowest and its smallest device."""
        devices = self.devices // count
        return dataclasses.replace(
            self,
            devices=devices,
            microbatches=-(-self.microbatches // count),  # the first replica has the most
            link=self.link.of_replica(devices, count),
            less_bytes=less_of_places(self.less_bytes, devices),
        )


def peak_within(limit_bytes: int) -> int:
    """Return the limit of predicted peaks with which measured ones keep ``limit_bytes``."""
    measured, predicted = PEAK_MARGIN
    return max(1, limit_bytes * predicted // measured)


def make_plan(layers: Sequence[LayerCosts], units: Bounds, wanted: PlanRequest) -> Plan:
    """Return the schedule asked for with the best cuts, or for auto the one with the shortest step.

    The user's own schedule is taken unchanged, with the cut that it names, or the best.

    The plan's problem has the stages as layers, and the layers of each stage as ``bounds``.

    Raises:
        OptionsError: more stages than layers.
        ScheduleError: the stages of the user's own schedule hold other layers.
        MemoryLimitError: no plan keeps the limit; says the lowest that one can keep.
    """
    cutter = Cutter(tuple(layers), units, wanted.link, wanted.microbatches)
    measured, predicted = PEAK_MARGIN
    uncut = Problem(
        cutter.layers,
        wanted.devices,
        wanted.microbatches,
        wanted.link,
        wanted.planned_limit_bytes,
        tuple(math.ceil(less * predicted / measured) for less in wanted.less_bytes),
        mode=MODE,
        recompute=wanted.recompute,
        model=cutter.layers,
        fixed=wanted.fixed,
    )
    errors: list[OOOError] = []

    def problems_of(policy: Policy) -> Iterator[Problem]:
        own = {name: value for name, value in wanted.options.items() if name in policy.options}
        for bounds, of_cut in _cuts(policy, cutter, wanted, errors):
            stages = merged(cutter.layers, bounds, wanted.microbatches)
            cut = one_each(stages) if policy.needs.chunks.own and wanted.stages is not None else ()
            yield dataclasses.replace(uncut, layers=stages, options=own | of_cut, bounds=bounds, cut=cut)

    def rows_of(policies: Sequence[Policy]) -> list[Candidate]:
        asked = [(policy, problem) for policy in policies for problem in problems_of(policy)]
        if wanted.memory_limit_bytes is None:
            rows = [tried(policy, problem, _STEP_TIME) for policy, problem in asked]
        else:
            rows = fastest_first(asked, _STEP_TIME)
        errors.extend(row.error for row in rows if row.error is not None)
        return rows

    if wanted.own is not None:
        candidates = list(_as_written(wanted.own, cutter, uncut, wanted, errors))
    elif wanted.schedule == "auto":
        policies = [policy_named(name, MODE) for name in SCHEDULES]
        candidates = auto_candidates(policies, uncut, rows_of)
    else:
        candidates = rows_of([policy_named(wanted.schedule, MODE)])
    if all(candidate.trial is None for candidate in candidates):
        raise _none_left(errors, wanted, cutter)
    return choose(candidates, _rank)


def with_costs(plan: Plan, layers: Sequence[LayerCosts]) -> Plan:
    """Return the same schedule on the same cut, for layers with other costs."""
    before = plan.problem
    stages = merged(tuple(layers), before.bounds, before.microbatches)
    problem = dataclasses.replace(before, layers=stages, model=tuple(layers), recomputed=(), plain=())
    if before.recomputed:
        problem = recomputed(problem, before.recomputed)
    return dataclasses.replace(plan, trial=Trial(plan.trial.schedule, problem, _STEP_TIME))


def step_s_of(schedule: Schedule, layers: Sequence[LayerCosts], link: Link) -> float:
    """Return the predicted seconds of a schedule's step."""
    problem = Problem(tuple(layers), len(schedule.lanes), schedule.microbatches, link, mode=MODE)
    return Trial(schedule, problem, _STEP_TIME).step_s


def fits_whole(layers: Sequence[LayerCosts], microbatches: int, limit_bytes: int) -> bool:
    """Return whether one device can run all of a step within its limit, in some schedule's order."""
    stages = merged(tuple(layers), ((0, len(layers) - 1),), microbatches)
    problem = Problem(stages, 1, microbatches, mode=MODE)
    trials = (tried(policy_named(name, MODE), problem, _STEP_TIME).trial for name in SCHEDULES)
    return any(trial.peak_bytes <= peak_within(limit_bytes) for trial in trials if trial is not None)


def _rank(candidate: Candidate) -> tuple[float, ...]:
    trial = candidate.trial
    if trial is None:
        return (math.inf,)
    # The rounding of sums must not decide; fewer stages send less.
    return float(f"{trial.step_s:.6g}"), len(trial.problem.bounds), trial.peak_bytes


def _cuts(
    policy: Policy, cutter: Cutter, wanted: PlanRequest, errors: list[OOOError]
) -> Iterator[tuple[Bounds, dict[str, int]]]:
    """Yield cuts to try for a policy, with options that make each part of the cut a stage."""
    chunks = policy.needs.chunks
    if chunks.own:
        yield named_bounds(cutter, wanted.stages) if wanted.stages is not None else cutter.units, {}
        return
    if wanted.stages is not None:
        try:
            yield _by_hand(policy, cutter, wanted, wanted.stages)
        except OOOError as error:
            errors.append(error)
        return
    if chunks.group_option in wanted.options:
        yield _groups(cutter.units, chunks.group_option, wanted), chunks.options(1)
        return
    asked = wanted.options.get(chunks.option)
    numbers = chunks.tried_with(len(cutter.units) // wanted.devices) if asked is None else (asked,)
    if asked is None and wanted.schedule != "auto" and wanted.memory_limit_bytes is not None:
        numbers = chunks.tried  # fewer stages may need less
    for count in numbers:
        options, devices = chunks.options(count), chunks.devices_of(count * wanted.devices, wanted.devices)
        try:
            for bounds in dict.fromkeys((cutter.cut(devices), *cutter.cut_along_branches(devices))):
                yield bounds, options
            if wanted.memory_limit_bytes is not None:
                rooms = wanted.rooms_of(devices)
                yield from ((bounds, options) for bounds in cutter.cut_by_bytes(rooms))
        except OOOError as error:
            errors.append(error)
            return


def _as_written(
    own: ScheduleFile, cutter: Cutter, uncut: Problem, wanted: PlanRequest, errors: list[OOOError]
) -> Iterator[Candidate]:
    """Yield the user's own schedule with each cut that may be tried, never changed to keep a limit."""
    schedule = as_run(own.schedule, wanted.microbatches)
    for bounds in own_cuts(own, cutter, wanted.stages, wanted.rooms_of(own.schedule.device_of_stage)):
        stages = merged(cutter.layers, bounds, wanted.microbatches)
        problem = dataclasses.replace(uncut, layers=stages, bounds=bounds, recompute=NONE)
        if own.schedule.recompute:
            problem = recomputed(problem, own.schedule.recompute)
        trial = Trial(schedule, problem, _STEP_TIME)
        if trial.keeps_limit:
            yield Candidate(schedule.policy, problem, trial, trial.step_s)
            continue
        error = problem.over_limit(trial.kept_limit_bytes)
        errors.append(error)
        yield Candidate(schedule.policy, problem, reason=f"needs {error.smallest_bytes} bytes", error=error)


def own_cuts(
    own: ScheduleFile, cutter: Cutter, stages: Stages | None, rooms: Sequence[float] = ()
) -> list[Bounds]:
    """Return cuts for the user's own schedule: as the file or ``stages`` say, else several to be tried.

    ``rooms``: bytes of each stage, for cuts by memory; (): none are tried.

    OptionsError, ScheduleError: too many stages, or other layers.
    """
    if own.schedule.stages:
        check_layers(own, len(cutter.layers))
        for stage, (first, _) in enumerate(own.schedule.stages):
            if first not in {start for start, _ in cutter.units}:
                raise own.error(
                    f"no cut is possible before layer {first}: a loop or a split layer stays whole",
                    f"stage {stage}",
                )
        return [own.schedule.stages]
    if stages is not None:
        bounds, number = named_bounds(cutter, stages), stages_of(own.schedule)
        if len(bounds) != number:
            raise own.error(f"the schedule has {number} stages, stages= names {len(bounds)}")
        return [bounds]
    by_time = cutter.cut(tuple(own.schedule.device_of_stage))
    return [by_time, *(cutter.cut_by_bytes(rooms) if rooms else ())]


def named_bounds(cutter: Cutter, stages: Stages) -> Bounds:
    """Return the cut given by names.  OptionsError as of :func:`bounds_of`."""
    return bounds_of([layer.name for layer in cutter.layers], stages, cutter.units, layer_of_part)


def _by_hand(
    policy: Policy, cutter: Cutter, wanted: PlanRequest, stages: Stages
) -> tuple[Bounds, dict[str, int]]:
    """Return the cut given by names.  OptionsError: a number of stages that the schedule does not take."""
    bounds, chunks, devices = named_bounds(cutter, stages), policy.needs.chunks, wanted.devices
    count, left = divmod(len(bounds), devices)
    asked = wanted.options.get(chunks.option)
    takes = (asked,) if asked is not None else chunks.tried
    if chunks.group_option:
        takes = (*takes, max(count, 1))  # any number of groups
    if left or count not in takes:
        numbers = " or ".join(str(each * devices) for each in dict.fromkeys(takes))
        raise OptionsError(
            f"schedule {policy.name!r} on {devices} devices takes {numbers} stages, got {len(bounds)}"
        )
    return bounds, chunks.options(count)


def _groups(units: Bounds, option: str, wanted: PlanRequest) -> Bounds:
    """Return as many units in each stage, the last may have fewer. OptionsError: too few stages."""
    size = wanted.options[option]
    starts = range(0, len(units), size)
    if len(starts) < wanted.devices:
        raise OptionsError(
            f"{option}={size}: {len(units)} layers make {len(starts)} groups, fewer than the "
            f"{wanted.devices} devices; use a smaller one"
        )
    return tuple((units[i][0], units[min(i + size, len(units)) - 1][1]) for i in starts)


def _none_left(errors: Sequence[OOOError], wanted: PlanRequest, cutter: Cutter) -> OOOError:
    limits = [e.smallest_bytes for e in errors if isinstance(e, MemoryLimitError) and e.smallest_bytes]
    if not limits or wanted.memory_limit_bytes is None:
        return errors[0] if errors else OptionsError(f"schedule={wanted.schedule!r}: no cut is possible")
    measured, predicted = PEAK_MARGIN
    smallest = -(-math.ceil(min(limits)) * measured // predicted)
    held = [(sum(held_bytes(1, layer) for layer in cutter.layers[a : b + 1]), a) for a, b in cutter.units]
    largest_bytes, layer = max(held)
    because = ""
    if largest_bytes > wanted.memory_limit_bytes:
        because = (
            f"{cutter.layers[layer].name or f'layer {layer}'} alone takes {math.ceil(largest_bytes)} bytes "
            "(weights, gradients, slots, activations of one micro-batch), and is not divided: more devices "
            "do not help"
        )
    return MemoryLimitError(wanted.memory_limit_bytes, smallest, because=because)


@dataclass(frozen=True)
class Limit:
    """Holds the limits of all devices; ``bytes`` None: there is none.

    Attributes:
        bytes: the limit of the device with most memory.
        said: who says so, in words; if devices differ, for the one with least.
        reported: whether a device reports it and nobody asked for it: then it changes no plan that keeps it,
            and a model of unknown sizes is planned without it.
        less_bytes: how much less each device has than ``bytes``; (): all have as much.
    """

    bytes: int | None = None
    said: str = ""
    reported: bool = False
    less_bytes: tuple[int, ...] = ()

    @classmethod
    def of_devices(cls, sizes: Sequence[int], said: str, *, reported: bool = False) -> Limit:
        """Return the limit of devices that have so many bytes each; ``sizes`` must not be empty."""
        most_bytes, less_bytes = most_and_less(sizes)
        return cls(most_bytes, said, reported, less_bytes)

    @property
    def least_bytes(self) -> int | None:
        """Return the limit of the device with least memory."""
        return None if self.bytes is None else self.bytes - max(self.less_bytes, default=0)

    def of_each(self, devices: int) -> tuple[int, ...]:
        """Return the limits of so many devices; empty: there is none."""
        if self.bytes is None:
            return ()
        return tuple(self.bytes - less for less in self.less_bytes or (0,) * devices)

    def explained(self, error: MemoryLimitError) -> MemoryLimitError:
        """Return the error with the limit's source, if nobody asked for it, and with limits that differ."""
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
        """Return the limit for plans on the device with most memory, see :func:`peak_within`."""
        return None if self.bytes is None else peak_within(self.bytes)

    def is_far_from(self, kept_bytes: float) -> bool:
        """Return whether a plan that keeps ``kept_bytes`` also keeps the reported limit unchanged."""
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
