"""Turns a schedule and a TrainingGraph into a RewritePlan: control edges for the order, each op's task."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import rustworkx as rx

from grappler_passes.graph.dependencies import reached
from grappler_passes.graph.training_graph import (
    LayerTask,
    OpKind,
    TrainingGraph,
    backward_tasks,
    layers_of_weights_and_readers,
    producers_of,
)
from grappler_passes.passes.rewrite_plan import RewritePlan
from tf_ooo.planning.model.schedule import Schedule, TaskList
from tf_ooo.planning.model.task import Task

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2


@dataclass(frozen=True)
class LaneOrder:
    """Holds what a lane adds to a graph: edges (before, after), names of joins for edges to lead through, and
    each op's place in the lane; ``notes`` say which tasks may still overlap."""

    edges: list[tuple[str, str]] = field(default_factory=list)
    joins: list[str] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bundle:
    """Holds successive tasks that run as one, each with the numbers of its ops."""

    tasks: dict[Task, Sequence[int]] = field(default_factory=dict)

    @cached_property
    def ops(self) -> list[int]:
        return [op for ops in self.tasks.values() for op in ops]


class Links(Protocol):
    """Says how the tasks of one mode wait for each other, and what the ops of its graph depend on."""

    names: list[str]  # the ops' names, by number

    def bit(self, op: int) -> int:
        """Return the bit that stands for the op in a set."""

    def needs(self, op: int) -> int:
        """Return the op and all that it depends on, as bits."""

    def run_as_one(self, before: Task, after: Task) -> bool:
        """Return whether two tasks in a row are one block."""

    def link(self, order: LaneOrder, rank: int, block: Bundle, following: Bundle, free: list[int]) -> None:
        """Add edges that make the ``free`` ops of block ``following`` run after ``block``, number ``rank``.

        An empty block follows the last one.
        """


def one_after_another(lane: Sequence[Task], ops: Mapping[Task, Sequence[int]], links: Links) -> LaneOrder:
    """Return edges that make the tasks run one after the other; tasks without ``ops`` are skipped.

    Ops that an earlier block needs get no edge (the shape that a kernel's gradient and the next dO share).
    The edge would not always close a cycle yet, but it would once ops are merged: after all graph optimizers
    oneDNN makes one op of a bias gradient and its kernel's.
    """
    order = LaneOrder()
    blocks = _blocks([task for task in lane if ops.get(task)], ops, links)
    needed = 0
    for rank, (block, following) in enumerate(itertools.zip_longest(blocks, blocks[1:], fillvalue=Bundle())):
        order.ranks.update((links.names[op], rank) for op in block.ops)
        for op in block.ops:
            needed |= links.needs(op)
        links.link(order, rank, block, following, [op for op in following.ops if not needed & links.bit(op)])
    return order


def _blocks(tasks: Sequence[Task], ops: Mapping[Task, Sequence[int]], links: Links) -> list[Bundle]:
    blocks: list[Bundle] = []
    for before, task in zip([None, *tasks], tasks, strict=False):
        if before is None or not links.run_as_one(before, task):
            blocks.append(Bundle())
        blocks[-1].tasks[task] = ops[task]
    return blocks


_MAX_EDGES_PER_PAIR = 64


@dataclass(frozen=True)
class TaskOps:
    """Holds the ops of each dO and dW task, the layers in backward order, and the :func:`dependencies`."""

    ops: Mapping[Task, tuple[str, ...]]
    backward_layers: tuple[int, ...]
    dag: rx.PyDiGraph

    def moved_ops(self, waiting: Collection[str]) -> int:
        """Count the ops of all tasks in which some op is ``waiting`` for a new edge."""
        return sum(len(names) for names in self.ops.values() if any(name in waiting for name in names))

    @property
    def by_layer(self) -> dict[LayerTask, tuple[str, ...]]:
        """Return the ops of each kind and layer, the form in which costs are summed up."""
        return {(task.kind, task.stage): names for task, names in self.ops.items()}


def task_ops(graph: TrainingGraph) -> TaskOps:
    """Return the tasks of :func:`backward_tasks` as schedules name them."""
    backward = backward_tasks(graph)
    ops = {Task(*task): names for task, names in backward.ops.items()}
    return TaskOps(ops, backward.layers, dependencies(graph))


def only_tasks(schedule: Schedule, there: Collection[Task]) -> Schedule:
    """Return the schedule without dO and dW that the graph lacks: a layer may have no dO of its own."""
    lanes = {
        lane: TaskList([task for task in tasks if task in there or task.kind not in ("dO", "dW")])
        for lane, tasks in schedule.lanes.items()
    }
    return dataclasses.replace(schedule, lanes=lanes)


