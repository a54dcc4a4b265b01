"""Defines the problem that a policy is asked to schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link, layer_inputs
from tf_ooo.errors import MemoryLimitError, OptionsError

# Micro-batches for each device that show the steady state.
_PERIODS = 4


def with_recomputed(layers: Sequence[LayerCosts], numbers: Collection[int]) -> tuple[LayerCosts, ...]:
    """Return the costs of all layers; the layers with these numbers are computed again before their dO.

    Between F and dO such a layer keeps its inputs: the outputs of the layers before it.
    """
    chosen, plain = set(numbers), tuple(layers)
    return tuple(
        layer.recomputed(input_bytes(plain, number)) if number in chosen else layer
        for number, layer in enumerate(plain)
    )


def input_bytes(layers: tuple[LayerCosts, ...], number: int) -> float:
    """Return the bytes that a layer reads from other layers; the input data come from no layer."""
    return float(sum(layers[source].output_bytes for source in layer_inputs(layers, number)))


def saved_bytes(layers: tuple[LayerCosts, ...], number: int) -> float:
    """Return the bytes that a layer need not keep between F and dO if it is computed again."""
    return layers[number].recomputed(input_bytes(layers, number)).recomputed_bytes


@dataclass(frozen=True)
class Problem:
    """Holds layers with their costs, and what there is to run them on.

    Attributes:
        layers: costs of ONE micro-batch.
        devices: stages' devices of a pipeline, or workers of data parallel training.
        microbatches: how many one step has.
        link: between any two devices, in each direction.
        memory_limit_bytes: the limit of each device, or of the one that has most; None: no limit.
        less_bytes: how much less each device has than ``memory_limit_bytes``; (): all have as much.
        options: the policy's own options (``group`` of modulo, ``k`` of reverse_first_k).
        mode: what the devices are for, where a policy serves several modes; None: not said.
        bounds: (first, last) layer of a model that each of ``layers`` stands for; empty: each is one.
        recompute: which layers run their forward again before their dO: ``"none"``, ``"all"`` that then keep
            less, or ``"auto"``: those that keep the memory limit in the fewest seconds.
        recomputed: the layers that run again, of ``model`` if given; ``layers`` include these costs.
        plain: the layers if none runs again; empty: ``layers``.
        model: with ``bounds``, the model's layers, of which some may run again.
        fixed: layers that cannot run again.
        cut: (first, last) of ``layers`` of each stage of a pipeline; empty: the policy cuts.
    """

    layers: tuple[LayerCosts, ...]
    devices: int = 1
    microbatches: int = 1
    link: Link = field(default_factory=Link)
    memory_limit_bytes: int | None = None
    less_bytes: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str | None = None
    bounds: tuple[tuple[int, int], ...] = ()
    recompute: str = "none"
    recomputed: tuple[int, ...] = ()
    plain: tuple[LayerCosts, ...] = ()
    model: tuple[LayerCosts, ...] = ()
    fixed: frozenset[int] = frozenset()
    cut: tuple[tuple[int, int], ...] = ()

    @property
    def own_layers(self) -> tuple[LayerCosts, ...]:
        """Return the layers of the model, even where ``layers`` are stages of it."""
        return self.model or self.layers

    def costs(self, attribute: str) -> list[float]:
        """Return a cost of each layer, cached because a search asks for it thousands of times."""
        if attribute not in self._costs:
            self._costs[attribute] = [float(getattr(layer, attribute)) for layer in self.layers]
        return self._costs[attribute]

    @cached_property
    def _costs(self) -> dict[str, list[float]]:
        return {}

    @property
    def shortened(self) -> Problem:
        """Return the problem with as few micro-batches as show the steady state."""
        return replace(self, microbatches=min(self.microbatches, _PERIODS * self.devices))

    def limit_of(self, peak_bytes: Sequence[int]) -> int:
        """Return the lowest ``memory_limit_bytes`` that suits devices with these peaks."""
        return max(self.charged_bytes(peak_bytes), default=0)

    def charged_bytes(self, peak_bytes: Sequence[int]) -> list[int]:
        """Return the peaks of devices, each with the shortfall of its device from ``memory_limit_bytes``."""
        less = self.less_bytes or (0,)
        if len(less) != len(peak_bytes):  # workers that all hold the same are simulated as one
            less = (max(less),) * len(peak_bytes)
        return [peak + more for peak, more in zip(peak_bytes, less, strict=True)]

    def over_limit(self, needed_bytes: int) -> MemoryLimitError:
        """Return the error to raise if the limit would have to be this high."""
        because = lacking_text(self.limits_bytes, needed_bytes) if self.less_bytes else ""
        return MemoryLimitError(self.memory_limit_bytes or 0, needed_bytes, because=because)

    @property
    def limits_bytes(self) -> tuple[int, ...]:
        """Return each device's limit, or one for all; empty: there is none."""
        limit = self.memory_limit_bytes
        return () if limit is None else tuple(limit - less for less in self.less_bytes or (0,))

    def keeps_limit(self, peak_bytes: Sequence[int]) -> bool:
        """Return whether each device has enough memory for its peak."""
        limit = self.memory_limit_bytes
        return limit is None or self.limit_of(peak_bytes) <= limit

    def flag(self, name: str, default: bool) -> bool:
        """Return a yes-or-no option of the policy; OptionsError if it is none."""
        value = self.options.get(name, default)
        if not isinstance(value, bool):
            raise OptionsError(f"{name} must be True or False, got {value!r:.60}")
        return value

    def option(self, name: str, default: int, least: int = 0) -> int:
        """Return a whole-number option of the policy; OptionsError if it is none or below ``least``."""
        value = self.options.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionsError(f"{name} must be a whole number of at least {least}, got {value!r}")
        return value


def check_limits(limits_bytes: Sequence[int], devices: int) -> None:
    """Raise OptionsError unless there is one limit for each device."""
    if len(limits_bytes) != devices:
        raise OptionsError(
            f"memory_limit_bytes={tuple(limits_bytes)}: {len(limits_bytes)} limits are given for {devices} "
            "devices; give one for each, in their order, or a number for all"
        )


def most_and_less(limits_bytes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the largest limit, and each device's shortfall from it; (): none has any."""
    most = max(limits_bytes)
    less = tuple(most - limit for limit in limits_bytes)
    return most, less if any(less) else ()


def lacking_text(limits_bytes: Sequence[int], needed_bytes: int) -> str:
    """Say what devices with limits of their own lack; ``needed_bytes``: least of the largest device."""
    lacking_bytes = max(0, needed_bytes - max(limits_bytes))
    return f"the devices have {', '.join(map(str, limits_bytes))}, and each would need {lacking_bytes} more"


def less_of_places(less_bytes: Sequence[int], devices: int) -> tuple[int, ...]:
    """Return per place, for devices dealt out to replicas, the shortfall of the smallest; (): all alike."""
    return tuple(max(less_bytes[place::devices]) for place in range(devices)) if less_bytes else ()
