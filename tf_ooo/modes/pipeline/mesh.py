"""How many replicas of a pipeline share the devices of one training process: each number is planned.

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import OOOError, OptionsError
from tf_ooo.modes.pipeline.planning import Wanted, make_plan, step_s_of, with_costs
from tf_ooo.planning.building.by_name import Bounds
from tf_ooo.planning.choosing.plan import Plan
from tf_ooo.planning.choosing.side_by_side import exchange_s, side_by_side

AUTO = "auto"


@dataclass(frozen=True)
class Replicas:
    """So many replicas, each on so many devices; ``plan`` None: ``reason`` says why there is none.

    Attributes:
        plan: of one replica.
        step_s: seconds of a step of all of them side by side, with ``exchange_s`` in which the device with
            most weights sends and receives gradients and weights.
    """

    count: int
    devices: int
    plan: Plan | None = None
    step_s: float = float("inf")
    exchange_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Mesh:
    """What was chosen, all that were compared, and what was asked for of all devices."""

    chosen: Replicas
    plan: Plan
    tried: tuple[Replicas, ...]
    wanted: Wanted

    @property
    def step_s(self) -> float:
        return self.chosen.step_s

    @property
    def replicas(self) -> int:
        return self.chosen.count

    @property
    def microbatches(self) -> int:
        """Of one step."""
        return self.wanted.microbatches

    def with_costs(self, layers: Sequence[LayerCosts]) -> Mesh:
        """The same plan, of layers with other costs."""
        plan = with_costs(self.plan, _shared(layers, self.replicas))
        chosen = _beside(plan, self.replicas, self.chosen.devices, self.wanted.link)
        return dataclasses.replace(self, chosen=chosen, plan=plan)

    def compared_with(self, other: Mesh) -> Mesh:
        """The same plan, with what another one was compared with."""
        plan = dataclasses.replace(self.plan, candidates=other.plan.candidates)
        return dataclasses.replace(self, plan=plan, tried=other.tried)


def counts_of(replicas: int | str | None, devices: int, microbatches: int) -> tuple[int, ...]:
    """How many replicas to try.

    Raises:
        OptionsError: the devices cannot be dealt out evenly to so many, or there are too few micro-batches.
    """
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


def make_mesh(layers: Sequence[LayerCosts], units: Bounds, wanted: Wanted, counts: Sequence[int]) -> Mesh:
    """The plan with the shortest step among these numbers of replicas; ``wanted`` is of all devices.

    Raises what :func:`make_plan` raises, where no number of replicas has a plan.
    """
    tried: list[Replicas] = []
    errors: list[OOOError] = []
    for count in counts:
        try:
            plan = make_plan(_shared(layers, count), units, _of_one(wanted, count))
            tried.append(_beside(plan, count, wanted.devices // count, wanted.link))
        except OOOError as error:
            errors.append(error)
            tried.append(Replicas(count, wanted.devices // count, reason=str(error)))
    chosen = min(tried, key=lambda replicas: (float(f"{replicas.step_s:.6g}"), replicas.count))
    if chosen.plan is None:
        raise errors[0]
    return Mesh(chosen, chosen.plan, tuple(tried), wanted)


def _of_one(wanted: Wanted, count: int) -> Wanted:
    """What is asked for of each replica; the first has the most micro-batches."""
    devices, link = wanted.devices // count, wanted.link
    return dataclasses.replace(
        wanted,
        devices=devices,
        microbatches=-(-wanted.microbatches // count),
        link=dataclasses.replace(link, machines=link.machines[:devices]),
    )


def _beside(plan: Plan, count: int, devices: int, link: Link) -> Replicas:
    if count == 1:
        return Replicas(1, devices, plan, plan.step_s)
    stages = [
        dataclasses.replace(stage, update_s=stage.update_s + exchange_s(stage.weight_bytes, count, link))
        for stage in plan.problem.layers
    ]
    schedule, layers = side_by_side(plan.schedule, stages, count)
    held: dict[int, float] = {}
    for stage, device in enumerate(plan.schedule.device_of_stage):
        held[device] = held.get(device, 0.0) + stages[stage].weight_bytes
    most_s = exchange_s(max(held.values()), count, link)
    return Replicas(count, devices, plan, step_s_of(schedule, layers, link), most_s)


def _shared(layers: Sequence[LayerCosts], count: int) -> tuple[LayerCosts, ...]:
    """Each replica updates its share of the weights; slots count as if one had those of its stage."""
    return tuple(dataclasses.replace(layer, update_s=layer.update_s / count) for layer in layers)