def lower(
    schedule: Schedule, graph: TrainingGraph, tasks: TaskOps | None = None, notes: list[str] | None = None
) -> RewritePlan:
    """Return the rewrite plan that makes TensorFlow run the backward tasks in the schedule's order.

    F and U stay where they are in the graph.  ``notes`` is given the edges that were left out.  Raises
    ScheduleError unless the schedule names exactly the graph's tasks.
    """
    tasks = tasks or task_ops(graph)
    schedule.require(tasks.ops)
    links = _FewEdges(graph, tasks.dag)
    numbers = {task: [links.place[name] for name in names] for task, names in tasks.ops.items()}
    edges: list[tuple[str, str]] = []
    streams: dict[str, int] = {}
    priorities: dict[str, int] = {}
    for (_, stream), lane in schedule.lanes.items():
        backward = [task for task in lane if task in tasks.ops]
        order = one_after_another(backward, numbers, links)
        edges += order.edges
        if notes is not None:
            notes += order.notes
        for rank, task in enumerate(backward):  # tasks have ranks, not blocks: successive dO differ
            streams.update(dict.fromkeys(tasks.ops[task], stream))
            priorities.update(dict.fromkeys(tasks.ops[task], rank))
    classified = {n: op for n, op in graph.ops.items() if op.kind is not OpKind.OTHER}
    return RewritePlan(
        edges=tuple(edges),
        kinds={name: op.kind.value for name, op in classified.items()},
        layers={name: op.layer for name, op in classified.items() if op.layer is not None},
        streams={name: streams.get(name, 0) for name in classified},
        priorities={name: priorities.get(name, 0) for name in classified},
    )


