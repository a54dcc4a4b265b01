"""Plans how many replicas of a pipeline share one process' devices, by trying each number.

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError, OOOError, OptionsError
from tf_ooo.modes.pipeline.options import AUTO
from tf_ooo.modes.pipeline.planning import PEAK_MARGIN, Limit, PlanRequest, make_plan, step_s_of, with_costs
from tf_ooo.planning.building.stages import Bounds, stage_of_layer
from tf_ooo.planning.choosing.figures import held_evenly, side_by_side, stage_shares
from tf_ooo.planning.choosing.plan import Plan
from tf_ooo.planning.model.schedule import Schedule

Value = TypeVar("Value")

# Plans for ever lower limits, where one replica's device holds more than the others'.
_TRIES = 4
# Predictions that differ by less are alike: then all devices are used.
_LEAST_GAIN = 0.02
# So many loops for each device: the slowest stage is then at most half a device's share too long.
_LOOPS_PER_DEVICE = 2


@dataclass(frozen=True)
class Replicas:
    """Holds replicas, each on equally many devices; ``plan`` None: ``reason`` says why there is none.

    Attributes:
        plan: the plan of one replica.
        step_s: seconds of a step of all of them side by side, including ``exchange_s``, in which the busiest
            device sends and receives gradients and weights.
        holders: the replica that holds each layer's variables.
        peak_bytes: each device's peak in a replica, the highest among replicas.
        limit_bytes: the lowest limit that these keep, as a limit of the device with most memory.
    """

    count: int
    devices: int
    plan: Plan | None = None
    step_s: float = float("inf")
    exchange_s: float = 0.0
    holders: tuple[int, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    limit_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Mesh:
    """Holds the chosen plan, all that were compared, and the request for all devices.

    ``on``: the numbers of the used devices; (): all.  ``parts``: the number of micro-batches for which
    layers' costs hold, if they are joined here; 0: they are not.
    """

    chosen: Replicas
    plan: Plan
    tried: tuple[Replicas, ...]
    wanted: PlanRequest
    on: tuple[int, ...] = ()
    parts: int = 0

    def of(self, devices: Sequence[Value]) -> tuple[Value, ...]:
        """Return the used ones of the devices, or of values for each device."""
        return tuple(devices[number] for number in self.on) if self.on else tuple(devices)

    @property
    def schedule(self) -> Schedule:
        """Return one replica's schedule; its stages hold the model's layers, as reports name them."""
        return dataclasses.replace(self.plan.schedule, stages=self.plan.problem.bounds)

    @property
    def step_s(self) -> float:
        return self.chosen.step_s

    @property
    def replicas(self) -> int:
        return self.chosen.count

    @property
    def peak_bytes(self) -> int:
        """Return the peak of the device that holds most."""
        return max(self.chosen.peak_bytes)

    @property
    def larger(self) -> float:
        """Return the size of a micro-batch relative to those for which layers' costs hold."""
        return self.parts / self.wanted.microbatches if self.parts else 1.0

    def slower_by(self) -> list[float]:
        """Return for each layer how many times as long its devices take, as a mean over replicas."""
        link, numbers, each = self.wanted.link, self.plan.schedule.device_of_stage, self.chosen.devices
        stages = [link.speeds_of(range(number, self.replicas * each, each)) for number in numbers]
        means = [sum(1 / speed for speed in speeds) / len(speeds) for speeds in stages]
        return [means[stage] for stage in stage_of_layer(self.plan.problem.bounds)]

    def with_costs(self, layers: Sequence[LayerCosts]) -> Mesh:
        """Return the same plan for layers with other costs."""
        plan = with_costs(self.plan, _shared(layers, self.replicas))
        chosen = _beside(plan, layers, self.replicas, self.chosen.devices, self.wanted.link)
        return dataclasses.replace(self, chosen=chosen, plan=plan)


def counts_of(replicas: int | str | None, devices: int, microbatches: int) -> tuple[int, ...]:
    """Return the numbers of replicas to try.  OptionsError: they cannot share devices or micro-batches."""
    even = [count for count in range(1, devices + 1) if devices % count == 0]
    if replicas == AUTO:
        return tuple(count for count in even if count <= microbatches)
    count = 1 if replicas is None else int(replicas)
    if count not in even:
        raise OptionsError(
            f"replicas={count}: {devices} devices cannot be dealt out evenly to them; accepted: "
            f"{', '.join(map(str, even))}, or 'auto'"
        )
    if count > microbatches:
        raise OptionsError(
            f"replicas={count} share microbatches={microbatches}, so that some have none; take microbatches="
            f"{count} or a multiple of it"
        )
    return (count,)


