"""Computes a candidate's figures, also with replicas, and states what a plan's predictions assume."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tf_ooo.costs.communication import runtime_text
from tf_ooo.costs.layer_costs import LayerCosts, Link, layer_inputs
from tf_ooo.costs.table import CostTable
from tf_ooo.planning.choosing.plan import NO_LIMIT, Candidate, Plan, Trial, policy_named, tried
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.policies import POLICIES, REFERENCES
from tf_ooo.units import bytes_text, count_text, first_of, time_text

# Above this, the schedule without the limit takes too long only to compare it.
_TASKS_TO_MAKE_AGAIN = 100_000
_SAME = 0.005
# Names of layers that run again in one line.
_SHOWN = 6


def microbatches_per_s(trial: Trial) -> float:
    """Return the throughput of all workers; infinite where nothing takes time."""
    schedule = trial.schedule
    count = schedule.microbatches * schedule.workers
    return count / trial.step_s if trial.step_s else float("inf")


def one_device_s(schedule: Schedule, layers: Sequence[LayerCosts]) -> float:
    """Return the seconds in which one device does the same work task by task, with as many updates.

    Layers that run again to save memory are not counted.
    """
    updates = schedule.microbatches if schedule.asynchronous else 1
    batches_s = schedule.microbatches * sum(layer.busy_s - layer.recomputed_s for layer in layers)
    return schedule.workers * (batches_s + updates * sum(layer.update_s for layer in layers))


def over_one_device(trial: Trial) -> float | None:
    """Return the speed-up over one device; None where nothing takes time."""
    return one_device_s(trial.schedule, trial.problem.layers) / trial.step_s if trial.step_s else None


def over(trial: Trial, other: Trial) -> float | None:
    """Return the ratio of micro-batches a second to another trial's; None: nothing takes time."""
    rate = microbatches_per_s(other)
    return microbatches_per_s(trial) / rate if trial.step_s and other.step_s else None


def reference(compared: Sequence[Candidate], problem: Problem, mode: str) -> Candidate | None:
    """Return the candidate that a mode's are compared with, made if missing; None: impossible."""
    known = {candidate.name: candidate for candidate in compared}
    for name in REFERENCES[mode]:
        own = replace(problem, options={}, mode=mode)
        candidate = known.get(name) or tried(policy_named(name, mode), own)
        if candidate.trial is not None:
            return candidate
    return None


@dataclass(frozen=True)
class Squeezed:
    """Describes a schedule that the memory limit has changed, in its order or in what runs again.

    Attributes:
        name: the policy's name.
        limits_bytes: each device's limit, or one for all.
        slower: by how much than without the limit, 0.12 for 12%; below 0 if it happens to be faster.
        free_bytes: bytes that it would need without the limit.
    """

    name: str
    limits_bytes: tuple[int, ...]
    slower: float
    free_bytes: int

    @property
    def in_short(self) -> str:
        """Return the cost of the limit in short, for a table."""
        return f"limit: +{self.slower:.0%}" if self.slower >= _SAME else "limit: +0%"

    def __str__(self) -> str:
        how = f"{self.slower:.0%} slower than" if self.slower >= _SAME else "as fast as"
        limits = ", ".join(map(bytes_text, self.limits_bytes))
        return f"{self.name} under {limits}: {how} without the limit ({bytes_text(self.free_bytes)})"


def squeezed(candidate: Candidate) -> Squeezed | None:
    """Return the cost of the memory limit for a schedule; None where it changed nothing."""
    trial = candidate.trial
    if trial is None or not trial.problem.limits_bytes or len(trial.schedule.tasks) > _TASKS_TO_MAKE_AGAIN:
        return None
    without = _without_limit(candidate, trial.problem)
    if without is None or (_same(without.schedule, trial.schedule) and not trial.problem.recomputed):
        return None
    slower = trial.step_s / without.step_s - 1 if without.step_s else 0.0
    return Squeezed(candidate.name, trial.problem.limits_bytes, slower, without.peak_bytes)


@dataclass(frozen=True)
class Recomputed:
    """Describes the cost and the gain of layers that run their forward again.

    Attributes:
        name: the policy's name.
        layers: names of the layers that run again, out of ``count``.
        again_s: seconds of these forwards in a step, of all devices together.
        peak_bytes, kept_bytes: most on one device, and the same for the schedule without limit in which no
            layer runs again (None: a schedule of one's own, or one of too many tasks to make again).
    """

    name: str
    layers: tuple[str, ...]
    count: int
    again_s: float
    peak_bytes: int
    kept_bytes: int | None

    @property
    def in_short(self) -> str:
        """Return the cost and the gain in short, for a table."""
        return f"recomputes {len(self.layers)} of {self.count} layers"

    def __str__(self) -> str:
        instead = "" if self.kept_bytes is None else f" instead of {bytes_text(self.kept_bytes)}"
        return (
            f"{self.name} {self.in_short} ({first_of(self.layers, _SHOWN)}): {time_text(self.again_s)} of "
            f"work more a step, peak {bytes_text(self.peak_bytes)}{instead}"
        )


