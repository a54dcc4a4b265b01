"""Builds parts of pipeline policies. Lanes are numpy arrays: tens of millions of tasks take seconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.stages import summand_bytes
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.relation import stage_inputs
from tf_ooo.planning.model.schedule import Lane, Schedule, Task, TaskList
from tf_ooo.planning.model.task import KIND_NUMBER, Fields, Floats, Ints, encode


def shortest_s(sums: Floats, speeds: Sequence[float]) -> float:
    """Return the least possible seconds of the slowest stage.

    Args:
        sums: seconds of all layers before each layer, and last of all layers.
        speeds: the speed of each stage's device.
    """
    count = len(sums) - 1
    best = sums[1:] / speeds[0]
    for speed in speeds[1:]:
        following = np.full(count, np.inf)
        for end in range(1, count):
            stage = (sums[end + 1] - sums[1 : end + 1]) / speed
            following[end] = np.maximum(best[:end], stage).min()
        best = following
    return float(best[-1])


def cheapest(sums: Floats, messages: Floats, speeds: Sequence[float], limit: float) -> list[int]:
    """Return the ends of stages within the limit that send least; empty where there are none."""
    count = len(messages)
    cost = np.where(sums[1:] / speeds[0] <= limit * (1 + 1e-9), 0.0, np.inf)
    back: list[np.ndarray] = []
    for speed in speeds[1:]:
        following, chosen = np.full(count, np.inf), np.zeros(count, int)
        for end in range(1, count):
            fits = (sums[end + 1] - sums[1 : end + 1]) / speed <= limit * (1 + 1e-9)
            total = np.where(fits, cost[:end] + messages[:end], np.inf)
            chosen[end] = int(total.argmin())
            following[end] = total[chosen[end]]
        back.append(chosen)
        cost = following
    if not np.isfinite(cost[-1]):
        return []
    ends = [count]
    for chosen in reversed(back):
        ends.append(int(chosen[ends[-1] - 1]) + 1)
    return ends[::-1]


MODE = "pipeline"


@dataclass(frozen=True)
class StagedLayers:
    """Holds layers cut into stages; stage s runs on device ``s % devices``, or where ``place`` says."""

    problem: Problem
    bounds: tuple[tuple[int, int], ...]
    place: tuple[int, ...] = ()

    @classmethod
    def of(cls, problem: Problem, chunks: int = 1, place: tuple[int, ...] = ()) -> StagedLayers:
        """Cut into ``chunks`` stages for each device, or as the problem's cut says.

        OptionsError: more stages than layers, or another number than in the cut.
        """
        count = problem.devices * chunks
        if problem.cut and len(problem.cut) != count:
            raise OptionsError(
                f"stages: {len(problem.cut)} are given, and this schedule takes {count} on {problem.devices} "
                "devices"
            )
        if problem.cut:
            return cls(problem, problem.cut, place)
        devices = place or [stage % problem.devices for stage in range(count)]
        return cls(problem, balanced(problem.layers, problem.link.speeds_of(devices)), place)

    def sums(self, attribute: str) -> Floats:
        """Return a cost of each stage: seconds or bytes of one micro-batch, float64 (stages,)."""
        values = self.problem.costs(attribute)
        return np.array([sum(values[first : last + 1]) for first, last in self.bounds])

    @cached_property
    def seconds(self) -> Floats:
        """Return seconds of each stage's F, dO and dW on its device, with the runtime's own, (3, stages)."""
        sums = np.stack([self.sums(name) for name in ("forward_s", "output_grad_s", "weight_grad_s")])
        on_devices: Floats = sums / np.array(self.problem.link.speeds_of(self.devices.tolist()))
        return on_devices + self.problem.link.task_s * (sums > 0) + self.messages_s

    @cached_property
    def messages_s(self) -> Floats:
        """Return the seconds of messages that F, dO and dW of each stage send and receive, (3, stages).

        A device receives each tensor only once: its first stage that reads an output takes the output, and
        its last stage that made what is read takes the gradient.
        """
        link, taken_s, devices = self.problem.link, np.zeros((3, len(self.bounds))), self.devices.tolist()
        if not link.busies_ends:
            return taken_s
        pairs = [(source, stage) for stage, read in enumerate(self.inputs) for source, _ in read]
        away = [(source, stage) for source, stage in pairs if devices[source] != devices[stage]]
        outputs = {(source, devices[stage]): stage for source, stage in reversed(away)}
        gradients = {(stage, devices[source]): source for source, stage in sorted(away)}
        for kind, messages in enumerate((outputs, gradients)):
            for (sender, _), receiver in messages.items():
                joining = link.between(devices[sender], devices[receiver])
                taken_s[kind, sender] += joining.send_s
                taken_s[kind, receiver] += joining.receive_s
        return taken_s

    @cached_property
    def inputs(self) -> list[list[tuple[int, float]]]:
        """Return for each stage the stages that it reads, and how many bytes from each."""
        return stage_inputs(self.schedule("step", {}), self.problem.layers, len(self.bounds))

    @cached_property
    def devices(self) -> Ints:
        if self.place:
            return np.array(self.place, np.int64)
        return np.arange(len(self.bounds)) % self.problem.devices

    @property
    def uniform(self) -> bool:
        """Return whether all stages take the same time and messages none: then closed forms hold."""
        seconds, link = self.seconds, self.problem.link
        per_byte = link.overhead_s_per_byte or not np.isinf(link.bytes_per_s)
        free = (
            link.near is None
            and link.of_idle_ends.latency_s == 0
            and not (per_byte and self.sums("output_bytes")[:-1].any())
        )
        return bool(free and np.allclose(seconds, seconds[:, :1], rtol=1e-9, atol=0))

    @cached_property
    def room_bytes(self) -> Floats:
        """Return the bytes within the limit that each device has for activations.

        Weights, gradients, slots and the activations that one dO computes again are already taken off.
        """
        devices = self.problem.devices
        if self.problem.memory_limit_bytes is None:
            return np.full(devices, np.inf)
        fixed = 2 * self.sums("weight_bytes") + self.sums("slot_bytes")
        used = np.bincount(self.devices, weights=fixed, minlength=devices).astype(float)
        again = np.zeros(devices)
        np.maximum.at(again, self.devices, self.sums("recomputed_bytes"))
        room: Floats = self.problem.memory_limit_bytes - used - again
        return room - np.array(self.problem.less_bytes) if self.problem.less_bytes else room

    @cached_property
    def summand_bytes(self) -> Floats:
        """Return the bytes of partial gradients not yet added up while a dW runs, float64 (stages,)."""
        problem = self.problem
        if problem.model:
            ranges = [(problem.bounds[first][0], problem.bounds[last][1]) for first, last in self.bounds]
            groups = (problem.model[first : last + 1] for first, last in ranges)
            return np.array([summand_bytes(group, problem.microbatches) for group in groups])
        costs = problem.costs("summand_bytes")
        return np.array([max(costs[first : last + 1]) for first, last in self.bounds])

    def most_in_flight(self, most: int) -> int:
        """Return how many micro-batches fit into memory at once, at most ``most``."""
        each = np.bincount(self.devices, weights=self.sums("stored_bytes"), minlength=self.problem.devices)
        room = np.floor(self.room_bytes[each > 0] / each[each > 0] + 1e-9).min(initial=np.inf)
        return int(max(1, min(most, self.problem.microbatches, room)))

    def schedule(self, policy: str, lanes: dict[Lane, TaskList], fused: bool = False) -> Schedule:
        count = self.problem.microbatches
        return Schedule(MODE, policy, lanes, microbatches=count, stages=self.bounds, fused_backward=fused)

    def with_updates(
        self, policy: str, orders: Iterable[Iterable[Task] | Ints], back: bool = False
    ) -> Schedule:
        """Return the schedule of each device's order, then the updates; ``back``: the last stage's first."""
        lanes: dict[Lane, TaskList] = {}
        for device, order in enumerate(orders):
            stages = np.flatnonzero(self.devices == device)
            updates = encode("U", stages[::-1] if back else stages)
            lanes[device, 0] = TaskList(np.concatenate([TaskList(order).codes, updates]))
        return self.schedule(policy, lanes)


def balanced(
    layers: Sequence[LayerCosts], speeds: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[tuple[int, int], ...]:
    """Return (first, last) layer of stages, the slowest as fast as possible. OptionsError: too few layers.

    ``speeds``: the speed of each stage's device; ``weights``: what to balance instead of seconds.
    """
    seconds, stages = [layer.busy_s for layer in layers] if weights is None else list(weights), len(speeds)
    if stages > len(seconds):
        raise OptionsError(f"{stages} stages are more than the {len(seconds)} layers; use fewer devices")
    if len(set(speeds)) > 1:
        sums = np.cumsum([0.0, *seconds])
        ends = cheapest(sums, np.zeros(len(seconds)), speeds, shortest_s(sums, speeds))
        return tuple((first, after - 1) for first, after in itertools.pairwise([0, *ends]))
    if len(set(seconds)) == 1:
        bounds = [len(seconds) * stage // stages for stage in range(stages + 1)]
        return tuple((first, after - 1) for first, after in itertools.pairwise(bounds))
    total_s = sum(seconds)
    low, high = max(max(seconds), total_s / stages), total_s
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _count(seconds, middle) <= stages else (middle, high)
    return _cut(seconds, high * (1 + 1e-12), stages)


def _count(seconds: Sequence[float], limit_s: float) -> int:
    stages, used = 1, 0.0
    for value in seconds:
        if used + value > limit_s:
            stages, used = stages + 1, 0.0
        used += value
    return stages


def _cut(seconds: Sequence[float], limit_s: float, stages: int) -> tuple[tuple[int, int], ...]:
    """Fill stage after stage up to the limit, but leave one layer for each stage to come."""
    cuts: list[tuple[int, int]] = []
    first, used = 0, 0.0
    for index, value in enumerate(seconds):
        to_come = stages - len(cuts) - 1
        full = index > first and (used + value > limit_s or len(seconds) - index == to_come)
        if full and to_come:
            cuts.append((first, index - 1))
            first, used = index, 0.0
        used += value
    return (*cuts, (first, len(seconds) - 1))


@dataclass(frozen=True)
class Pace:
    """Says how many forwards run ahead of the first dO, and how many dW are put off: int64 (devices,).

    A device that runs further ahead than the one before it would wait for itself.
    """

    ahead: Ints
    delay: Ints

    def capped(self, stages: StagedLayers) -> Pace:
        """Return the pace within the memory limit, for ``ahead`` activations and ``delay`` dW, at least 1."""
        full, kept = stages.sums("stored_bytes"), stages.sums("kept_bytes")
        room = stages.room_bytes
        ahead = np.minimum(self.ahead, np.maximum(_fit(room, full), 1))
        ahead = np.minimum(np.minimum.accumulate(ahead), stages.problem.microbatches)
        delay = np.minimum(self.delay, np.maximum(_fit(room - ahead * full, kept), 0))
        return Pace(ahead.astype(np.int64), np.minimum(delay, stages.problem.microbatches).astype(np.int64))


def _fit(room_bytes: Floats, size_bytes: Floats) -> Floats:
    """Return how many of a size fit into the room, float64."""
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.floor(room_bytes / size_bytes + 1e-9)
    return np.where(size_bytes > 0, count, np.inf)


def paced(
    policy: str, stages: StagedLayers, pace: Pace, *, fused: bool = False, limited: bool = True
) -> Schedule:
    """Return one stage on each device: ``ahead`` F, then in turns dO, a delayed dW and F, the last dW, U."""
    pace = pace.capped(stages) if limited else pace
    count = stages.problem.microbatches
    lanes: dict[Lane, TaskList] = {}
    batch = np.arange(count, dtype=np.int64)
    for device in range(stages.problem.devices):
        order = places(count, int(pace.ahead[device]), int(pace.delay[device]))
        codes = lane_codes((device, device, device), batch, order)
        lanes[device, 0] = TaskList(np.append(codes, encode("U", device)))
    return stages.schedule(policy, lanes, fused)


def places(count: int, ahead: int, delay: int) -> tuple[Ints, Ints, Ints]:
    """Return a lane's order as sort keys of F, dO, dW: round k is dO k, dW k - delay, F k + ahead."""
    batch = np.arange(count, dtype=np.int64)
    forward = np.where(batch < ahead, batch - ahead, 3 * (batch - ahead) + 2)
    late = batch + delay
    weight_grad = np.where(late < count, 3 * late + 1, 3 * count + batch)
    return forward, 3 * batch, weight_grad


