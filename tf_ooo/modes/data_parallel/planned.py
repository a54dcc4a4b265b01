"""What order to run: measured costs and link in, a schedule out.  Rank 0 plans for all."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import split_steps
from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.costs.communication import link_of_ring
from tf_ooo.costs.devices import device
from tf_ooo.costs.from_graph import graph_costs
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.op_seconds import op_seconds
from tf_ooo.costs.profile import OpProfile
from tf_ooo.hosts.ranks.engine import Engine
from tf_ooo.modes.data_parallel.ordering import layer_keys
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

_SIZES = (64 * 1024, 256 * 1024, 1024**2, 4 * 1024**2)
_MESSAGES = 6
_REPEATS = 3
# The share of the best bandwidth that is worth messages four times as large.
_GOOD = 0.85
_SEARCH_S, _SLICED_SEARCH_S = 5.0, 2.0
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


@dataclass(frozen=True)
class MeasuredLink:
    """What the ranks' allreduces reach when they follow one another as those of a step do.

    Attributes:
        link: between neighbours of the ring; its bandwidth holds what ranks negotiate meanwhile.
        flight_bytes: the smallest amount under way that reaches most of the best bandwidth.
    """

    link: Link
    flight_bytes: float


def measure_allreduce(engine: Engine) -> MeasuredLink:
    """Times streams of messages of several sizes; all ranks call it.

    CostError if nothing can be told.
    """
    seconds = {size: _seconds_each(engine, size) for size in _SIZES}
    return link_from(seconds, engine.size)


def link_from(seconds: Mapping[int, float], workers: int) -> MeasuredLink:
    """From seconds of one allreduce in a stream, by its bytes."""
    best = max(size / each_s for size, each_s in seconds.items())
    size = min(size for size, each_s in seconds.items() if size / each_s >= _GOOD * best)
    whole = Link(0.0, size / seconds[size])
    return MeasuredLink(link_of_ring(whole, workers), float(size))


def _seconds_each(engine: Engine, size: int) -> float:
    """Seconds of one of some allreduces, each of which begins when the last but one is through."""
    import tensorflow as tf

    def stream(tensor: Any) -> Any:
        done: list[Any] = []
        for number in range(_MESSAGES):
            with tf.control_dependencies(done[-2:-1]):
                done.append(engine.sum(tensor + float(number), f"tf_ooo_link_{size}_{number}"))
        return tf.add_n([each[0] for each in done])

    tensor, function = tf.zeros([size // 4]), tf.function(stream, autograph=False)
    function(tensor)
    taken_s = []
    for _ in range(_REPEATS):
        engine.barrier()
        started = time.perf_counter()
        function(tensor).numpy()
        taken_s.append(time.perf_counter() - started)
    return max(statistics.median(taken_s), 1e-9) / _MESSAGES


def measured_layers(
    graph_def: Any, profile: OpProfile
) -> tuple[tuple[LayerCosts, ...], list[tuple[int, ...]], TrainingGraph]:
    """Costs of the layers of a graph of one step that was profiled, which layers these are, the step."""
    step = split_steps(graph_def)[0]
    graph = classify_graph_def(step)
    seconds = op_seconds(step, device("cpu-core"), profile)
    costs = graph_costs(graph, {name: seconds.seconds.get(name, 0.0) for name in graph.ops}).layers
    return costs, layer_keys(step, graph), graph


def layers_of(graph_def: Any) -> list[tuple[int, ...]]:
    """Which layers a graph of one step has, in the order in which plans number them.

    GraphError if it is no training step.
    """
    step = split_steps(graph_def)[0]
    return layer_keys(step, classify_graph_def(step))


def calibrated(
    layers: Sequence[LayerCosts], link: Link, workers: int, step_s: float
) -> tuple[tuple[LayerCosts, ...], Link]:
    """Costs with which a single step in the stock order is predicted to take ``step_s``, as it did.

    Ops are slower under the profiler, and computing and communicating slow each other down where they share
    the machine's cores; both are taken to change by the same factor.
    """
    stock = _plan(layers, link, workers, "in_order", barrier=True)
    factor = step_s / max(step_seconds(stock, layers, link, 1), 1e-9)
    scaled = tuple(_scaled(layer, factor) for layer in layers)
    return scaled, Link(link.latency_s * factor, link.bytes_per_s / factor)


def _scaled(layer: LayerCosts, factor: float) -> LayerCosts:
    names = ("forward_s", "output_grad_s", "weight_grad_s", "update_s")
    return dataclasses.replace(layer, **{name: getattr(layer, name) * factor for name in names})


def plain_schedule(graph: TrainingGraph, policy: str, workers: int, k: int | None) -> Schedule:
    """A schedule for which no costs are needed."""
    layers = [LayerCosts(1.0, 1.0, 1.0, weight_bytes=1)] * len(graph.layers)
    options: dict[str, Any] = {} if k is None else {"k": min(k, len(layers))}
    made = plan(layers=layers, schedule=policy, mode="data_parallel", devices=workers, **options)
    return dataclasses.replace(made, predicted_step_s=None, predicted_peak_bytes=None)


def make_plan(
    layers: Sequence[LayerCosts],
    link: Link,
    workers: int,
    policy: str,
    steps: int,
    slice_bytes: float | None = None,
) -> Planned:
    """The policy's schedule, or for ``"auto"`` the one with the shortest predicted step.

    Args:
        layers: costs of one step.
        link: between neighbours of the ring.
        workers: the ranks.
        policy: reverse_first_k, search or auto.
        steps: run together; the barrier after the last of them is part of the prediction.
        slice_bytes: the smallest slices that use the link well, for a search that may cut gradients.
    """
    stock = _plan(layers, link, workers, "in_order", barrier=False)
    stock_s = step_seconds(stock, layers, link, steps)
    made = list(_candidates(layers, link, workers, policy))
    seconds = [step_seconds(schedule, layers, link, steps) for schedule in made]
    best = min(range(len(made)), key=seconds.__getitem__)
    schedule, step_s = made[best], seconds[best]
    if slice_bytes is not None and policy in ("search", "auto"):
        for sliced in _sliced(layers, link, workers, slice_bytes):
            sliced_s = step_seconds(sliced, layers, link, steps)
            # Slices are not free: each is negotiated about and copied.
            if sliced_s < step_s * (1 - WORTH):
                schedule, step_s = sliced, sliced_s
    return Planned(dataclasses.replace(schedule, predicted_step_s=step_s), step_s, stock_s)


def _candidates(layers: Sequence[LayerCosts], link: Link, workers: int, policy: str) -> Iterator[Schedule]:
    if policy in ("reverse_first_k", "auto"):
        yield _plan(layers, link, workers, "reverse_first_k")
    if policy in ("search", "auto"):
        # In a given order: what the graph can be made to do.
        options = {"communication": "ordered", "slice_bytes": 0, "budget_s": _SEARCH_S}
        yield _plan(layers, link, workers, "search", **options)


def _sliced(layers: Sequence[LayerCosts], link: Link, workers: int, slice_bytes: float) -> Iterator[Schedule]:
    largest = max(layer.weight_bytes for layer in layers)
    for size in (slice_bytes, 4 * slice_bytes):
        if largest > size:
            options = {"communication": "ordered", "slice_bytes": int(size), "budget_s": _SLICED_SEARCH_S}
            yield _plan(layers, link, workers, "search", **options)


def _plan(layers: Sequence[LayerCosts], link: Link, workers: int, policy: str, **options: Any) -> Schedule:
    return plan(
        layers=list(layers), schedule=policy, mode="data_parallel", devices=workers, link=link, **options
    )


def step_seconds(schedule: Schedule, layers: Sequence[LayerCosts], link: Link, steps: int) -> float:
    """Predicted seconds of one of some steps that run together and end together."""
    return simulate(schedule, list(layers), link, steps=steps).makespan_s / steps