def make_mesh(layers: Sequence[LayerCosts], units: Bounds, asked: PlanRequest, counts: Sequence[int]) -> Mesh:
    """Return the plan with the shortest step among these numbers of replicas; ``asked`` is of all devices.

    Raises what :func:`make_plan` raises, where no number of replicas has a plan.
    """
    tried: list[Replicas] = []
    errors: list[OOOError] = []
    for count in counts:
        try:
            tried.append(_within_limit(layers, units, asked, count))
        except OOOError as error:
            errors.append(error)
            tried.append(Replicas(count, asked.devices // count, reason=str(error)))
    chosen = min(tried, key=lambda replicas: (float(f"{replicas.step_s:.6g}"), replicas.count))
    if chosen.plan is None:
        raise errors[0]
    return Mesh(chosen, chosen.plan, tuple(tried), asked)


def with_whole_parts(mesh: Mesh, layers: Sequence[LayerCosts], units: Bounds) -> Mesh:
    """Return the mesh with one micro-batch per device, if each replica is one device and these fit.

    Then no device waits for another's micro-batch, and a large one takes no longer than several small ones.
    """
    asked, count = mesh.wanted, mesh.replicas
    if mesh.chosen.devices > 1 or count in (1, asked.microbatches):
        return mesh
    larger = [layer.scaled(asked.microbatches / count) for layer in layers]
    try:
        whole = make_mesh(larger, units, dataclasses.replace(asked, microbatches=count), (count,))
    except OOOError:  # it takes too much memory, or the schedule needs more of them
        return mesh
    if whole.step_s > mesh.step_s * (1 + _LEAST_GAIN):  # it may need to run forward passes again
        return mesh
    tried = tuple(whole.chosen if each is mesh.chosen else each for each in mesh.tried)
    return dataclasses.replace(whole, tried=tried, on=mesh.on, parts=asked.microbatches)


def _within_limit(layers: Sequence[LayerCosts], units: Bounds, wanted: PlanRequest, count: int) -> Replicas:
    """Plan so many replicas, with less memory if one holds more than its share, or raise MemoryLimitError."""
    asked, limit_bytes = wanted.of_replica(count), wanted.planned_limit_bytes
    measured, predicted = PEAK_MARGIN

    def planned(limited: PlanRequest) -> tuple[Plan, Replicas]:
        plan = make_plan(_shared(layers, count), units, limited)
        return plan, _beside(plan, layers, count, wanted.devices // count, wanted.link)

    if limit_bytes is None or count == 1:
        return planned(asked)[1]
    because = ""
    for _ in range(_TRIES):
        try:
            plan, replicas = planned(asked)
        except MemoryLimitError as error:
            if error.smallest_bytes is None:
                raise
            because = error.because
            asked = dataclasses.replace(asked, memory_limit_bytes=error.smallest_bytes)
            break
        # This counts to the limit of each device: beside the other replicas, and of the plan by itself.
        charged = map(plan.problem.charged_bytes, (replicas.peak_bytes, plan.timeline.peak_bytes))
        left = [own - (peak - limit_bytes) for peak, own in zip(*charged, strict=True) if peak > limit_bytes]
        if not left:
            return replicas
        # From the plan's own peak on: it may be far below its limit, and the next one would be the same.
        lower = math.ceil(min(left) * measured / predicted)
        asked = dataclasses.replace(asked, memory_limit_bytes=max(1, lower))
    _, replicas = planned(asked)
    if replicas.limit_bytes <= limit_bytes:
        return replicas
    smallest_bytes = math.ceil(replicas.limit_bytes * measured / predicted)
    raise MemoryLimitError(wanted.memory_limit_bytes or 0, smallest_bytes, because=because)


def _beside(plan: Plan, layers: Sequence[LayerCosts], count: int, devices: int, link: Link) -> Replicas:
    stage_of, numbers = stage_of_layer(plan.problem.bounds), plan.schedule.device_of_stage
    peaks = [int(size) for size in plan.timeline.peak_bytes]
    if count == 1:
        limit_bytes = plan.problem.limit_of(peaks)
        return Replicas(1, devices, plan, plan.step_s, 0.0, (0,) * len(layers), tuple(peaks), limit_bytes)
    sizes = [layer.weight_bytes + layer.slot_bytes for layer in layers]
    holders = held_evenly([numbers[stage] for stage in stage_of], sizes, count)
    shares = stage_shares(layers, stage_of, holders, count)
    stages = [
        [
            dataclasses.replace(stage, update_s=own.update_s + own.exchange_s(link))
            for stage, own in zip(plan.problem.layers, of_replica, strict=True)
        ]
        for of_replica in shares
    ]
    together, costs = side_by_side(plan.schedule, stages)
    shared = [stage.slot_bytes for stage in plan.problem.layers]
    exchange_s, most = 0.0, [0.0] * devices
    for of_replica in shares:
        more, seconds, sums = [0.0] * devices, [0.0] * devices, [0.0] * devices
        for own, device, counted_bytes in zip(of_replica, numbers, shared, strict=True):
            more[device] += own.bytes - counted_bytes
            seconds[device] += own.exchange_s(link)
            sums[device] = max(sums[device], own.largest_bytes)
        most = [max(before, a + b) for before, a, b in zip(most, more, sums, strict=True)]
        exchange_s = max(exchange_s, *seconds)
    peak_bytes = tuple(math.ceil(peak + extra) for peak, extra in zip(peaks, most, strict=True))
    step_s = step_s_of(together, costs, link)
    limit_bytes = plan.problem.limit_of(peak_bytes)
    return Replicas(count, devices, plan, step_s, exchange_s, tuple(holders), peak_bytes, limit_bytes)


def _shared(layers: Sequence[LayerCosts], count: int) -> tuple[LayerCosts, ...]:
    """Return costs as if each replica held a share of slots and updates, and of the others' gradients."""
    if count == 1:
        return tuple(layers)
    return tuple(
        dataclasses.replace(
            layer,
            update_s=layer.update_s / count,
            slot_bytes=(layer.slot_bytes + (count - 1) * layer.weight_bytes) / count,
        )
        for layer in layers
    )


def on_best_devices(layers: Sequence[LayerCosts], units: Bounds, wanted: PlanRequest) -> Mesh:
    """Plan on all devices, or without the slowest ones, one after the other as long as that is faster.

    If no plan fits, devices of least memory are left out instead: each replica holds all of a stage.

    Raises what :func:`make_mesh` raises for all devices, if fewer have no plan either.
    """
    numbers = list(range(wanted.devices))
    best: Mesh | None = None
    tried: list[Replicas] = []
    errors: list[OOOError] = []
    while numbers and (best is None or len(numbers) > 1):
        counts = counts_of(AUTO, len(numbers), wanted.microbatches)
        try:
            mesh = make_mesh(layers, units, wanted.among(numbers), counts)
        except MemoryLimitError as error:
            errors.append(error)
            if best is not None or len(set(wanted.less_of(numbers))) == 1:
                break  # fewer devices hold no more
            numbers.remove(max(numbers, key=lambda number: wanted.less_of([number])))
            continue
        except OOOError as error:  # fewer layers than devices, say
            errors.append(error)
        else:
            tried += mesh.tried
            if best is not None and mesh.step_s >= best.step_s * (1 - _LEAST_GAIN):
                break
            best = dataclasses.replace(mesh, on=tuple(numbers))
        # Equally slow ones are left out by memory, the least first.
        numbers.remove(
            min(reversed(numbers), key=lambda n: (wanted.link.speeds_of([n]), -wanted.less_of([n])[0]))
        )
    if best is None:
        raise errors[0]
    return dataclasses.replace(best, tried=tuple(tried))


def loop_parts(asked: int | str, recurrent: int, devices: int, microbatches: int) -> int:
    """Return the number of loops of each of so many recurrent layers; 1: they stay whole.

    Unless asked for, loops stay whole if each device may have a layer, or if a single micro-batch leaves
    nothing to overlap.
    """
    if asked != AUTO:
        return int(asked)
    if not recurrent or recurrent >= devices or microbatches < 2:
        return 1
    return math.ceil(_LOOPS_PER_DEVICE * devices / recurrent)


@dataclass(frozen=True)
class Pieces:
    """Says whether a batch passes whole, or in pieces of as many rows as fit.

    ``rows``: those of a training micro-batch, which always fit; 0: nothing is cut.  ``most_rows``: most that
    fit.
    """

    rows: int = 0
    most_rows: float = math.inf

    def of(self, rows: int) -> tuple[int, ...]:
        """Return the rows of each piece, none empty; a single piece: the batch passes whole."""
        fit = max(self.rows, self.most_rows)
        if not self.rows or rows <= fit:
            return (rows,)
        whole, left = divmod(rows, int(fit))
        return (int(fit),) * whole + ((left,) if left else ())


def pieces_of(mesh: Mesh, rows: int, limit_bytes: int | None) -> Pieces:
    """Make the pieces of a plan; 0 ``rows`` of a traced micro-batch: not known, nothing is cut.

    A forward pass is assumed to need, besides the weights and slots of a device, all tensors of one layer at
    a time; training keeps those of every layer.  Each replica counts as in the plan, with copies of what
    others hold.  ``limit_bytes``: the limit of predicted peaks, on the device with most memory; None: none.
    """
    if not rows or limit_bytes is None:
        return Pieces()
    rows = math.ceil(rows * mesh.larger)
    problem, numbers = mesh.plan.problem, mesh.plan.schedule.device_of_stage
    held = [float(less) for less in problem.less_bytes] or [0.0] * mesh.chosen.devices
    of_a_row = [0.0] * mesh.chosen.devices
    for number, (first, last) in zip(numbers, problem.bounds, strict=True):
        for layer in problem.model[first : last + 1]:
            held[number] += layer.weight_bytes + layer.slot_bytes
            needed = (layer.activation_bytes + layer.output_bytes) / rows
            of_a_row[number] = max(of_a_row[number], needed)
    room = [limit_bytes - there for there in held]
    most = [left / each if each else math.inf for left, each in zip(room, of_a_row, strict=True)]
    return Pieces(rows, max(0.0, min(most)))


def mesh_within(make: Callable[[PlanRequest], Mesh], wanted: PlanRequest, limit: Limit) -> Mesh:
    """Plan with ``make``, ignoring a reported limit if that plan fits it. MemoryLimitError: none does."""
    if limit.reported:
        free = make(dataclasses.replace(wanted, memory_limit_bytes=None))
        if limit.is_far_from(free.chosen.limit_bytes):
            return free
    try:
        return make(wanted)
    except MemoryLimitError as error:
        raise limit.explained(error) from error