def lane_codes(stages: Sequence[ArrayLike], batch: Ints, order: Sequence[Ints]) -> Ints:
    """Return codes of F, dO and dW, sorted by their places; ``stages``: the stages of each kind."""
    kinds = zip(("F", "dO", "dW"), stages, strict=True)
    codes = np.concatenate([encode(kind, stage, batch) for kind, stage in kinds])
    return codes[np.argsort(np.concatenate(order), kind="stable")]


def lane_peak_bytes(codes: Ints, activation_bytes: Floats, kept_bytes: Floats) -> float:
    """Return the most activation bytes alive on a device with this single lane; sizes are per stage."""
    fields = Fields.of(codes)
    full, kept = activation_bytes[fields.stage], kept_bytes[fields.stage]
    is_kind = [fields.kind == KIND_NUMBER[kind] for kind in ("F", "dO", "dW")]
    return float(np.cumsum(np.select(is_kind, [full, kept - full, -kept])).max(initial=0.0))


def interleaved(
    stages: StagedLayers, chunks: int, size: int, hop: int, *, delayed: bool = False
) -> dict[Lane, TaskList]:
    """Return rounds of ``size`` micro-batches, in each of which they pass in groups of p to 2p - 1.

    A device runs ``hop`` more F ahead than the next one.  ``delayed``: device i puts each dW off by i dO, so
    that dO come back without waiting for dW (PyTorch's InterleavedZeroBubble, with ``hop`` 1).
    """
    count, devices = stages.problem.microbatches, stages.problem.devices
    batches = [np.arange(first, min(first + size, count)) for first in range(0, count, size)]
    lanes: dict[Lane, TaskList] = {}
    for device in range(devices):
        delay = device if delayed else 0
        rounds = [_lane(device, devices, chunks, batch, hop, delay) for batch in batches]
        updates = encode("U", np.arange(chunks) * devices + device)
        lanes[device, 0] = TaskList(np.concatenate([*rounds, updates]))
    return lanes


def _lane(device: int, devices: int, chunks: int, batches: Ints, hop: int, delay: int) -> Ints:
    groups = np.array_split(batches, max(1, len(batches) // devices))
    ahead = (chunks - 1) * len(groups[0]) + hop * (devices - 1 - device) + 1
    down = np.concatenate([np.full(len(group), chunk) for group in groups for chunk in range(chunks)])
    batch = np.concatenate([group for group in groups for _ in range(chunks)])
    forward = down * devices + device
    backward = (chunks - 1 - down) * devices + device
    return lane_codes((forward, backward, backward), batch, places(len(batch), ahead, delay))