class _FewEdges:
    """Makes edges from the last ops of a block to the first of the next, without joins between.

    Successive dO tasks are one block: data edges order them, and parallel branches stay parallel.
    """

    def __init__(self, graph: TrainingGraph, dag: rx.PyDiGraph) -> None:
        self.names = list(graph.ops)
        self.place = {name: i for i, name in enumerate(self.names)}
        self._graph, self._dag = graph, dag

    @cached_property
    def _needs(self) -> list[int]:
        """Return the ancestors of all ops as bits, in one walk; rustworkx gives one node's at a time."""
        needs: list[int] = []
        for i in range(len(self.names)):
            bits = 1 << i
            for producer in self._dag.predecessor_indices(i):
                bits |= needs[producer]
            needs.append(bits)
        return needs

    def bit(self, op: int) -> int:
        return 1 << op

    def needs(self, op: int) -> int:
        return self._needs[op]

    def run_as_one(self, before: Task, after: Task) -> bool:
        return before.kind == after.kind == "dO"

    def link(self, order: LaneOrder, rank: int, block: Bundle, following: Bundle, free: list[int]) -> None:
        """Put the last ops of a block before the first of the next; if too many, only the latest ones."""
        before, after = ([self.names[i] for i in ops] for ops in (block.ops, free))

        def producers(name: str) -> list[str]:
            return producers_of(self._graph.ops[name])

        lasts, firsts = last_ops(before, producers), first_ops(after, producers)
        room = max(1, _MAX_EDGES_PER_PAIR // max(1, len(firsts)))
        pairs = [(last, first) for last in lasts[-room:] for first in firsts]
        if len(pairs) < len(lasts) * len(firsts):
            order.notes.append(
                f"{after[0]!r} may begin before the task in front of it has quite ended: {len(pairs)} of the "
                f"{len(lasts) * len(firsts)} edges between their ops were added, more would cost time"
            )
        order.edges.extend(pairs)


def first_ops(names: Collection[str], producers: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the ops that read none of the others in ``names``."""
    inside = set(names)
    return [name for name in names if inside.isdisjoint(producers(name))]


def last_ops(names: Collection[str], producers: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the ops that none of the others in ``names`` read."""
    read = {producer for name in names for producer in producers(name)}
    return [name for name in names if name not in read]


def execution_order(schedule_tasks: Iterable[Task], graph: TrainingGraph, tasks: TaskOps) -> list[str]:
    """Return the ops in one order: forward, the tasks as scheduled, each update right after its dW."""
    rank_of = {task: rank for rank, task in enumerate(schedule_tasks)}
    rank = dict.fromkeys(graph.ops, 0)
    for task, names in tasks.ops.items():
        rank.update(dict.fromkeys(names, 2 * rank_of[task] + 1))
    for layer in graph.layers:
        after = rank_of.get(Task("dW", layer.index), len(rank_of))
        rank.update(dict.fromkeys(layer.update_ops, 2 * after + 2))
    # Ready ops run by rank, and ops of the same rank in the graph's order.
    keys = {name: f"{rank[name]:09d} {place:09d}" for place, name in enumerate(graph.ops)}
    return list(rx.lexicographical_topological_sort(tasks.dag, key=keys.__getitem__))


def dependencies(graph: TrainingGraph) -> rx.PyDiGraph:
    """Return the graph of ops, nodes numbered in order; an edge leads from each producer to its readers."""
    place = {name: i for i, name in enumerate(graph.ops)}
    dag: rx.PyDiGraph = rx.PyDiGraph(multigraph=False)
    dag.add_nodes_from(list(graph.ops))
    for i, op in enumerate(graph.ops.values()):
        # A producer that comes later closes a loop: within one iteration it is no dependency.
        producers = (place.get(name, i) for name in producers_of(op))
        dag.add_edges_from_no_data([(producer, i) for producer in producers if producer < i])
    return dag


# The lowest bit stands for what a variable holds; the bits above it are stages.
_WEIGHTS, _FIRST_STAGE = 1, 2
_READING = ("ReadVariableOp", "Resource")


def tasks_of_ops(graph: TrainingGraph) -> dict[str, Task]:
    """Return the task of each op in a step without micro-batches: F, dO, dW, communication, U per layer.

    F tasks hold only what the backward pass needs: metrics may run at any time.
    """
    backward = {*graph.of_kind(OpKind.OUTPUT_GRAD), *graph.of_kind(OpKind.WEIGHT_GRAD)}
    forward = layers_of_weights_and_readers(graph)
    wanted = reached(backward, lambda name: graph.ops[name].producers if name in graph.ops else ())
    forward = {n: forward[n] for n in graph.of_kind(OpKind.FORWARD) if n in forward and n in wanted}
    tasks = {name: Task("F", layer) for name, layer in forward.items()}
    for layer in graph.layers:
        tasks.update(dict.fromkeys(layer.communication_ops, Task("comm", layer.index)))
        tasks.update(dict.fromkeys(layer.update_ops, Task("U", layer.index)))
    for task, names in task_ops(graph).ops.items():
        tasks.update(dict.fromkeys(names, task))
    return {name: task for name, task in tasks.items() if graph.ops[name].type != "Const"}


def timed_ops(graph_def: graph_pb2.GraphDef, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Return the tasks of ops, without F ops that may run long before their task does.

    Left out are metrics, which the backward pass does not need, and ops that read only labels: neither a
    weight nor another stage's output.  A task that has no other ops keeps them.
    """
    producers = {
        node.name: [tensor.partition(":")[0] for tensor in node.input if not tensor.startswith("^")]
        for node in graph_def.node
    }
    backward = [name for name, task in tasks.items() if task.kind in ("dO", "dW")]
    needed = reached(backward, lambda name: producers.get(name, ()))
    reads = _reads(graph_def, producers, tasks)
    stages = {task.stage for task in tasks.values() if task.kind == "F"}

    def counts(name: str, task: Task) -> bool:
        early = task.stage > min(stages) and not reads[name] & ~(_FIRST_STAGE << task.stage)
        return task.kind != "F" or (name in needed and not early)

    kept = {name: task for name, task in tasks.items() if counts(name, task)}
    lost = set(tasks.values()) - set(kept.values())
    return {name: task for name, task in tasks.items() if name in kept or task in lost}


def _reads(
    graph_def: graph_pb2.GraphDef, producers: Mapping[str, list[str]], tasks: Mapping[str, Task]
) -> dict[str, int]:
    """Return for each op, as bits, the stages whose F it depends on, and one bit for any weight."""
    readers: defaultdict[str, list[str]] = defaultdict(list)
    for name, read in producers.items():
        for producer in read:
            readers[producer].append(name)
    bits: dict[str, int] = {}
    for node in graph_def.node:
        task = tasks.get(node.name)
        own = _FIRST_STAGE << task.stage if task is not None and task.kind == "F" else 0
        bits[node.name] = own | (_WEIGHTS if node.op.startswith(_READING) else 0)
    stack = [name for name, own in bits.items() if own]
    while stack:
        name = stack.pop()
        for reader in readers[name]:
            if bits[reader] | bits[name] != bits[reader]:
                bits[reader] |= bits[name]
                stack.append(reader)
    return bits
