"""Plans the order from measured costs and link, on rank 0 for all; simulates fewer ranks, too."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import split_steps
from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.costs.communication import link_of_ring
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OOOError
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.modes.data_parallel.ordering import LayerKey, layer_keys, sent_bytes, with_weight_bytes
from tf_ooo.planning.choosing.on_paper import auto_candidates, policies_of
from tf_ooo.planning.choosing.plan import Candidate, Plan, StepTime, as_asked, choose, policy_named, tried
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import POLICIES, STOCK_ORDER, Policy
from tf_ooo.planning.policies.reverse_first_k import POLICY as REVERSE_FIRST_K
from tf_ooo.report.parts import SlowerWarning
from tf_ooo.report.report import Report
from tf_ooo.report.summary import Gain

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

    from tf_ooo.modes.data_parallel.ranks import RanksInStep

MODE = "data_parallel"
_SIZES = (64 * 1024, 256 * 1024, 1024**2, 4 * 1024**2)
# Each size is sent so often at least, and so many bytes of it: a network lets a part of less through at once.
_MESSAGES, _STREAM_BYTES = 6, 4 * 1024**2
_REPEATS = 3
# The share of the best bandwidth that is worth messages four times as large.
_GOOD = 0.85
# At least so many bytes are under way: streams are measured while nothing computes, but during computation
# the op that hands the next message over waits for its turn. Steps of a BERT of 64 small layers at 410
# Mbit/s: stock 1.00, with 64 KiB under way 0.98, 1 MiB 1.06, 2 MiB 0.99.
_LEAST_FLIGHT_BYTES = 1024**2
_SEARCH_S, _SLICED_SEARCH_S = 5.0, 2.0
# Computing may take so many times what the profiler showed; the range of a factor is halved so often.
_FACTORS, _HALVINGS = (1 / 4, 4.0), 16
# A predicted gain below this is within what the model of a step leaves out: slices have to promise more.
WORTH = 0.02
# With a smaller predicted gain ``"auto"`` tries the stock order with gradients handed over in turn, which no
# simulation tells from stock, and which gained -1 to 9% on each of five networks.  Turns may gain far more
# than predicted: when a busy machine had disturbed the profile of a VGG-16, 1.4% was predicted and 19%
# gained.
TRIED = 0.005
ALONE = "a rank alone"
# Batches of so many times the rows.
_ROWS = (1, 2, 4, 8)
# A link that was measured before may be wrong by so much.
_MOST_OFF = 64.0
StepSeconds = Callable[[int, int], float]


@dataclass(frozen=True)
class PlannedGain:
    """Holds a plan, and the predicted seconds of a step in the stock order."""

    plan: Plan
    stock_s: float


@dataclass(frozen=True)
class MeasuredLink:
    """Holds the link as the ranks' allreduces use it when they follow one another as in a step.

    The bandwidth between neighbours of the ring includes the ranks' negotiation; ``flight_bytes`` is the
    smallest amount under way that reaches most of the best bandwidth while a device computes.
    """

    link: Link
    flight_bytes: float


def measure_allreduce(engine: Engine) -> MeasuredLink:
    """Time streams of messages of several sizes; all ranks call it.  CostError: the times show no link."""
    seconds = {size: _seconds_each(engine, size) for size in _SIZES}
    return link_from(seconds, engine.size)


def most_seconds(step_s: float, gradient_bytes: float) -> float:
    """Estimate the most seconds that :func:`measure_allreduce` and :func:`make_plan` take.

    Args:
        step_s: seconds of a step that exchanges ``gradient_bytes``, which bound the link's slowness.
        gradient_bytes: if they are few, the number of messages determines the time, not their size.
    """
    sent_bytes = (1 + _REPEATS) * sum(_count(size) * size for size in _SIZES)
    return _SEARCH_S + 2 * _SLICED_SEARCH_S + step_s * sent_bytes / max(gradient_bytes, _SIZES[-1] / 4)


def link_from(seconds: Mapping[int, float], workers: int) -> MeasuredLink:
    """Compute the link from seconds of one allreduce in a stream, by its bytes.

    The largest tell the bandwidth: a network lets a burst of small ones through at any rate.
    """
    largest = max(seconds)
    bytes_per_s = largest / seconds[largest]
    size = min(size for size, each_s in seconds.items() if size / each_s >= _GOOD * bytes_per_s)
    flight_bytes = float(max(size, _LEAST_FLIGHT_BYTES))
    return MeasuredLink(link_of_ring(Link(0.0, bytes_per_s), workers), flight_bytes)


def _count(size: int) -> int:
    """Return how many messages of a size are sent."""
    return max(_MESSAGES, _STREAM_BYTES // size)


def _seconds_each(engine: Engine, size: int) -> float:
    """Return the seconds of one allreduce in a stream in which at most two are under way."""

    def stream(tensor: tf.Tensor) -> Any:
        done: list[Any] = []
        for number in range(_count(size)):
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
    return max(statistics.median(taken_s), 1e-9) / _count(size)


def one_step(graph_def: graph_pb2.GraphDef) -> tuple[list[LayerKey], graph_pb2.GraphDef, TrainingGraph]:
    """Return the layers of one step, as plans number them, and the step. GraphError: not a step."""
    step = split_steps(graph_def)[0]
    graph = classify_graph_def(step)
    return layer_keys(step, graph), step, graph


def calibrated(
    layers: Sequence[LayerCosts], link: Link, workers: int, step_s: float
) -> tuple[tuple[LayerCosts, ...], Link]:
    """Return costs with which a single step in the stock order is predicted to take ``step_s``, as measured.

    Ops are slower under the profiler, and other ops and communication take their cores meanwhile: so all
    seconds of computing change by one factor.  The link was measured by itself: only if no factor up to 4 is
    enough, for instance if the link alone takes longer than the step, does it change by a factor, too.
    """

    def stock_s(factor: float) -> float:
        return stock_step_s([layer.slowed(factor) for layer in layers], link, workers, 1)

    least, most = _FACTORS
    if stock_s(least) < step_s < stock_s(most):
        factor, between = factor_for(stock_s, step_s, _FACTORS), link
    else:
        factor = step_s / max(stock_s(1.0), 1e-9)
        between = link.slowed(factor)
    return tuple(layer.slowed(factor) for layer in layers), between


def as_measured(
    costs: CostTable, graph: TrainingGraph, link: Link, workers: int, step_s: float
) -> tuple[tuple[LayerCosts, ...], CostTable]:
    """Return :func:`calibrated` costs, whose weights are the bytes sent, and a report's with real weights."""
    sending = with_weight_bytes(costs.layers, sent_bytes(graph, workers))
    layers, between = calibrated(sending, link, workers, step_s)
    own_bytes = [layer.weight_bytes for layer in costs.layers]
    return layers, dataclasses.replace(costs, layers=with_weight_bytes(layers, own_bytes), link=between)


