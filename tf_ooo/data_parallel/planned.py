"""What order to run: measured costs and link in, a schedule out.  Rank 0 plans for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grappler_passes.classify import classify_graph_def
from grappler_passes.graph import TrainingGraph
from grappler_passes.steps import split_steps
from tf_ooo.costs.communication import link_of_ring, measure_link
from tf_ooo.costs.devices import device
from tf_ooo.costs.from_graph import graph_costs
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.op_seconds import op_seconds
from tf_ooo.costs.profile import OpProfile
from tf_ooo.data_parallel.engine import Engine
from tf_ooo.planning import plan
from tf_ooo.schedule import Schedule
from tf_ooo.simulator import simulate

_SIZES = (16 * 1024, 256 * 1024, 1024**2, 4 * 1024**2)
_REPEATS = 3
_SEARCH_S = 5.0
# A predicted gain below this is within what the model of a step leaves out.
WORTH = 0.02


@dataclass(frozen=True)
class Planned:
    """A schedule with its predicted seconds a step, and those of the stock order."""

    schedule: Schedule
    step_s: float
    stock_s: float

    @property
    def gain(self) -> float:
        """The predicted gain as a share of the stock step."""
        return 1 - self.step_s / self.stock_s if self.stock_s else 0.0


def measure_allreduce(engine: Engine) -> Link:
    """The link between neighbours of the ring; all ranks call it.  CostError if none can be told."""
    import tensorflow as tf

    tensors = {size: tf.zeros([size // 4]) for size in _SIZES}
    engine.barrier()
    whole = measure_link(
        lambda size: engine.sum(tensors[size], f"tf_ooo_link_{size}").numpy(), _SIZES, _REPEATS
    )
    return link_of_ring(whole, engine.size)


def measured_layers(graph_def: Any, profile: OpProfile) -> tuple[LayerCosts, ...]:
    """Costs of the layers of a graph of one step that was profiled."""
    step = split_steps(graph_def)[0]
    graph = classify_graph_def(step)
    seconds = op_seconds(step, device("cpu-core"), profile)
    return graph_costs(graph, {name: seconds.seconds.get(name, 0.0) for name in graph.ops}).layers


def plain_schedule(graph: TrainingGraph, policy: str, workers: int, k: int | None) -> Schedule:
    """A schedule for which no costs are needed."""
    layers = [LayerCosts(1.0, 1.0, 1.0, weight_bytes=1)] * len(graph.layers)
    options: dict[str, Any] = {} if k is None else {"k": min(k, len(layers))}
    made = plan(layers=layers, schedule=policy, mode="data_parallel", devices=workers, **options)
    return dataclasses.replace(made, predicted_step_s=None, predicted_peak_bytes=None)


def make_plan(layers: Sequence[LayerCosts], link: Link, workers: int, policy: str, steps: int) -> Planned:
    """The policy's schedule, or for ``"auto"`` the one with the shortest predicted step.

    Args:
        layers: costs of one step.
        link: between neighbours of the ring.
        workers: the ranks.
        policy: reverse_first_k, search or auto.
        steps: run together; the barrier after the last of them is part of the prediction.
    """
    stock = _plan(layers, link, workers, "in_order", barrier=False)
    stock_s = step_seconds(stock, layers, link, steps)
    made = list(_candidates(layers, link, workers, policy))
    seconds = [step_seconds(schedule, layers, link, steps) for schedule in made]
    best = min(range(len(made)), key=seconds.__getitem__)
    schedule = dataclasses.replace(made[best], predicted_step_s=seconds[best])
    return Planned(schedule, seconds[best], stock_s)


def _candidates(layers: Sequence[LayerCosts], link: Link, workers: int, policy: str) -> Iterator[Schedule]:
    if policy in ("reverse_first_k", "auto"):
        yield _plan(layers, link, workers, "reverse_first_k")
    if policy in ("search", "auto"):
        # Gradients travel whole, in a given order: what the graph can be made to do.
        options = {"communication": "ordered", "slice_bytes": 0, "budget_s": _SEARCH_S}
        yield _plan(layers, link, workers, "search", **options)


def _plan(layers: Sequence[LayerCosts], link: Link, workers: int, policy: str, **options: Any) -> Schedule:
    return plan(
        layers=list(layers), schedule=policy, mode="data_parallel", devices=workers, link=link, **options
    )


def step_seconds(schedule: Schedule, layers: Sequence[LayerCosts], link: Link, steps: int) -> float:
    """Predicted seconds of one of some steps that run together and end together."""
    return simulate(schedule, list(layers), link, steps=steps).makespan_s / steps
