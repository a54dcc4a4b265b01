"""Classifies, schedules and rewrites the graph of a step on one device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes import blocks
from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.compat import runtime
from grappler_passes.graph.sizes import KnownShapes, with_sizes
from grappler_passes.graph.training_graph import TrainingGraph, peak_bytes_by_device, unknown_sizes
from grappler_passes.passes.steps import additions
from tf_ooo.compat import tf_functions
from tf_ooo.costs.from_graph import places
from tf_ooo.errors import GraphError, MemoryLimitError, OptionsError
from tf_ooo.options import OneDeviceOptions
from tf_ooo.options.base import check_schedule, whole_number
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.policies import BACKWARD_ORDERS, DEFAULT_POLICY
from tf_ooo.rewriting import passes
from tf_ooo.rewriting.lowering import TaskOps, dependencies, execution_order, lower, task_ops
from tf_ooo.rewriting.result import Orders, RewriteResult, told


def highest_peak(graph: TrainingGraph, order: Sequence[str]) -> int:
    """Return the highest peak of all devices: a limit holds for each of them."""
    return max(peak_bytes_by_device(graph, order).values(), default=0)


def require_sizes(graph: TrainingGraph, limit_bytes: int) -> None:
    """Raise MemoryLimitError unless all sizes are known."""
    if unknown := unknown_sizes(graph):
        raise MemoryLimitError(limit_bytes, None, unknown)


def stock_order(graph: TrainingGraph) -> list[str]:
    """Return the order in which TensorFlow's executor starts ops: first ready, first run."""
    dag = dependencies(graph)
    waiting = [dag.in_degree(op) for op in dag.node_indices()]
    order = [op for op, count in enumerate(waiting) if not count]
    for op in order:  # grows while it is read: a queue
        for reader in sorted(dag.successor_indices(op)):
            waiting[reader] -= 1
            if not waiting[reader]:
                order.append(reader)
    return [dag[op] for op in order]


def stock_peak(graph: TrainingGraph, order: Sequence[str]) -> int:
    """Return the peak of the original order; ``graph`` has sizes, and lacks what was separated."""
    return highest_peak(graph, [name for name in order if name in graph.ops])


def check_memory(result: RewriteResult, known: KnownShapes, limit_bytes: int) -> int:
    """Return the peak of the stock order with inputs of these shapes; 0 without a plan under a limit.

    Raises MemoryLimitError if the planned order exceeds the limit with them.
    """
    if result.orders is None:
        return 0
    graph = with_sizes(result.training_graph, result.graph_def, known)
    require_sizes(graph, limit_bytes)
    peak = highest_peak(graph, result.orders.planned)
    if peak > limit_bytes:
        raise MemoryLimitError(limit_bytes, peak)
    return stock_peak(graph, result.orders.stock)


def classify(graph: graph_pb2.GraphDef | tf.types.experimental.ConcreteFunction) -> TrainingGraph:
    """Sort the ops of a training step into F, dO, dW, U, comm and other, by dataflow.

    Args:
        graph: a ``GraphDef``, or a ConcreteFunction (``train_step.get_concrete_function(...)``).

    Raises:
        GraphError: it is not a training step; the message says what is missing.
    """
    if tf_functions.is_concrete_function(graph):
        return classify_graph_def(*runtime.graph_def_of(graph))
    if not hasattr(graph, "node"):
        raise GraphError(f"expected a GraphDef or a ConcreteFunction, got a {type(graph).__name__}")
    return classify_graph_def(graph)


def plan_graph(
    training_graph: TrainingGraph, schedule: str = DEFAULT_POLICY, memory_limit_bytes: int | None = None
) -> Schedule:
    """Order the backward pass on one device; ``"auto"`` is fast_forward, or the lowest peak under a limit.

    If a named policy's predicted peak is above the limit, the order with the lowest peak is taken.

    Raises:
        GraphError: not a training graph.
        OptionsError: no such policy.
        MemoryLimitError: even the lowest peak is above the limit; says the smallest feasible one.
            Also if sizes are unknown: trace the step with a fixed batch size.
    """
    if not isinstance(training_graph, TrainingGraph):
        raise GraphError(
            f"plan() takes a training graph, got a {type(training_graph).__name__}; "
            "make one with tf_ooo.classify(graph_def or concrete_function)"
        )
    check_schedule("single_device", schedule)
    whole_number(1, optional=True)("memory_limit_bytes", memory_limit_bytes)
    return _plan(training_graph, task_ops(training_graph), schedule, memory_limit_bytes)


