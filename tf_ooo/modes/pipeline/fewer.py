"""Fewer devices than there are, where the mode is free to choose: those that are slow may only be in the way.

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import MemoryLimitError, OOOError
from tf_ooo.modes.pipeline.mesh import AUTO, Mesh, counts_of, make_mesh
from tf_ooo.modes.pipeline.planning import PlanRequest
from tf_ooo.planning.building.by_name import Bounds

# Predictions that differ by less are alike: then all devices are used.
_LEAST_GAIN = 0.02


def on_best_devices(layers: Sequence[LayerCosts], units: Bounds, wanted: PlanRequest) -> Mesh:
    """Plan on all devices, or without the slowest ones, one after the other as long as that is faster.

    Where no plan fits, without those that have the least memory: each replica holds all of a stage.

    Raises what :func:`make_mesh` raises for all devices, where fewer have no plan either.
    """
    numbers = tuple(range(wanted.devices))
    best: Mesh | None = None
    error: OOOError | None = None
    while numbers and (best is None or len(numbers) > 1):
        try:
            mesh = _on(numbers, layers, units, wanted)
        except MemoryLimitError as too_large:
            error = error or too_large
            if best is not None or len(set(wanted.less_of(numbers))) == 1:
                break  # fewer devices hold no more
            numbers = _without(max(numbers, key=lambda number: wanted.less_of([number])), numbers)
            continue
        except OOOError as no_plan:  # fewer layers than devices, say
            error = error or no_plan
        else:
            if best is not None:
                tried = (*best.tried, *mesh.tried)
                if mesh.step_s >= best.step_s * (1 - _LEAST_GAIN):
                    best = dataclasses.replace(best, tried=tried)
                    break
                mesh = dataclasses.replace(mesh, tried=tried)
            best = mesh
        numbers = _without_slowest(numbers, wanted)
    if best is None:
        assert error is not None
        raise error
    return best


def _on(numbers: tuple[int, ...], layers: Sequence[LayerCosts], units: Bounds, wanted: PlanRequest) -> Mesh:
    """Return the fastest division of these devices."""
    count = len(numbers)
    mesh = make_mesh(layers, units, wanted.among(numbers), counts_of(AUTO, count, wanted.microbatches))
    return dataclasses.replace(mesh, on=numbers)


def _without_slowest(numbers: tuple[int, ...], wanted: PlanRequest) -> tuple[int, ...]:
    """Leave the slowest device out; of equally slow ones, the one that has the least memory."""
    of_each = zip(wanted.link.speeds_of(numbers), wanted.less_of(numbers), strict=True)
    known = dict(zip(numbers, of_each, strict=True))
    return _without(min(reversed(numbers), key=lambda number: (known[number][0], -known[number][1])), numbers)


def _without(left_out: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(number for number in numbers if number != left_out)
