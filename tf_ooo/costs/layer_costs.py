"""Defines the costs of a layer, for ONE micro-batch, and of a link, for schedulers and the simulator."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType, NoneType
from typing import TypeGuard

import numpy as np

from tf_ooo.errors import CostError

# LayerCosts has the seconds of each kind of task in these fields.
SECONDS: Mapping[str, str] = MappingProxyType(
    {"F": "forward_s", "dO": "output_grad_s", "dW": "weight_grad_s", "U": "update_s"}
)


@dataclass(frozen=True)
class LayerCosts:
    """Holds seconds and bytes of one layer for one micro-batch.

    Attributes:
        forward_s, output_grad_s, weight_grad_s: seconds of F, dO and dW.
        update_s: seconds of the weight update, once a step.
        activation_bytes: kept from the start of F until both dO and dW are done.
        weight_bytes: the weights, kept all the time; their gradient takes the same bytes from the first dW
            until the update.
        output_bytes: what F sends to the next layer, and what dO sends back.
        weight_grad_bytes: what dW alone still needs after dO is done (M_W in Zero Bubble,
            arXiv 2401.10241, section 2.3); None: all of ``activation_bytes``.
        inputs: layers whose outputs this one reads; None: the layer before (none for the first).
        occupancy: shares of the device in (0, 1] that F, dO and dW keep busy, for streams that run
            side by side; None: streams do not slow each other down.  If devices share a machine's cores
            (``Link.machines``), shares of these cores; None: one core.
        slot_bytes: optimizer state and other variables without a gradient: kept all the time, never
            communicated.
        summand_bytes: parts of a gradient that wait to be added up while dW runs: parts of one weight's, and
            a micro-batch's gradient that waits for the sum of the earlier ones.
        forward_bytes: the part of ``activation_bytes`` that the forward pass makes or reads; the rest are
            gradients that dW needs, counted from the start; None: all.
        recomputed_bytes: the part of ``activation_bytes`` that is freed after F and computed again at the
            start of dO, because F runs again; see :meth:`recomputed`.
        recomputed_s: the seconds of running F again, a part of ``output_grad_s``.
        compiled: XLA's calls return all gradients of a stage at once, before any is added up, and all its new
            weights and slots.
        tied: lower layers whose weights this one uses as well, each with the bytes of their gradient that its
            dW sends there for each micro-batch: a head that reads the embedding's table.

    Raises:
        CostError: a number is negative, NaN or infinite, or an input or a tied layer is no earlier layer.
    """

    forward_s: float
    output_grad_s: float
    weight_grad_s: float
    update_s: float = 0.0
    activation_bytes: float = 0
    weight_bytes: float = 0
    output_bytes: float = 0
    weight_grad_bytes: float | None = None
    inputs: tuple[int, ...] | None = None
    occupancy: tuple[float, float, float] | None = None
    name: str = ""
    slot_bytes: float = 0
    summand_bytes: float = 0
    forward_bytes: float | None = None
    recomputed_bytes: float = 0
    recomputed_s: float = 0.0
    compiled: bool = False
    tied: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for amount in _AMOUNTS:
            value = getattr(self, amount.name)
            if value is not None or amount.default is not None:
                _check_amount(self.name, amount.name, value)
        if self.weight_grad_bytes is not None and self.weight_grad_bytes > self.activation_bytes:
            raise CostError(
                f"{_where(self.name)}weight_grad_bytes={self.weight_grad_bytes} is above "
                f"activation_bytes={self.activation_bytes}: dO frees memory, it does not add any"
            )
        for part, whole in (("recomputed_bytes", "activation_bytes"), ("recomputed_s", "output_grad_s")):
            if getattr(self, part) > getattr(self, whole):
                raise CostError(
                    f"{_where(self.name)}{part}={getattr(self, part)} is above what it is part of, "
                    f"{whole}={getattr(self, whole)}"
                )
        if not isinstance(self.name, str):
            raise CostError(f"name must be text, got {self.name!r:.80}")
        pairs = self.tied if isinstance(self.tied, (tuple, list)) else (None,)
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
            raise CostError(f"{_where(self.name)}tied must be pairs (layer, bytes), got {self.tied!r:.80}")
        for _, size_bytes in self.tied:
            _check_amount(self.name, "tied", size_bytes)
        for field in ("inputs", "occupancy"):
            if not isinstance(getattr(self, field), (tuple, list, NoneType)):
                raise CostError(
                    f"{_where(self.name)}{field} must be a tuple, got {getattr(self, field)!r:.80}"
                )
        for share in self.occupancy or ():
            if not is_number(share) or not 0 < share <= 1:
                raise CostError(f"{_where(self.name)}occupancy must be in (0, 1], got {share!r:.80}")

    @property
    def busy_s(self) -> float:
        """Return the seconds of F, dO and dW together for one micro-batch."""
        return self.forward_s + self.output_grad_s + self.weight_grad_s

    @property
    def kept_bytes(self) -> float:
        """Return the bytes alive between dO and dW."""
        return self.activation_bytes if self.weight_grad_bytes is None else self.weight_grad_bytes

    @property
    def stored_bytes(self) -> float:
        """Return the bytes alive between F and dO."""
        return self.activation_bytes - self.recomputed_bytes

    def recomputed(self, input_bytes: float) -> LayerCosts:
        """Return the costs if F runs again before dO: in between only its ``input_bytes`` are kept."""
        if self.recomputed_s or self.recomputed_bytes:
            return self
        made_bytes = self.activation_bytes if self.forward_bytes is None else self.forward_bytes
        return replace(
            self,
            output_grad_s=self.output_grad_s + self.forward_s,
            recomputed_s=self.forward_s,
            recomputed_bytes=max(0.0, min(made_bytes, self.activation_bytes) - input_bytes),
        )

    def slowed(self, factor: float) -> LayerCosts:
        """Return the costs on a device that takes ``factor`` times as long."""
        names = (*SECONDS.values(), "recomputed_s")
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def scaled(self, factor: float) -> LayerCosts:
        """Return the costs of ``factor`` times the micro-batch: all but the update and the weights."""
        amounts = {amount.name: getattr(self, amount.name) for amount in _AMOUNTS}
        grown = {n: x * factor for n, x in amounts.items() if x is not None and n not in _PER_STEP}
        return replace(self, **grown)


_AMOUNTS = [field for field in fields(LayerCosts) if field.name.endswith(("_s", "_bytes"))]
# These amounts do not grow with the micro-batch.
_PER_STEP = ("update_s", "weight_bytes", "slot_bytes", "summand_bytes")


# These fields of Link hold what the runtime takes, whatever the bytes.
RUNTIME = ("send_s", "receive_s", "task_s", "step_s")


@dataclass(frozen=True)
class Link:
    """Describes a connection between two devices, in each direction.

    A message of n bytes occupies it for ``n / bytes_per_s`` and arrives ``latency_s`` later.

    Attributes:
        latency_s, bytes_per_s: what a message takes.
        overhead_s_per_byte: seconds per byte in which sender and receiver cannot compute: LogP's overhead
            (Culler et al. 1993), per byte.
        machines: the machine of each device, by number.  Devices on one machine share its ``cores``; so do
            messages between them, each of which takes a core at both ends.  (): each device has its own.
        cores: the number of cores of each machine.
        speeds: how fast each device computes, relative to the device of the costs (1); (): all alike.
        send_s, receive_s: seconds per message in which the sender, or the receiver, cannot compute: LogP's
            overhead, whatever the bytes.
        task_s: seconds that the runtime takes for each task in addition to its costs, unless these are 0.
        step_s: seconds that the runtime takes for each step, before its first task and after its last one.
        near: the link between devices of one group, such as the GPUs of one host, where this one is the
            network between hosts.  Only its messages count; it may have a nearer link of its own.
        groups: the group of each device, by number; (): each device is a group by itself.

    Raises:
        CostError: a negative latency, overhead or time of the runtime, a bandwidth or speed that is not
            positive, machines without cores, a near link without groups or groups without one.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    overhead_s_per_byte: float = 0.0
    machines: tuple[int, ...] = ()
    cores: int = 0
    speeds: tuple[float, ...] = ()
    send_s: float = 0.0
    receive_s: float = 0.0
    task_s: float = 0.0
    step_s: float = 0.0
    near: Link | None = None
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole = all(is_amount(n) and isinstance(n, int) for n in (*self.machines, self.cores))
        if not whole or (self.machines and not self.cores):
            raise CostError(
                f"machines are whole numbers, of some cores; got {self.machines!r:.80}, {self.cores!r:.20}"
            )
        self._check_near()
        for name in ("latency_s", "overhead_s_per_byte", *RUNTIME):
            _check_amount("", name, getattr(self, name))
        if not is_number(self.bytes_per_s) or not self.bytes_per_s > 0:
            raise CostError(f"bytes_per_s must be above 0, got {self.bytes_per_s!r:.80}")
        if not all(is_amount(speed) and speed > 0 for speed in self.speeds):
            raise CostError(f"speeds must be finite numbers above 0, got {self.speeds!r:.80}")

    def _check_near(self) -> None:
        if not all(is_amount(n) and isinstance(n, int) for n in self.groups):
            raise CostError(f"groups are whole numbers, one for each device; got {self.groups!r:.80}")
        if bool(self.groups) != (self.near is not None):
            raise CostError(
                "near, the link within groups, and groups belong together; only one of them is given"
            )
        near = self.near
        if near is None:
            return
        if not isinstance(near, Link):
            raise CostError(f"near must be a Link, got {near!r:.80}")
        if near.machines or near.speeds or near.task_s or near.step_s:
            raise CostError(
                "near has messages only: give machines, speeds, task_s, step_s to the link itself"
            )

    def between(self, device: int, other: int) -> Link:
        """Return the link that joins two devices, by number: the nearest one."""
        joined = max(device, other) < len(self.groups) and self.groups[device] == self.groups[other]
        return self.near.between(device, other) if joined and self.near is not None else self

    def of_pairs(self, name: str, devices: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return a field of the link between each device and the other one, by number, float64."""
        values = np.full(len(devices), getattr(self, name), float)
        if self.near is None or not len(devices):
            return values
        groups = np.array(self._in(range(1 + max(devices.max(), others.max()))))
        return np.where(groups[devices] == groups[others], self.near.of_pairs(name, devices, others), values)

    def speeds_of(self, devices: Sequence[int]) -> tuple[float, ...]:
        """Return the speeds of these devices, by number; 1 if none are given."""
        return tuple(self.speeds[n] if n < len(self.speeds) else 1.0 for n in devices)

    def among(self, devices: Sequence[int]) -> Link:
        """Return the link among only these devices, given by number."""
        machines = tuple(self.machines[n] for n in devices if n < len(self.machines))
        speeds = self.speeds_of(devices) if self.speeds else ()
        link = replace(self, machines=machines, speeds=speeds)
        if self.near is None:
            return link
        return replace(link, near=self.near.among(devices), groups=self._in(devices))

    def _in(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the groups of these devices, by number; one without a group gets its own."""
        alone = max(self.groups) + 1
        return tuple(self.groups[n] if n < len(self.groups) else alone + n for n in devices)

    def of_replica(self, devices: int, replicas: int) -> Link:
        """Return one replica's link, on ``devices`` devices; each place gets its slowest device's speed.

        Places are near to each other if they are in all replicas.
        """
        first, places = self.among(range(devices)), range(devices)
        of_places = [range(place, replicas * devices, devices) for place in places]
        if self.near is not None:
            together = [self._in(of_place) for of_place in of_places]
            near, groups = self.near.of_replica(devices, replicas), tuple(map(together.index, together))
            first = replace(first, near=near, groups=groups)
        speeds = tuple(min(self.speeds_of(of_place)) for of_place in of_places)
        return replace(first, speeds=speeds) if self.speeds else first

    def slowed(self, factor: float) -> Link:
        """Return the link on which messages take ``factor`` times as long."""
        near = self.near and self.near.slowed(factor)
        latency_s, bytes_per_s = self.latency_s * factor, self.bytes_per_s / factor
        return replace(self, latency_s=latency_s, bytes_per_s=bytes_per_s, near=near)

    def occupied_s(self, size_bytes: float) -> float:
        """Return the seconds for which a message keeps the link busy."""
        return size_bytes / self.bytes_per_s

    @property
    def busies_ends(self) -> bool:
        """Return whether a message takes computing time from its sender or receiver."""
        own = self.overhead_s_per_byte or self.send_s or self.receive_s
        return bool(own) or (self.near is not None and self.near.busies_ends)

    @property
    def free(self) -> Link:
        """Return a link of the same devices on which messages take no time."""
        timeless = replace(self.of_one_tier, latency_s=0.0, bytes_per_s=math.inf, overhead_s_per_byte=0.0)
        return replace(timeless, send_s=0.0, receive_s=0.0)

    @property
    def of_one_tier(self) -> Link:
        """Return the link without a nearer one: between any two devices messages take as long."""
        return replace(self, near=None, groups=())

    @property
    def of_idle_ends(self) -> Link:
        """Return the link on which messages take as long, but no processor time: all of it is latency."""
        latency_s = self.latency_s + self.send_s + self.receive_s
        near = self.near and self.near.of_idle_ends
        return replace(self, latency_s=latency_s, send_s=0.0, receive_s=0.0, near=near)

    @property
    def runtime(self) -> dict[str, float]:
        """Return the seconds that the runtime takes, by field; empty if none."""
        return {name: getattr(self, name) for name in RUNTIME if getattr(self, name)}

    @property
    def without_runtime(self) -> Link:
        """Return the same link with a runtime that takes no time."""
        near = self.near and self.near.without_runtime
        return replace(self, send_s=0.0, receive_s=0.0, task_s=0.0, step_s=0.0, near=near)

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds from sending until a message is there, on an idle link."""
        return self.latency_s + self.occupied_s(size_bytes)

    def allreduce_s(self, size_bytes: float, workers: int) -> float:
        """Return seconds of a ring allreduce: 2 (n - 1) rounds that each send 1/n (Patarasuk & Yuan 2009)."""
        rounds = 2 * (workers - 1)
        return rounds * self.of_idle_ends.seconds(size_bytes / workers) if size_bytes else 0.0


def check_layers(layers: object) -> tuple[LayerCosts, ...]:
    """Return the layers as a tuple.  CostError names one that is missing or that reads no earlier layer."""
    if not isinstance(layers, (list, tuple)) or not layers:
        raise CostError(f"expected a list with one LayerCosts for each layer, got {layers!r:.80}")
    for index, layer in enumerate(layers):
        if not isinstance(layer, LayerCosts):
            raise CostError(f"layer {index}: costs are missing; expected a LayerCosts, got {layer!r:.80}")
        for source in layer.inputs or ():
            if not isinstance(source, int) or not 0 <= source < index:
                raise CostError(f"layer {index}: reads layer {source!r}, which is not before it")
        for source, _ in layer.tied:
            if not isinstance(source, int) or not 0 <= source < index:
                raise CostError(f"layer {index}: is tied to layer {source!r}, which is not before it")
    return tuple(layers)


def layer_inputs(layers: tuple[LayerCosts, ...], index: int) -> tuple[int, ...]:
    """Return the layers whose outputs a layer reads."""
    inputs = layers[index].inputs
    if inputs is None:
        return (index - 1,) if index else ()
    return inputs


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float, but no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_amount(value: object) -> bool:
    """Return whether a value is a finite number that is not negative."""
    return is_number(value) and 0 <= value <= sys.float_info.max


def _where(name: str) -> str:
    return f"layer {name!r:.80}: " if name else ""


def _check_amount(name: str, field: str, value: object) -> None:
    if not is_amount(value):
        raise CostError(
            f"{_where(name)}{field} must be a finite number that is not negative, got {value!r:.80}"
        )
