"""Which schedule, on which cuts: every candidate is simulated with the measured costs.

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError, OOOError, OptionsError
from tf_ooo.modes.pipeline.partition import Bounds, Cutter, merged
from tf_ooo.options.checks import did_you_mean
from tf_ooo.planning.choosing.on_paper import auto_candidates
from tf_ooo.planning.choosing.plan import Candidate, Clock, Plan, choose, policy_named, tried
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import Policy, schedules_of

MODE = "pipeline"
# Measured peaks were up to 1.103 of the predicted ones: plans stay as much below a limit.
PEAK_MARGIN = (9, 8)
SCHEDULES = schedules_of(MODE)
# A step has ended when all devices are done: only then fit begins the next.
_CLOCK = Clock(lambda timeline: timeline.makespan_s)


@dataclass(frozen=True)
class Wanted:
    """What is asked for; ``options`` are the policy's: left out those for the stages, several are tried.

    ``stages`` are names of layers at which they begin; None: cuts are tried.
    Predicted peaks of a device stay below its limit by :data:`PEAK_MARGIN`.
    """

    schedule: str
    devices: int
    microbatches: int
    link: Link = Link()
    memory_limit_bytes: int | None = None
    options: Mapping[str, int] = field(default_factory=dict)
    stages: Sequence[str] | None = None

    @property
    def planned_limit_bytes(self) -> int | None:
        """What predicted peaks have to stay within."""
        measured, predicted = PEAK_MARGIN
        limit = self.memory_limit_bytes
        return None if limit is None else max(1, limit * predicted // measured)


def make_plan(layers: Sequence[LayerCosts], units: Bounds, wanted: Wanted) -> Plan:
    """The schedule asked for with the best cuts, or for auto the one with the shortest step.

    The plan's problem has the stages as layers, and the layers of each stage as ``bounds``.

    Raises:
        OptionsError: more stages than layers.
        MemoryLimitError: none stays within the limit; says the lowest that one can keep.
    """
    cutter = Cutter(tuple(layers), units, wanted.link, wanted.microbatches)
    uncut = Problem(cutter.layers, wanted.devices, wanted.microbatches, wanted.link, mode=MODE)
    errors: list[OOOError] = []

    def rows_of(policy: Policy) -> Iterator[Candidate]:
        own = {name: value for name, value in wanted.options.items() if name in policy.options}
        for bounds, of_cut in _cuts(policy, cutter, wanted, errors):
            stages = merged(cutter.layers, bounds, wanted.microbatches)
            limit, options = wanted.planned_limit_bytes, own | of_cut
            problem = dataclasses.replace(
                uncut, layers=stages, memory_limit_bytes=limit, options=options, bounds=bounds
            )
            candidate = tried(policy, problem, _CLOCK)
            errors.extend([] if candidate.error is None else [candidate.error])
            yield candidate

    if wanted.schedule == "auto":
        policies = [policy_named(name, MODE) for name in SCHEDULES]
        candidates = auto_candidates(policies, uncut, rows_of)
    else:
        candidates = list(rows_of(policy_named(wanted.schedule, MODE)))
    if all(candidate.trial is None for candidate in candidates):
        raise _none_left(errors, wanted)
    return choose(candidates, _rank)


def _rank(candidate: Candidate) -> tuple[float, ...]:
    trial = candidate.trial
    if trial is None:
        return (float("inf"),)
    # The rounding of sums must not decide; fewer stages send less.
    return float(f"{trial.step_s:.6g}"), len(trial.problem.bounds), trial.peak_bytes


def _cuts(
    policy: Policy, cutter: Cutter, wanted: Wanted, errors: list[OOOError]
) -> Iterator[tuple[Bounds, dict[str, int]]]:
    """Cuts to try for a policy, with the options that make it take one stage for each."""
    chunks = policy.needs.chunks
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
    for count in chunks.tried if asked is None else (asked,):
        options = chunks.options(count)
        try:
            yield cutter.cut(count * wanted.devices), options
            if wanted.memory_limit_bytes is not None:
                yield from ((bounds, options) for bounds in cutter.cut_by_bytes(count * wanted.devices))
        except OOOError as error:
            errors.append(error)
            return


def _by_hand(
    policy: Policy, cutter: Cutter, wanted: Wanted, stages: Sequence[str]
) -> tuple[Bounds, dict[str, int]]:
    """The cut that is given by names.  OptionsError: a number that the schedule does not take."""
    bounds, chunks, devices = bounds_of(cutter, stages), policy.needs.chunks, wanted.devices
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


def bounds_of(cutter: Cutter, stages: Sequence[str]) -> Bounds:
    """(first, last) layer of stages that begin at the layers of these names.

    OptionsError: no such layer, out of order, the first layer is none, or a place that cannot be cut.
    """
    names = [layer.name for layer in cutter.layers]
    starts = [_place(names, stage) for stage in stages]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise OptionsError(
            f"stages={list(stages)!r:.200}: the first has to be {names[0]!r}, the others in the model's order"
        )
    for start, stage in zip(starts, stages, strict=True):
        if start not in {first for first, _ in cutter.units}:
            raise OptionsError(
                f"stages: no cut is possible at {stage!r}: a loop or a split layer stays whole"
            )
    return tuple(zip(starts, [*(start - 1 for start in starts[1:]), len(names) - 1], strict=True))


def _place(names: Sequence[str], stage: str) -> int:
    """The layer of this name, or the first of those below it."""
    for place, name in enumerate(names):
        if f"/{stage}/" in f"/{name}/":
            return place
    raise OptionsError(
        f"stages: unknown layer {stage!r}{did_you_mean(stage, names)}; known: {', '.join(names)}"
    )


def _groups(units: Bounds, option: str, wanted: Wanted) -> Bounds:
    """As many units in each stage, the last may have fewer.  OptionsError: too few stages."""
    size = wanted.options[option]
    starts = range(0, len(units), size)
    if len(starts) < wanted.devices:
        raise OptionsError(
            f"{option}={size}: {len(units)} layers make {len(starts)} groups, fewer than the "
            f"{wanted.devices} devices; use a smaller one"
        )
    return tuple((units[i][0], units[min(i + size, len(units)) - 1][1]) for i in starts)


def _none_left(errors: Sequence[OOOError], wanted: Wanted) -> OOOError:
    limits = [e.smallest_bytes for e in errors if isinstance(e, MemoryLimitError) and e.smallest_bytes]
    if limits and wanted.memory_limit_bytes is not None:
        measured, predicted = PEAK_MARGIN
        smallest = -(-math.ceil(min(limits)) * measured // predicted)
        return MemoryLimitError(wanted.memory_limit_bytes, smallest)
    return errors[0] if errors else OptionsError(f"schedule={wanted.schedule!r}: no cut is possible")
