"""Cuts a model into stages: by measured seconds, by what would have to be sent, and by memory.

No TensorFlow here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tf_ooo.costs.layer_costs import LayerCosts, Link, layer_inputs
from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.by_name import Bounds
from tf_ooo.planning.building.shortest_cut import cheapest, shortest_s

# The slowest stage may be so much slower than in the best cut, for less to send.
_SLACK = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6)


def units_of(layers: int, inseparable: Sequence[tuple[int, int]]) -> Bounds:
    """Return the smallest ranges of layers that may be cut from each other."""
    units: list[tuple[int, int]] = []
    for layer in range(layers):
        joined = any(first < layer <= last for first, last in inseparable)
        if units and joined:
            units[-1] = (units[-1][0], layer)
        else:
            units.append((layer, layer))
    return tuple(units)


@dataclass(frozen=True)
class Cutter:
    """Cuts layers, costs of one micro-batch, into stages; ``units`` are ranges that stay whole."""

    layers: tuple[LayerCosts, ...]
    units: Bounds
    link: Link
    microbatches: int

    def cut(self, devices: tuple[int, ...]) -> Bounds:
        """(first, last) layer of each stage: the best found of cuts with a short slowest stage.

        ``devices``: by number, of each stage.  The step is estimated as all micro-batches through the slowest
        stage, and the first one's messages.
        """
        speeds = self.link.speeds_of(devices)
        if speeds not in self._cuts:
            self._cuts[speeds] = self._cut(speeds)
        return self._cuts[speeds]

    @functools.cached_property
    def _cuts(self) -> dict[tuple[float, ...], Bounds]:
        """Policies ask for the same stages."""
        return {}

    def _cut(self, speeds: tuple[float, ...]) -> Bounds:
        sums, messages = self._sums(len(speeds), lambda layer: layer.busy_s), self._messages_s
        limit = shortest_s(sums, speeds)
        cuts = [cheapest(sums, messages, speeds, limit * slack) for slack in _SLACK]

        def step_s(ends: Sequence[int]) -> float:
            bounds = [0, *ends]
            stages = zip(bounds, ends, speeds, strict=False)
            longest = max((sums[b] - sums[a]) / speed for a, b, speed in stages)
            sent = sum(messages[end - 1] for end in ends[:-1])
            busiest = max((messages[end - 1] for end in ends[:-1]), default=0.0)
            return float(max(longest, busiest) * self.microbatches + sent)

        return self._stages(min((ends for ends in cuts if ends), key=step_s))

    def cut_by_bytes(self, rooms: Sequence[float]) -> tuple[Bounds, ...]:
        """Return cuts whose fullest stage holds as little as can be of the bytes that it has room for.

        The first counts weights, gradients and slots alone, the second and the third also the activations of
        one micro-batch and of all of them.
        """
        cuts = []
        for kept in sorted({0, 1, self.microbatches}):
            sums = self._sums(len(rooms), functools.partial(held_bytes, kept))
            cuts.append(cheapest(sums, self._messages_s, rooms, shortest_s(sums, rooms)))
        return tuple(dict.fromkeys(self._stages(ends) for ends in cuts if ends))

    def _sums(self, stages: int, of_layer: Callable[[LayerCosts], float]) -> np.ndarray:
        """Return sums over the units before each unit, and over all. OptionsError: more stages than units."""
        if stages > len(self.units):
            whole = "" if len(self.units) == len(self.layers) else " that can be cut (a loop stays whole)"
            raise OptionsError(
                f"{stages} stages are more than the {len(self.units)} layers{whole}; use fewer devices"
            )
        return np.cumsum([0.0, *(sum(map(of_layer, self.layers[a : b + 1])) for a, b in self.units)])

    @property
    def _messages_s(self) -> np.ndarray:
        """Seconds of what crosses the cut behind each unit, there and back."""
        return np.array([2 * self.link.seconds(crossing_bytes(self.layers, last)) for _, last in self.units])

    def _stages(self, ends: Sequence[int]) -> Bounds:
        """(first, last) layer of each stage, given the ends of its units."""
        starts = [0, *ends[:-1]]
        return tuple((self.units[a][0], self.units[b - 1][1]) for a, b in zip(starts, ends, strict=True))


def held_bytes(kept: int, layer: LayerCosts) -> float:
    """Return weights, their gradients, slots, and the activations of so many micro-batches."""
    return 2 * layer.weight_bytes + layer.slot_bytes + kept * layer.activation_bytes


def crossing_bytes(layers: tuple[LayerCosts, ...], last: int) -> float:
    """Return bytes that layers behind ``last`` read of layers up to it."""
    read = {s for i in range(last + 1, len(layers)) for s in layer_inputs(layers, i) if s <= last}
    return float(sum(layers[source].output_bytes for source in read))