def _plan(graph: TrainingGraph, tasks: TaskOps, name: str, limit_bytes: int | None) -> Schedule:
    policy = DEFAULT_POLICY if name == "auto" else name
    if policy not in BACKWARD_ORDERS:
        raise OptionsError(f"schedule={name!r} is not accepted; accepted: {', '.join(BACKWARD_ORDERS)}")
    if limit_bytes is None:
        return _schedule(graph, tasks, policy)
    require_sizes(graph, limit_bytes)
    if name != "auto":
        named = _schedule(graph, tasks, policy)
        if _peak(named) <= limit_bytes:
            return named
    lowest = min((_schedule(graph, tasks, each) for each in BACKWARD_ORDERS), key=_peak)
    if _peak(lowest) > limit_bytes:
        raise MemoryLimitError(limit_bytes, _peak(lowest))
    return lowest


def _peak(schedule: Schedule) -> int:
    return schedule.predicted_peak_bytes or 0


def _schedule(graph: TrainingGraph, tasks: TaskOps, policy: str) -> Schedule:
    """Return one lane per device: replicas of a model in one graph must not wait for each other."""
    order = BACKWARD_ORDERS[policy](tasks.backward_layers, frozenset(tasks.ops))
    lanes: dict[str, list[Task]] = {}
    for task in order:
        lanes.setdefault(graph.ops[tasks.ops[task][0]].device, []).append(task)
    numbered = {(number, 0): TaskList(lane) for number, (_, lane) in enumerate(sorted(lanes.items()))}
    schedule = Schedule("single_device", policy, numbered or {(0, 0): TaskList([])})
    peak = highest_peak(graph, _order_of(schedule, graph, tasks))
    return replace(schedule, predicted_peak_bytes=peak)


def peak_with(result: RewriteResult, known: KnownShapes) -> int | None:
    """Return the planned order's peak with the sizes that the graph left open; None if some stay unknown."""
    graph = with_sizes(result.training_graph, result.graph_def, known, only_open=True)
    if unknown_sizes(graph):
        return None
    return highest_peak(graph, _order_of(result.schedule, graph, task_ops(graph)))


@blocks.collector_paused()
def rewrite_graph(
    graph_def: graph_pb2.GraphDef, options: OneDeviceOptions, known: KnownShapes | None = None
) -> RewriteResult:
    """Separate, classify, plan, order and verify a step's graph; the argument is not changed.

    ``known`` are shapes of the step's inputs that the graph leaves open. Raises GraphError if it is no
    training step, PassError if a pass fails, MemoryLimitError.
    """
    known = known or KnownShapes(options.batch_size)
    started, limit_bytes = time.perf_counter(), options.memory_limit_bytes
    original = classify_graph_def(graph_def)
    separated = passes.separating(options.dump_dir)(graph_def, original)
    training_graph = classify_graph_def(separated.graph_def) if separated.modified else original
    open_sizes = bool(known or limit_bytes is not None) and bool(unknown_sizes(training_graph))
    if open_sizes:
        training_graph = with_sizes(training_graph, separated.graph_def, known, only_open=True)
    tasks = task_ops(training_graph)
    schedule = _plan(training_graph, tasks, options.schedule, limit_bytes)
    loose: list[str] = []
    rewrite_plan = lower(schedule, training_graph, tasks, loose)
    order = passes.ordering(rewrite_plan, graph_def, separated, options.dump_dir)
    ordered = order(separated.graph_def, training_graph)
    waits = additions(separated.graph_def, ordered.graph_def).controls
    result = RewriteResult(
        training_graph=training_graph,
        schedule=schedule,
        graph_def=ordered.graph_def,
        moved_ops=tasks.moved_ops(waits),
        added_edges=sum(map(len, waits.values())),
        plan_seconds=0.0,
        mixed={**training_graph.mixed, **separated.mixed},
        notes=told(lambda: places(training_graph), (*separated.notes, *ordered.notes), loose),
    )
    if limit_bytes is not None:
        stock = tuple(stock_order(original))
        planned, peak = _order_of(schedule, training_graph, tasks), stock_peak(training_graph, stock)
        result = replace(result, orders=Orders(planned, stock, peak, open_sizes))
    return replace(result, plan_seconds=time.perf_counter() - started)


def _order_of(schedule: Schedule, graph: TrainingGraph, tasks: TaskOps) -> tuple[str, ...]:
    return tuple(execution_order(list(schedule.tasks), graph, tasks))