def factor_for(seconds_of: Callable[[float], float], wanted_s: float, between: tuple[float, float]) -> float:
    """Return the factor within ``between`` for which ``seconds_of(factor)`` is ``wanted_s``, by bisection."""
    low, high = between
    for _ in range(_HALVINGS):
        factor = math.sqrt(low * high)
        if seconds_of(factor) < wanted_s:
            low = factor
        else:
            high = factor
    return math.sqrt(low * high)


def needs_costs(schedule: str, options: Iterable[str]) -> bool:
    """Return whether a policy, or ``"auto"``, needs costs with these options."""
    return schedule == "auto" or policy_named(schedule, MODE).needs.costs_with(options)


def plain_schedule(layers: int, policy: str, workers: int, options: Mapping[str, Any]) -> Schedule:
    """Return a schedule of so many layers that needs no costs; it is not simulated."""
    problem = _problem([LayerCosts(1.0, 1.0, 1.0, weight_bytes=1)] * layers, Link(), workers)
    asked = policy_named(policy, MODE)
    return as_asked(asked, _told(asked, problem, options)).trial.schedule


def make_plan(
    layers: Sequence[LayerCosts],
    link: Link,
    workers: int,
    schedule: str,
    steps: int,
    slice_bytes: float = 0.0,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> PlannedGain:
    """Return the policy's plan, for ``"auto"`` the fastest of all that order communication.  If none is
    predicted to gain, it is the stock order with gradients handed over in turn.

    Args:
        layers: costs of one step.
        link: between neighbours of the ring.
        workers: the ranks.
        schedule: a policy's name, or ``"auto"``.
        steps: how many run together; the barrier after the last is part of the prediction.
        slice_bytes: the smallest slices that use the link well, for policies that may cut gradients; 0: none.
        options: the policy's options.
    """
    problem, step_time = _problem(layers, link, workers), step_time_of(steps)
    stock = as_asked(STOCK_ORDER, _told(STOCK_ORDER, problem, {"barrier": False}), step_time)

    def whole(policies: Sequence[Policy]) -> list[Candidate]:
        return [tried(policy, _told(policy, problem, options), step_time) for policy in policies]

    if schedule == "auto":
        rows = auto_candidates([x for x in policies_of(MODE) if x.needs.link], problem, whole)
    else:
        rows = whole([policy_named(schedule, MODE)])
        if rows[0].error is not None:
            raise rows[0].error
    best = min(rows, key=lambda row: row.step_s)
    largest = max(layer.weight_bytes for layer in layers)
    sizes = [int(slice_bytes * times) for times in (1, 4) if 0 < slice_bytes * times < largest]
    for policy in [POLICIES[row.name] for row in rows if row.trial is not None]:
        for size in sizes if "slice_bytes" in policy.options else ():
            sliced = {"slice_bytes": size, "budget_s": _SLICED_SEARCH_S, **options}
            rows.append(tried(policy, _told(policy, problem, sliced), step_time))
            # Slices are not free: each is negotiated about and copied.
            if rows[-1].step_s < best.step_s * (1 - WORTH):
                best = rows[-1]
    if schedule == "auto" and predicted_gain(best.step_s, stock.step_s) < TRIED:
        best = tried(REVERSE_FIRST_K, _told(REVERSE_FIRST_K, problem, {**options, "k": 0}), step_time)
        rows.append(best)
    return PlannedGain(choose(rows, lambda row: (row is not best,)), stock.step_s)


def predicted_gain(step_s: float, stock_s: float | None) -> float:
    """Return the share of the stock step that a plan is predicted to save; 0: not known."""
    return 1 - step_s / stock_s if stock_s else 0.0


def stock_step_s(layers: Sequence[LayerCosts], link: Link, workers: int, steps: int) -> float:
    """Return the predicted seconds of a stock step when so many ``steps`` run together."""
    problem = _told(STOCK_ORDER, _problem(layers, link, workers), {"barrier": steps == 1})
    return as_asked(STOCK_ORDER, problem, step_time_of(steps)).step_s


def _problem(layers: Sequence[LayerCosts], link: Link, workers: int) -> Problem:
    return Problem(tuple(layers), workers, link=link, mode=MODE)


def _told(policy: Policy, problem: Problem, given: Mapping[str, Any]) -> Problem:
    """Add to a policy's options the given ones and what the graph can do: communicate in a given order."""
    options = {"communication": "ordered", "slice_bytes": 0, "budget_s": _SEARCH_S, **given}
    if "k" in options:  # no more than all layers can wait
        options["k"] = min(options["k"], len(problem.layers))
    known = {name: value for name, value in options.items() if name in policy.options}
    return dataclasses.replace(problem, options=known)


def step_time_of(steps: int) -> StepTime:
    """Return how to compute the seconds of one of some steps that run and end together."""
    return StepTime(lambda timeline: timeline.makespan_s / steps, steps)


def note_alone(report: Report, alone_s: list[float], ranks: RanksInStep, steps: int = 1) -> None:
    """Note this rank's time alone; rank 0 warns if all together are slower.

    ``steps`` go into one function.
    """
    report.change(alone_s=alone_s)
    if ranks.engine.rank or not alone_s:
        return
    slower_warning = SlowerWarning()
    slower_warning.advise = functools.partial(_advice, report, steps)
    slower_warning.look(report, report.ranks_gain)


def _advice(report: Report, steps: int, gain: Gain) -> str:
    """Return advice from simulated costs, if they were measured."""
    alone_s, together_s = statistics.median(report.alone_s), statistics.median(report.running_s)
    step_s = from_times(report.ranks, alone_s, together_s)
    if report.costs is not None:
        layers, link = report.costs.layers, report.costs.link
        with contextlib.suppress(OOOError):
            step_s = from_costs(layers, link, alone_s, together_s, report.ranks, steps)
    return advice(report.ranks, alone_s, step_s, gain)


def advice(ranks: int, alone_s: float, step_s: StepSeconds, gain: Gain) -> str:
    """Return one line: how much slower it is, and how many ranks, or how large batches, to take.

    Args:
        ranks: how many train now.
        alone_s: seconds of one rank's step without the others; in proportion for larger batches.
        step_s: predicts a step's seconds from the number of ranks and the factor of rows.
        gain: as measured.
    """
    best, best_ranks, best_rows = 1.0, 1, 1
    for count in range(2, ranks + 1):
        for rows in _ROWS:
            throughput = count * rows * alone_s / step_s(count, rows)
            if throughput > best:
                best, best_ranks, best_rows = throughput, count, rows
    if best_ranks == 1:
        return f"{gain.text}; one rank alone is faster than all that was simulated: python train.py"
    rows_text = f" with batches of {best_rows} times as many rows" if best_rows > 1 else ""
    return f"{gain.text}; by simulation {best_ranks} ranks{rows_text} reach {best:.2f}x the throughput of one"


def from_times(ranks: int, alone_s: float, together_s: float) -> StepSeconds:
    """Estimate step times from two known ones: a ring sends (n - 1) / n of the bytes."""
    sent_s = max(0.0, together_s - alone_s) / ((ranks - 1) / ranks)
    return lambda count, rows: rows * alone_s + sent_s * (count - 1) / count


def from_costs(
    layers: Sequence[LayerCosts], link: Link, alone_s: float, together_s: float, ranks: int, steps: int
) -> StepSeconds:
    """Simulate the stock order, with costs of layers fitted to both measured times.

    Work is scaled to a rank's seconds alone, messages to those of all.  OOOError: it cannot be simulated.
    """
    factor = alone_s / max(sum(layer.busy_s + layer.update_s for layer in layers), 1e-9)
    fitted = [layer.slowed(factor) for layer in layers]

    def together(times: float) -> float:
        return stock_step_s(fitted, link.slowed(times), ranks, steps)

    between = link.slowed(factor_for(together, together_s, (1 / _MOST_OFF, _MOST_OFF)))

    def step_s(count: int, rows: int) -> float:
        return stock_step_s([layer.scaled(rows) for layer in fitted], between, count, steps)

    return step_s