def recomputation(candidate: Candidate) -> Recomputed | None:
    """Return the cost and gain of layers that run again in a schedule; None: none do."""
    trial = candidate.trial
    if trial is None or not trial.problem.recomputed:
        return None
    problem, layers = trial.problem, trial.problem.own_layers
    makes = candidate.name in POLICIES and len(trial.schedule.tasks) <= _TASKS_TO_MAKE_AGAIN
    without = _without_limit(candidate, problem) if makes else None
    names = tuple(layers[number].name or str(number) for number in problem.recomputed)
    again_s = trial.schedule.microbatches * sum(layer.recomputed_s for layer in problem.layers)
    kept_bytes = None if without is None else without.peak_bytes
    return Recomputed(candidate.name, names, len(layers), again_s, trial.peak_bytes, kept_bytes)


def _without_limit(candidate: Candidate, problem: Problem) -> Trial | None:
    """Return its trial without a limit and without layers that run again, searched as much as within."""
    if candidate.unlimited is not None:
        return candidate.unlimited
    layers = problem.plain or problem.layers
    plain = replace(problem, layers=layers, recomputed=(), plain=(), memory_limit_bytes=NO_LIMIT)
    return tried(policy_named(candidate.name), plain).trial


def _same(schedule: Schedule, other: Schedule) -> bool:
    """Return whether both run the same tasks in the same places and order."""
    return schedule.lanes == other.lanes and schedule.stages == other.stages and schedule.parts == other.parts


def stated(plan: Plan, table: CostTable | None = None) -> tuple[str, ...]:
    """Return the assumptions of a plan, and the cost of its memory limit."""
    schedule = plan.trial.schedule
    candidate = Candidate(schedule.policy, plan.problem, plan.trial)
    said = [str(cost) for cost in (squeezed(candidate), recomputation(candidate)) if cost is not None]
    return (*assumptions(plan.problem, table, schedule.mode), *said)


def assumptions(problem: Problem, table: CostTable | None = None, mode: str | None = None) -> tuple[str, ...]:
    """State the costs, devices, rows of a step, link and limit; ``mode`` as in the schedule."""
    speeds = ", ".join(f"{speed:.3g}" for speed in problem.link.speeds)
    return (
        *_of_costs(table),
        _rows_text(problem, table, mode),
        *([_link_text(problem.link)] if problem.devices > 1 else []),
        *(_cores_texts(problem.link) if problem.devices > 1 else ()),
        *([f"devices {speeds} times as fast as the one that the costs are for"] if speeds else []),
        _limit_text(problem.limits_bytes),
    )


def _of_costs(table: CostTable | None) -> tuple[str, ...]:
    if table is None:
        return ("costs as given, for one micro-batch",)
    if not (table.device or table.assumptions):
        return ("costs as given; the table says of no device",)
    return (*([f"costs {table.source}, for {table.device}"] if table.device else []), *table.assumptions)


def _rows_text(problem: Problem, table: CostTable | None, mode: str | None) -> str:
    count, devices = problem.microbatches, problem.devices
    text = f"{count_text(devices, 'device')}, {count_text(count, 'micro-batch')}"
    text += " on each" if mode == "data_parallel" and devices > 1 else " a step"
    rows = None if table is None else table.rows
    if rows is None:
        return f"{text}, of rows that the costs do not tell"
    workers = devices if mode == "data_parallel" else 1
    return f"{text}, of {count_text(rows, 'row')}: {count_text(rows * count * workers, 'row')} a step"


def _link_text(link: Link) -> str:
    if replace(link, speeds=()) == Link():
        return "no link is given: what devices send takes no time (--link 25Gbit,20us; link=tf_ooo.Link(...))"
    speed = "any size" if math.isinf(link.bytes_per_s) else f"{link.bytes_per_s * 8 / 1e9:.4g} Gbit/s"
    text = f"link {speed}, {time_text(link.latency_s)} latency, each direction of each two devices"
    if link.overhead_s_per_byte:
        text += f", {link.overhead_s_per_byte * 1e9:.3g} s of both processors for each GB"
    text = f"{text}; {runtime_text(link.runtime)}" if link.runtime else text
    if link.near is None:
        return text
    members = [
        [str(n) for n, group in enumerate(link.groups) if group == own] for own in dict.fromkeys(link.groups)
    ]
    near = " and ".join(f"devices {', '.join(group)}" for group in members if len(group) > 1)
    return f"{text}; nearer ones among {near or 'no devices'}: {_link_text(link.near)}"


def _cores_texts(link: Link) -> tuple[str, ...]:
    """Say which devices share cores; empty: none do."""
    machines: dict[int, list[str]] = {}
    for device, machine in enumerate(link.machines):
        machines.setdefault(machine, []).append(str(device))
    sharing = [f"devices {', '.join(group)}" for group in machines.values() if len(group) > 1]
    return (f"{' and '.join(sharing)} share the {link.cores} cores of their machine",) if sharing else ()


