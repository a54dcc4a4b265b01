"""What order to run: measured costs and link in, a schedule out.  Rank 0 plans for all."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import split_steps
from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.costs.communication import link_of_ring
from tf_ooo.costs.layer_costs import SECONDS, LayerCosts, Link
from tf_ooo.costs.op_seconds import step_costs
from tf_ooo.costs.profile import OpProfile
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.modes.data_parallel.ordering import layer_keys
from tf_ooo.planning.choosing.on_paper import policies_of
from tf_ooo.planning.choosing.plan import Candidate, Plan, as_asked, policy_named
from tf_ooo.planning.choosing.trial import Clock
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import STOCK_ORDER, Policy

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

MODE = "data_parallel"
_SIZES = (64 * 1024, 256 * 1024, 1024**2, 4 * 1024**2)
_MESSAGES = 6
_REPEATS = 3
# The share of the best bandwidth that is worth messages four times as large.
_GOOD = 0.85
_SEARCH_S, _SLICED_SEARCH_S = 5.0, 2.0
# A predicted gain below this is within what the model of a step leaves out.
WORTH = 0.02


@dataclass(frozen=True)
class PlannedGain:
    """A plan, and the predicted seconds of a step in the stock order."""

    plan: Plan
    stock_s: float

    @property
    def share(self) -> float:
        """The predicted gain as a share of the stock step."""
        return 1 - self.plan.step_s / self.stock_s if self.stock_s else 0.0


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
    graph_def: graph_pb2.GraphDef, profile: OpProfile
) -> tuple[tuple[LayerCosts, ...], list[tuple[int, ...]], TrainingGraph]:
    """Costs of the layers of a graph of one step that was profiled, which layers these are, the step."""
    step = split_steps(graph_def)[0]
    graph = classify_graph_def(step)
    return step_costs(step, graph, profile).layers, layer_keys(step, graph), graph


def layers_of(graph_def: graph_pb2.GraphDef) -> list[tuple[int, ...]]:
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
    stock = as_asked(STOCK_ORDER, _problem(layers, link, workers, barrier=True), clock_of(1))
    factor = step_s / max(stock.step_s, 1e-9)
    scaled = tuple(_scaled(layer, factor) for layer in layers)
    return scaled, Link(link.latency_s * factor, link.bytes_per_s / factor)


def _scaled(layer: LayerCosts, factor: float) -> LayerCosts:
    return dataclasses.replace(layer, **{name: getattr(layer, name) * factor for name in SECONDS.values()})


def needs_costs(schedule: str, options: Iterable[str]) -> bool:
    """Whether a policy, or ``"auto"``, has to be told costs where these options are given."""
    return schedule == "auto" or policy_named(schedule, MODE).needs.costs_with(options)


def plain_schedule(graph: TrainingGraph, policy: str, workers: int, k: int | None) -> Schedule:
    """A schedule for which no costs are needed."""
    layers = [LayerCosts(1.0, 1.0, 1.0, weight_bytes=1)] * len(graph.layers)
    options = {} if k is None else {"k": min(k, len(layers))}
    return as_asked(policy_named(policy, MODE), _problem(layers, Link(), workers, **options)).trial.schedule


def make_plan(
    layers: Sequence[LayerCosts],
    link: Link,
    workers: int,
    schedule: str,
    steps: int,
    slice_bytes: float | None = None,
) -> PlannedGain:
    """The policy's plan, or for ``"auto"`` the one with the shortest predicted step.

    Args:
        layers: costs of one step.
        link: between neighbours of the ring.
        workers: the ranks.
        schedule: a policy's name, or ``"auto"``: of all that order communication.
        steps: run together; the barrier after the last of them is part of the prediction.
        slice_bytes: the smallest slices that use the link well, for policies that may cut gradients.
    """
    problem, clock = _problem(layers, link, workers, barrier=False), clock_of(steps)
    stock = as_asked(STOCK_ORDER, problem, clock)
    auto = [policy for policy in policies_of(MODE) if policy.needs.link]
    policies = auto if schedule == "auto" else [policy_named(schedule, MODE)]
    whole = [_asked(policy, problem, clock) for policy in policies]
    best = min(whole, key=lambda plan: plan.step_s)
    sliced = [] if slice_bytes is None else list(_sliced(policies, problem, clock, slice_bytes))
    for plan in sliced:
        # Slices are not free: each is negotiated about and copied.
        if plan.step_s < best.step_s * (1 - WORTH):
            best = plan
    tried = (
        Candidate(plan.schedule.policy, plan.problem, plan.trial, plan.step_s) for plan in (*whole, *sliced)
    )
    return PlannedGain(dataclasses.replace(best, candidates=tuple(tried)), stock.step_s)


def _problem(layers: Sequence[LayerCosts], link: Link, workers: int, **options: object) -> Problem:
    return Problem(tuple(layers), workers, link=link, options=options, mode=MODE)


def _asked(
    policy: Policy, problem: Problem, clock: Clock, slice_bytes: int = 0, budget_s: float | None = _SEARCH_S
) -> Plan:
    """The plan of a policy, told what the graph can be made to do: communicate in a given order."""
    told = {"communication": "ordered", "slice_bytes": slice_bytes, "budget_s": budget_s}
    options = {name: value for name, value in told.items() if name in policy.options}
    return as_asked(policy, dataclasses.replace(problem, options=options), clock)


def _sliced(policies: Sequence[Policy], problem: Problem, clock: Clock, slice_bytes: float) -> Iterator[Plan]:
    """Plans with gradients in slices, of the policies that may slice them."""
    largest = max(layer.weight_bytes for layer in problem.layers)
    for policy in policies:
        for size in (slice_bytes, 4 * slice_bytes):
            if "slice_bytes" in policy.options and largest > size:
                yield _asked(policy, problem, clock, int(size), _SLICED_SEARCH_S)


def clock_of(steps: int) -> Clock:
    """Seconds of one of some steps that run together and end together."""
    return Clock(lambda timeline: timeline.makespan_s / steps, steps)
