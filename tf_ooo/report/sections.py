"""Defines the parts of a report; they read also as the dictionaries of :meth:`tf_ooo.Report.to_dict`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tf_ooo.costs.communication import runtime_text
from tf_ooo.costs.layer_costs import Link
from tf_ooo.units import bytes_text, seconds_text, sizes_text

if TYPE_CHECKING:
    from grappler_passes.graph.training_graph import Layer

Rows = list[tuple[str, str]]


def device_text(name: str) -> str:
    """Return ``CPU:0`` for a device of this process, ``worker 1, GPU:0`` for others; other names stay."""
    parts = dict(part.partition(":")[::2] for part in name.strip("/").split("/"))
    if "device" not in parts:
        return name
    there = "" if parts.get("job", "localhost") == "localhost" else f"{parts['job']} {parts.get('task', 0)}, "
    return there + parts["device"]


class Section(Mapping[str, Any]):
    """Reads as a mapping of JSON types, too; optional fields that are None have no key."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            name: _json(value)
            for name, value in vars(self).items()
            if value is not None or not hasattr(type(self), name)  # the class has the defaults
        }

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())


def _json(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    return [_json(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(eq=False, frozen=True)
class LayerRow(Section):
    """Describes one layer of the training graph.

    Attributes:
        index, name: the layer's number and its weights' names.
        dW, U, comm: how many ops of each kind it has.
        own_dO: single_device, data_parallel: whether the schedule has a dO of the layer's own.
        stage, device: pipeline: its stage and device.
        F_processor, dO_processor, dW_processor: layerpipe: the devices that run its tasks;
            ``dO_high_processor`` runs the rest of a divided dO.
        stages_after: layerpipe: processors that lie between the layer and the loss.
        delay_steps: layerpipe: how many steps late its gradients are applied.
    """

    index: int = 0
    name: str = ""
    dW: int = 0
    U: int = 0
    comm: int = 0
    own_dO: bool | None = None
    stage: int | None = None
    device: str | None = None
    F_processor: int | None = None
    dO_processor: int | None = None
    dW_processor: int | None = None
    dO_high_processor: int | None = None
    stages_after: int | None = None
    delay_steps: int | None = None

    @classmethod
    def of(cls, layer: Layer) -> LayerRow:
        """Return a layer's row: its name, and its number of ops of dW, U and communication."""
        counts = len(layer.weight_grad_ops), len(layer.update_ops), len(layer.communication_ops)
        return cls(layer.index, layer.name, *counts)


@dataclass(eq=False, frozen=True)
class StageRow(Section):
    """Describes one stage of a pipeline, for one micro-batch.

    Attributes:
        stage, device: its number, and the name of its device.
        layers: names of its layers.
        seconds: what F, dO, dW and U take on the device.
        weight_bytes, slot_bytes, activation_bytes: the bytes that it keeps.
        sends: bytes to each stage that reads its outputs.
        why: its share of the seconds, and the bytes that the cut behind it sends.
        speed: its device's speed, relative to the device on which costs were measured.
    """

    stage: int
    device: str
    layers: Sequence[str]
    seconds: Mapping[str, float]
    weight_bytes: float
    slot_bytes: float
    activation_bytes: float
    sends: Mapping[int, float]
    why: str
    speed: float = 1.0

    def text(self) -> str:
        return f"{_device_with_speed(self.device, self.speed)}: {_neighbours_text(self.layers)}; {self.why}"


def _neighbours_text(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} layers)"


def _device_with_speed(device: str, speed: float) -> str:
    """Return the device, with its speed if that differs from the device on which costs were measured."""
    named = device_text(device)
    return named if speed == 1 else f"{named} ({speed:.2g} times as fast as where costs were measured)"


@dataclass(eq=False, frozen=True)
class CandidateRow(Section):
    """Describes a tried schedule and number of stages: seconds of a step and bytes, or why not."""

    schedule: str
    stages: int
    predicted_step_s: float | None = None
    peak_bytes: int | None = None
    reason: str | None = None


@dataclass(eq=False, frozen=True)
class ReplicasRow(Section):
    """Describes a compared number of replicas of a pipeline, or why it is not possible.

    Attributes:
        replicas, devices: devices of each replica.
        schedule: the name of the best schedule.
        predicted_step_s: seconds of a step with all micro-batches, gradients added up.
        peak_bytes: the peak of a device.
        taken: whether it was chosen.
        reason: why there is no plan.
    """

    replicas: int
    devices: int
    schedule: str | None = None
    predicted_step_s: float | None = None
    peak_bytes: int | None = None
    taken: bool = False
    reason: str | None = None

    def text(self) -> str:
        """Return ``2 x 2 devices: 13.1 ms (1f1b), taken``."""
        size, taken = f"{self.replicas} x {self.devices} devices", ", taken" if self.taken else ""
        if self.predicted_step_s is None:
            return f"{size}: {self.reason}"
        return f"{size}: {seconds_text(self.predicted_step_s)} ({self.schedule}){taken}"


@dataclass(eq=False, frozen=True)
class LinkRow(Section):
    """Describes the link between devices; ``bytes_per_s`` is None for no limit.

    ``cores`` of a machine that several devices share; None: all have their own.  ``runtime``: its own costs,
    by the names of :class:`tf_ooo.Link`; None: nothing.  ``near``: the link within the ``groups`` of devices;
    None: all links are alike.
    """

    latency_s: float
    bytes_per_s: float | None
    overhead_s_per_byte: float
    cores: int | None = None
    runtime: Mapping[str, float] | None = None
    near: LinkRow | None = None
    groups: tuple[int, ...] | None = None

    @classmethod
    def of(cls, link: Link) -> LinkRow:
        bytes_per_s = None if math.isinf(link.bytes_per_s) else link.bytes_per_s
        cores = link.cores if link.machines else None
        near = None if link.near is None else cls.of(link.near)
        own = (link.latency_s, bytes_per_s, link.overhead_s_per_byte, cores, link.runtime or None)
        return cls(*own, near, link.groups or None)

    def text(self) -> str:
        speed = "no limit" if self.bytes_per_s is None else f"{bytes_text(round(self.bytes_per_s))}/s"
        shared = "" if self.cores is None else f"; devices share the {self.cores} cores of a machine"
        runtime = f"; {runtime_text(self.runtime)}" if self.runtime else ""
        near = f"; within a group of near devices {self.near.text()}" if self.near is not None else ""
        return f"{speed}, {seconds_text(self.latency_s)} each message{shared}{runtime}{near}"


@dataclass(eq=False, frozen=True)
class ModeSection(Section):
    """Holds the figures of a mode over several devices; it is empty in other modes.

    Attributes:
        devices: their names.
        predicted_step_s: seconds of one step.
        serial_step_s: seconds of all tasks of a step one after the other.
        link: the link between devices.
        step_s: measured seconds of steps.
    """

    devices: Sequence[str] = ()
    predicted_step_s: float = 0.0
    serial_step_s: float = 0.0
    link: LinkRow | None = None
    step_s: Sequence[float] = ()

    @property
    def link_row(self) -> tuple[str, str]:
        return "link between devices", "" if self.link is None else self.link.text()

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() if self.devices else {}


@dataclass(eq=False, frozen=True)
class PipelineSection(ModeSection):
    """Holds the section ``report.pipeline``.

    Attributes:
        stages, candidates: a row for each.
        predicted_bubble_fraction: the share of all devices' time in which nothing runs.
        predicted_peak_bytes: the peak of each device.
        microbatches: how many one step has; ``first_microbatches``: how many the first steps had, if others.
        recomputed: says which layers run their forward again, and its cost and gain; empty: none.
        replicas: how many pipelines share the micro-batches; stages' rows and peaks are the first's.
        replica_devices: the devices of each replica.
        exchange_s: predicted seconds in which a device sends and receives gradients and weights of others.
        compared_replicas: a row for each number of replicas that was compared.
    """

    stages: Sequence[StageRow] = ()
    candidates: Sequence[CandidateRow] = ()
    predicted_bubble_fraction: float = 0.0
    predicted_peak_bytes: Sequence[int] = ()
    microbatches: int = 1
    first_microbatches: int = 0
    recomputed: str = ""
    replicas: int = 1
    replica_devices: Sequence[Sequence[str]] = ()
    exchange_s: float = 0.0
    compared_replicas: Sequence[ReplicasRow] = ()

    def rows(self, runs: bool) -> Rows:
        """Return rows for the summary: the places of stages, if the plan ``runs``, and the comparison."""
        compared = [("compared", row.text()) for row in self.compared_replicas]
        if not (self and runs):
            return compared
        replicas = enumerate(self.replica_devices if self.replicas > 1 else ())
        return [
            *compared,
            *((f"replica {number}", ", ".join(map(device_text, names))) for number, names in replicas),
            *((f"stage {row.stage}", row.text()) for row in self.stages),
            ("runs again", self.recomputed),
            ("micro-batches", str(self.microbatches)),
            self.link_row,
        ]


@dataclass(eq=False, frozen=True)
class LayerPipeSection(ModeSection):
    """Holds the section ``report.layerpipe``.

    Attributes:
        speeds: the devices' speeds, relative to the one on which costs were measured; empty: all are 1.
        divided: the lower processor's share of each dO that is on two processors, by layer.
        ways_bytes: about the bytes of earlier weights, for each value of ``weights=``.
        delay_steps: how late each variable's gradients are, counted on the graph that runs.
        rounds: how many a batch takes.
        registers: number of tensors that are kept from one round to the next.
        weight_version_bytes: bytes of earlier weights, by the way in which they are kept or sent.
    """

    speeds: Sequence[float] = ()
    divided: Mapping[int, float] = field(default_factory=dict)
    ways_bytes: Mapping[str, float] = field(default_factory=dict)
    delay_steps: Mapping[str, int] | None = None
    rounds: int | None = None
    registers: int | None = None
    weight_version_bytes: Mapping[str, int] | None = None

    def rows(self, layers: Sequence[LayerRow]) -> Rows:
        """Return rows for the summary: the places of tasks, and how late gradients are."""
        if not self.devices:
            return []
        late = max((row.delay_steps or 0 for row in layers), default=0)
        speeds = self.speeds or (1.0,) * len(self.devices)
        named = map(_device_with_speed, self.devices, speeds)
        return [
            *((f"processor {n}", f"{device}: {_tasks_on(n, layers)}") for n, device in enumerate(named)),
            self.link_row,
            ("gradients", f"up to {late} steps late: this changes the result of training"),
            ("earlier weights", sizes_text(self.weight_version_bytes or {})),
            ("with weights=, about", sizes_text(self.ways_bytes)),
        ]


def _tasks_on(processor: int, layers: Sequence[LayerRow]) -> str:
    """Name the layers whose tasks are all there, neighbours together; for other layers each task."""
    parts: list[str] = []
    for whole, rows in itertools.groupby(layers, lambda row: set(_places(row).values()) == {processor}):
        if whole:
            parts.append(_neighbours_text([row.name for row in rows]))
    for row in layers:
        here = [task for task, at in _places(row).items() if at == processor]
        if here and len(set(_places(row).values())) > 1:
            parts.append(f"{' and '.join(here)} of {row.name}")
    return ", ".join(parts)


def _places(row: LayerRow) -> dict[str, int]:
    """Return the processor of each of a row's tasks."""
    high = row.dO_high_processor
    places = {
        "forward pass": row.F_processor,
        "output gradient" if high is None else "a part of the output gradient": row.dO_processor,
        "the rest of the output gradient": high,
        "weight gradient": row.dW_processor,
    }
    return {task: at for task, at in places.items() if at is not None}
