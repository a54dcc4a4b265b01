"""Schedule + TrainingGraph -> RewritePlan: the control edges that force the order of the tasks."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grappler_passes.analysis.backward_tasks import LayerTask, backward_tasks, producers_of
from grappler_passes.graph.training_graph import OpKind, TrainingGraph
from grappler_passes.passes.rewrite_plan import RewritePlan
from tf_ooo.planning.model.schedule import Schedule, Task

_MAX_EDGES_PER_PAIR = 64


@dataclass(frozen=True)
class TaskOps:
    """The ops of each dO and dW task, and the layers in the order in which backward reaches them.

    ``waiting`` and ``readers`` are the :func:`dependencies` of the graph's ops.
    """

    ops: Mapping[Task, tuple[str, ...]]
    backward_layers: tuple[int, ...]
    waiting: Mapping[str, int]
    readers: Mapping[str, list[str]]

    @property
    def by_layer(self) -> dict[LayerTask, tuple[str, ...]]:
        """The ops of each kind and layer, as costs are summed up."""
        return {(task.kind, task.stage): names for task, names in self.ops.items()}


def task_ops(graph: TrainingGraph) -> TaskOps:
    """The tasks of :func:`backward_tasks`, as a schedule names them."""
    backward = backward_tasks(graph)
    ops = {Task(*task): names for task, names in backward.ops.items()}
    return TaskOps(ops, backward.layers, *dependencies(graph))


def lower(
    schedule: Schedule, graph: TrainingGraph, tasks: TaskOps | None = None, notes: list[str] | None = None
) -> RewritePlan:
    """The rewrite plan that makes TensorFlow run the backward tasks in the schedule's order.

    F and U of a schedule stay where the graph has them: their data order them.

    ``notes`` is told where edges were left out.

    Raises ScheduleError unless the schedule names exactly the graph's tasks.
    """
    tasks = tasks or task_ops(graph)
    schedule.require(tasks.ops)
    lanes = {lane: [task for task in order if task in tasks.ops] for lane, order in schedule.lanes.items()}
    edges: list[tuple[str, str]] = []
    needs = _ancestors(graph)
    streams: dict[str, int] = {}
    priorities: dict[str, int] = {}
    for (_, stream), lane in lanes.items():
        edges += _lane_edges(graph, tasks.ops, lane, needs, [] if notes is None else notes)
        for rank, task in enumerate(lane):
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


def _ancestors(graph: TrainingGraph) -> dict[str, int]:
    """For each op the bit set of the ops that it needs; bit i is the i-th op of the graph."""
    needs: dict[str, int] = {}
    for place, (name, op) in enumerate(graph.ops.items()):
        bits = 1 << place
        for producer in producers_of(op):
            bits |= needs.get(producer, 0)
        needs[name] = bits
    return needs


def _lane_edges(
    graph: TrainingGraph,
    ops: Mapping[Task, tuple[str, ...]],
    lane: Sequence[Task],
    needs: Mapping[str, int],
    notes: list[str],
) -> list[tuple[str, str]]:
    """Edges from the last ops of each block to the first ops of the next.

    What an earlier block needs gets no edge (the shape that a kernel's gradient and the next dO share): it
    has to run before.  It would not always be a cycle yet, but one once ops are merged: after all graph
    optimizers oneDNN makes one op of a bias gradient and that of the kernel.

    Consecutive dO tasks are one block: data edges order the chain, and parallel branches of it stay parallel.
    """
    blocks: list[tuple[str, list[str]]] = []
    for task in lane:
        if blocks and task.kind == "dO" and blocks[-1][0] == "dO":
            blocks[-1][1].extend(ops[task])
        else:
            blocks.append((task.kind, list(ops[task])))
    place = {name: i for i, name in enumerate(graph.ops)}
    edges, needed = [], 0
    for (_, before), (_, after) in zip(blocks, blocks[1:], strict=False):
        for name in before:
            needed |= needs[name]
        free = [name for name in after if not needed >> place[name] & 1]
        lasts, firsts = _last(graph, before), _first(graph, free)
        pairs = _between(lasts, firsts)
        if len(pairs) < len(lasts) * len(firsts):
            notes.append(
                f"loosely ordered: {len(pairs)} of {len(lasts) * len(firsts)} edges between the tasks around "
                f"{free[0]!r}; the ops that end the first one early may still run during the second"
            )
        edges += pairs
    return edges


def _between(lasts: list[str], firsts: list[str]) -> list[tuple[str, str]]:
    """Every last before every first; where that would be many edges, the latest of the lasts only."""
    room = max(1, _MAX_EDGES_PER_PAIR // max(1, len(firsts)))
    return [(last, first) for last in lasts[-room:] for first in firsts]


def _first(graph: TrainingGraph, names: list[str]) -> list[str]:
    inside = set(names)
    return [name for name in names if not inside.intersection(producers_of(graph.ops[name]))]


def _last(graph: TrainingGraph, names: list[str]) -> list[str]:
    read = {producer for name in names for producer in producers_of(graph.ops[name])}
    return [name for name in names if name not in read]


def execution_order(schedule_tasks: Sequence[Task], graph: TrainingGraph, tasks: TaskOps) -> list[str]:
    """One op after the other: forward, the tasks as scheduled, each update right after its dW."""
    rank_of = {task: rank for rank, task in enumerate(schedule_tasks)}
    rank: dict[str, float] = {}
    for task, names in tasks.ops.items():
        rank.update(dict.fromkeys(names, float(rank_of[task])))
    for layer in graph.layers:
        rank.update(dict.fromkeys(layer.update_ops, rank_of.get(Task("dW", layer.index), len(rank_of)) + 0.5))
    place = {name: i for i, name in enumerate(graph.ops)}
    waiting, readers = dict(tasks.waiting), tasks.readers
    ready = [(rank.get(name, -1.0), place[name], name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        name = heapq.heappop(ready)[2]
        order.append(name)
        for reader in readers[name]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (rank.get(reader, -1.0), place[reader], reader))
    return order


def dependencies(graph: TrainingGraph) -> tuple[dict[str, int], dict[str, list[str]]]:
    """How many producers each op waits for, and its readers."""
    place = {name: i for i, name in enumerate(graph.ops)}
    waiting: dict[str, int] = {}
    readers: dict[str, list[str]] = {name: [] for name in graph.ops}
    for name, op in graph.ops.items():
        # A producer that stands later closes a loop: it is no dependency within one iteration.
        producers = {p for p in producers_of(op) if p in place and place[p] < place[name]}
        waiting[name] = len(producers)
        for producer in producers:
            readers[producer].append(name)
    return waiting, readers