def _limit_text(limits_bytes: Sequence[int]) -> str:
    if len(set(limits_bytes)) > 1:
        return f"at most {', '.join(map(bytes_text, limits_bytes))} on the devices"
    return f"at most {bytes_text(limits_bytes[0])} on each device" if limits_bytes else "no memory limit"


def side_by_side(
    schedule: Schedule, layers_of: Sequence[Sequence[LayerCosts]]
) -> tuple[Schedule, tuple[LayerCosts, ...]]:
    """Return one schedule with the tasks of all replicas, and its stages' costs.

    Args:
        schedule: the schedule of one replica.
        layers_of: each replica's stages, one layer for each; devices and stages of later replicas are
            numbered on from the first's.
    """
    layers, numbers = layers_of[0], range(len(layers_of))
    count, devices = len(layers), schedule.devices

    def of_replica(number: int, task: Task) -> Task:
        return dataclasses.replace(task, stage=task.stage + number * count)

    lanes = {
        (device + number * devices, stream): TaskList([of_replica(number, task) for task in tasks])
        for number in numbers
        for (device, stream), tasks in schedule.lanes.items()
    }
    together = dataclasses.replace(
        schedule,
        lanes=lanes,
        stages=tuple((stage, stage) for stage in range(len(numbers) * count)),
        parts={(k, s + n * count): shares for n in numbers for (k, s), shares in schedule.parts.items()},
        after=tuple(
            (of_replica(n, task), of_replica(n, other), steps)
            for n in numbers
            for task, other, steps in schedule.after
        ),
        priority_lanes=frozenset((d + n * devices, s) for n in numbers for d, s in schedule.priority_lanes),
        workers=1,
        predicted_step_s=None,
        predicted_peak_bytes=None,
    )
    inputs = [layer_inputs(tuple(layers), stage) for stage in range(count)]
    return together, tuple(
        dataclasses.replace(
            layer,
            inputs=tuple(source + number * count for source in inputs[stage]),
            tied=tuple((owner + number * count, size) for owner, size in layer.tied),
        )
        for number in numbers
        for stage, layer in enumerate(layers_of[number])
    )


def held_evenly(device_of_layer: Sequence[int], bytes_of_layer: Sequence[float], replicas: int) -> list[int]:
    """Deal each device's layers out to replicas that hold about as many bytes each, the largest layer first.

    ``device_of_layer``: the device of each layer in one replica; a device may have several stages.
    """
    held = {(device, replica): 0.0 for device in set(device_of_layer) for replica in range(replicas)}
    holders = [0] * len(device_of_layer)
    for layer in sorted(range(len(device_of_layer)), key=lambda layer: (-bytes_of_layer[layer], layer)):
        device = device_of_layer[layer]
        holder = min(range(replicas), key=lambda replica: (held[device, replica], replica))
        holders[layer] = holder
        held[device, holder] += bytes_of_layer[layer]
    return holders


@dataclass(frozen=True)
class StageShare:
    """Says what one replica's device holds of a stage, and its work for the stage once a step.

    Attributes:
        weight_bytes: bytes of the layers that it holds; ``stage_bytes``: those of the whole stage.
        slot_bytes, update_s: bytes and seconds of the layers that it holds.
        largest_bytes: bytes of the largest of them, which a sum of two gradients takes, too.
        replicas: how many share the stage.
    """

    weight_bytes: float
    stage_bytes: float
    slot_bytes: float
    update_s: float
    largest_bytes: float
    replicas: int

    def exchange_s(self, link: Link) -> float:
        """Return seconds in which the device sends and receives gradients and weights.

        Gradients go to the holder of the weights, which come back (ZeRO, arXiv 1910.02054, section 7.1). If
        all hold equal parts, that moves as much as a ring allreduce.  A device sends as much as it receives.
        """
        if self.replicas == 1:
            return 0.0
        moved_bytes = self.stage_bytes - self.weight_bytes + (self.replicas - 1) * self.weight_bytes
        computing_s = 2 * moved_bytes * link.overhead_s_per_byte
        return 2 * link.of_idle_ends.latency_s + link.occupied_s(moved_bytes) + computing_s

    @property
    def bytes(self) -> float:
        """Return the bytes of slots, and of the others' gradients, which are there as soon as they come."""
        return self.slot_bytes + (self.replicas - 1) * self.weight_bytes


def stage_shares(
    layers: Sequence[LayerCosts], stage_of_layer: Sequence[int], holders: Sequence[int], replicas: int
) -> list[list[StageShare]]:
    """Return for each replica what its device holds of each stage."""

    def share(replica: int, stage: int) -> StageShare:
        of_stage = [number for number, at in enumerate(stage_of_layer) if at == stage]
        own = [layers[number] for number in of_stage if holders[number] == replica]
        return StageShare(
            sum(layer.weight_bytes for layer in own),
            sum(layers[number].weight_bytes for number in of_stage),
            sum(layer.slot_bytes for layer in own),
            sum(layer.update_s for layer in own),
            max((layer.weight_bytes for layer in own), default=0.0),
            replicas,
        )

    stages = range(max(stage_of_layer) + 1)
    return [[share(replica, stage) for stage in stages] for replica in range(replicas)]
