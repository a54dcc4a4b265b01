"""Defines the one dependency relation between tasks: what a task needs before it can start.

Validator, simulator, schedulers and pictures all ask here.  (Between the nodes of a GraphDef it is
:mod:`grappler_passes.graph.dependencies`.)  In words, for stage s and micro-batch m:

- F(s, m) needs F of the stages that s reads;
- dO(s, m) needs F(s, m), and dO of the stages that read s (dW too where a stage sends its gradient
  only after its whole backward pass);
- dW(s, m) needs dO(s, m);
- comm(s) needs dW(s, m) of all m, and U(s) needs comm(s), or dW where nothing is communicated;
- F(s, m) of the next step needs U(s); with a barrier between steps, U of all stages.

If a stage has no task of some kind, as two layers that share one dO, dependencies pass through it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tf_ooo.costs.layer_costs import LayerCosts, Link, layer_inputs
from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import KIND_NUMBER, KINDS, Fields, Floats, Ints, Task

Layers = Sequence[LayerCosts]
_TIED = "the gradient of a tied weight"
# A table of all tasks there could be: at most so many places for each task that there is, and some.
_PLACES_PER_TASK, _PLACES = 64, 1 << 16


@dataclass(frozen=True)
class Edges:
    """Holds edges for one reason between places in the lanes; the target is ``steps`` steps later.

    ``message_bytes`` are sent if the devices differ; None: the target only waits.  A source sends each
    ``tensor`` to a device once.
    """

    source: Ints
    target: Ints
    message_bytes: float | None
    why: str
    steps: int = 0
    tensor: int = 0


class Relation:
    """Holds a step's tasks as numbered nodes, and the edges between them; without layers a chain's."""

    def __init__(self, schedule: Schedule, layers: Layers | None = None) -> None:
        self.schedule = schedule
        self.lanes = list(schedule.lanes)
        self.lengths = np.array([len(tasks) for tasks in schedule.lanes.values()], np.int64)
        self.bases: Ints = np.concatenate([[0], np.cumsum(self.lengths)])
        self.codes = schedule.tasks.codes
        self.fields = Fields.of(self.codes)
        self.lane = np.repeat(np.arange(len(self.lanes), dtype=np.int32), self.lengths)
        self.device = np.array([device for device, _ in self.lanes], np.int32)[self.lane]
        highest = int(self.fields.stage.max(initial=-1)) + 1
        self.stages = max(len(schedule.stages) or highest, highest)
        self.by_priority = [lane in schedule.priority_lanes for lane in self.lanes]
        self._stage_inputs = stage_inputs(schedule, layers, self.stages)
        self._tied = _tied_to(schedule, layers, self.stages)
        self._tables = {kind: self._table(kind) for kind in KINDS}
        self._number = {kind: self._counts(kind) for kind in KINDS}

    def __len__(self) -> int:
        return len(self.codes)

    def task(self, node: int) -> Task:
        return Task.of_code(int(self.codes[node]))

    def has(self, kind: str, stage: int) -> bool:
        return self._number[kind][stage] > 0

    def _counts(self, kind: str) -> list[int]:
        """Return how many tasks of a kind each stage has."""
        stage = self.fields.stage[self.fields.kind == KIND_NUMBER[kind]]
        counts: list[int] = np.bincount(stage, minlength=self.stages).tolist()
        return counts

    def there(self, kind: str, stage: int) -> Ints:
        nodes = self.nodes(kind, stage)
        return nodes[nodes >= 0]

    def nodes(self, kind: str, stage: int) -> Ints:
        """Return nodes of a kind and stage, shape (parts, micro-batches); -1 for none."""
        table = self._tables[kind]
        if table is None:
            return np.full((1, self.schedule.microbatches), -1, np.int32)
        return table[:, stage]

    def _table(self, kind: str) -> Ints | None:
        """Return the nodes (part, stage, micro-batch) of one kind; None where there are none."""
        chosen = np.flatnonzero(self.fields.kind == KIND_NUMBER[kind])
        if not len(chosen):
            return None
        part = self.fields.part[chosen]
        shape = (int(part.max()) + 1, self.stages, self.schedule.microbatches)
        if shape[0] * shape[1] * shape[2] > _PLACES_PER_TASK * len(self) + _PLACES:
            size = f"{shape[0]} parts x {shape[1]} stages x {shape[2]} micro-batches"
            raise ScheduleError(f"missing: most {kind} of {size}; the schedule has {len(self)} tasks")
        table = np.full(shape, -1, np.int32)
        table[part, self.fields.stage[chosen], self.fields.microbatch[chosen]] = chosen
        return table

    @cached_property
    def edges(self) -> list[Edges]:
        """Return all edges, without those of the lanes' order."""
        return _merged(self._edges(between_steps=True))

    def _edges(self, between_steps: bool) -> Iterator[Edges]:
        for stage in range(self.stages):
            yield from self._forward(stage)
            yield from self._backward(stage)
            yield from self._update(stage)
            if between_steps:
                yield from self._next_step(stage)
        if between_steps and self.schedule.barrier and self.stages:
            yield from self._barrier()
        yield from self._after()

    def within_step(self, link: Link, devices: Ints | None = None) -> tuple[Ints, Ints, Floats]:
        """Return sources and targets of one step's edges, and the seconds of a message between two devices.

        ``devices``: the device of each stage, where the lanes do not tell.
        """
        edges = [edge for edge in _merged(self._edges(between_steps=False)) if not edge.steps]
        if devices is not None:
            edges += self._tied_to_last(devices)
        nothing = np.zeros(0, np.int64)
        source = np.concatenate([nothing, *(edge.source for edge in edges)])
        target = np.concatenate([nothing, *(edge.target for edge in edges)])
        size_bytes = np.concatenate([np.zeros(0), *map(self._bytes_until_there, edges)])
        device = self.device if devices is None else devices[self.fields.stage]
        pair = device[source], device[target]
        lag_s = link.of_pairs("latency_s", *pair) + size_bytes / link.of_pairs("bytes_per_s", *pair)
        return source, target, np.nan_to_num(lag_s)

    def _bytes_until_there(self, edges: Edges) -> Floats:
        """Return the bytes that the link sends from each message until what waits for it has all; nan: none.

        A tied weight's gradients of all micro-batches are on their way to one task, one behind the other.
        """
        size_bytes = np.full(
            len(edges.source), math.nan if edges.message_bytes is None else edges.message_bytes
        )
        if edges.why == _TIED and not self.schedule.asynchronous:
            size_bytes *= self.schedule.microbatches - self.fields.microbatch[edges.source]
        return size_bytes

    def _forward(self, stage: int) -> Iterator[Edges]:
        for source, size in self._providers("F", stage):
            yield from self._pairs(("F", source), ("F", stage), size, "the output of the stage before")

    def _backward(self, stage: int) -> Iterator[Edges]:
        own = max((size for _, size in self._readers[stage]), default=0.0)
        first, incoming = "dO" if self.has("dO", stage) else "dW", "the output gradient"
        yield from self._pairs(("F", stage), ("dO", stage), own, "the stored activations")
        for kind, source, size in self._gradient_sources(stage):
            yield from self._pairs((kind, source), (first, stage), size, incoming)
        yield from self._stored_input(stage)
        yield from self._pairs(("dO", stage), ("dW", stage), own, incoming)

    def _stored_input(self, stage: int) -> Iterator[Edges]:
        """Yield the edges of dW's input, which the stage before sends if F is on another device."""
        if self.has("dO", stage) and len({device for device, _ in self.lanes}) == 1:
            return
        for edges in self._pairs(("F", stage), ("dW", stage), None, "the stored input"):
            away = self.device[edges.source] != self.device[edges.target]
            if not self.has("dO", stage):
                yield edges
            if not away.any():
                continue
            microbatches = self.fields.microbatch[edges.target[away]]
            for source, size in self._providers("F", stage):
                for outputs in self.nodes("F", source):
                    yield Edges(outputs[microbatches], edges.target[away], size, edges.why)

    def _update(self, stage: int) -> Iterator[Edges]:
        kinds = ("dW", "comm", "U") if self.has("comm", stage) else ("dW", "U")
        for source, target in itertools.pairwise((kind, stage) for kind in kinds):
            if self.schedule.asynchronous:
                yield from self._pairs(source, target, None, "the weight gradient")
            else:
                why = "the gradient of every micro-batch"
                yield from self._all_to_all(self.there(*source), self.there(*target), why)
        for user, size in self._tied[stage]:
            yield from self._tied_gradients(user, stage, size)

    def _tied_gradients(self, user: int, stage: int, size: float) -> Iterator[Edges]:
        """Yield edges from each dW of a stage that uses another one's weights; their sums wait for it."""
        reader = "comm" if self.has("comm", stage) else "U"
        if self.schedule.asynchronous:
            for edges in self._pairs(("dW", user), (reader, stage), size, _TIED):
                yield replace(edges, tensor=1 + stage)
            return
        gradients = self.there("dW", user)
        for then in self.there(reader, stage):
            yield Edges(gradients, np.full(len(gradients), then), size, _TIED, tensor=1 + stage)

    def _tied_to_last(self, devices: Ints) -> Iterator[Edges]:
        """Yield what stands for tied gradients without updates: each goes to the last dW elsewhere."""
        for stage, users in enumerate(self._tied):
            for user, size in users:
                if devices[user] != devices[stage] and not self.has("U", stage):
                    gradients, last = self.there("dW", user), self.there("dW", stage)[-1:]
                    yield Edges(gradients, np.repeat(last, len(gradients)), size, _TIED, tensor=1 + stage)

    def _next_step(self, stage: int) -> Iterator[Edges]:
        if not (self.schedule.asynchronous or self.schedule.barrier):
            why = "the weights of the step before"
            yield from self._all_to_all(self._last(stage), self.there("F", stage), why, steps=1)

    def _barrier(self) -> Iterator[Edges]:
        """Yield edges from every task that changes weights to all forwards of the next step."""
        last = np.concatenate([self._last(stage) for stage in range(self.stages)])
        forward = np.concatenate([self.there("F", stage) for stage in range(self.stages)])
        yield from self._all_to_all(last, forward, "the barrier between steps", steps=1)

    def _last(self, stage: int) -> Ints:
        """Return the tasks of a stage that change weights, or the last ones before that."""
        return self.there(next((kind for kind in ("U", "comm") if self.has(kind, stage)), "dW"), stage)

    def _after(self) -> Iterator[Edges]:
        for task, other, steps in self.schedule.after:
            places = [np.flatnonzero(self.codes == t.code()) for t in (other, task)]
            for name, place in zip((other, task), places, strict=True):
                if not len(place):
                    raise ScheduleError(f"after {task}: {other}: there is no {name} in the schedule")
            # The other one may run in a later step: this task of step t waits for it, see the simulator.
            yield Edges(places[0], places[1], None, f"after {other}", -steps)

    def _providers(self, kind: str, stage: int) -> Iterator[tuple[int, float]]:
        """Yield the stages from which a stage reads; a stage without F passes on its own sources."""
        for source, size in self._stage_inputs[stage]:
            if self.has(kind, source):
                yield source, size
            else:
                yield from self._providers(kind, source)

    @cached_property
    def _readers(self) -> list[list[tuple[int, float]]]:
        readers: list[list[tuple[int, float]]] = [[] for _ in range(self.stages)]
        for stage, inputs in enumerate(self._stage_inputs):
            for source, size in inputs:
                readers[source].append((stage, size))
        return readers

    def _gradient_sources(self, stage: int) -> Iterator[tuple[str, int, float]]:
        """Yield the tasks that send this stage its output gradient: (kind, stage, bytes)."""
        for reader, size in self._readers[stage]:
            if not self.has("dO", reader):
                yield from self._gradient_sources(reader)
            elif self.schedule.fused_backward and self.has("dW", reader):
                yield "dW", reader, size
            else:
                yield "dO", reader, size

    def _pairs(
        self, source: tuple[str, int], target: tuple[str, int], size: float | None, why: str
    ) -> Iterator[Edges]:
        """Yield edges for each micro-batch from every part, which sends its share, to every part."""
        shares = self.schedule.parts.get(source, ())
        for part, first in enumerate(self.nodes(*source)):
            sent = size * shares[part] if size is not None and part < len(shares) else size
            for then in self.nodes(*target):
                both = (first >= 0) & (then >= 0)
                if both.any():
                    yield Edges(first[both], then[both], sent, why)

    def _all_to_all(self, sources: Ints, targets: Ints, why: str, steps: int = 0) -> Iterator[Edges]:
        """Yield edges from all tasks to all, without those that a lane's order implies."""
        if not len(sources) or not len(targets):
            return
        sources = self._one_of_each_lane(sources, last=True)
        targets = self._one_of_each_lane(targets, last=False)
        pairs = np.repeat(sources, len(targets)), np.tile(targets, len(sources))
        yield Edges(*pairs, None, why, steps)

    def _one_of_each_lane(self, nodes: Ints, last: bool) -> Ints:
        kept = [nodes[:0]]
        for lane in np.unique(self.lane[nodes]):
            there = nodes[self.lane[nodes] == lane]
            end = there.max() if last else there.min()
            kept.append(there if self.by_priority[lane] else there[there == end])
        return np.concatenate(kept)


def stage_sums(schedule: Schedule, layers: Layers, cost: str, stages: int) -> Floats:
    """Return a cost of each stage's layers: seconds or bytes, of one micro-batch."""
    costs = [getattr(layer, cost) for layer in layers]
    return np.array([sum(costs[i] for i in schedule.layers_of(stage)) for stage in range(stages)])


def stage_inputs(schedule: Schedule, layers: Layers | None, stages: int) -> list[list[tuple[int, float]]]:
    """Return for each stage the stages that it reads, and how many bytes from each."""
    if layers is None:
        return [[(stage - 1, 0.0)] if stage else [] for stage in range(stages)]
    stage_of = {layer: stage for stage in range(stages) for layer in schedule.layers_of(stage)}
    inputs: list[list[tuple[int, float]]] = []
    for stage in range(stages):
        sizes: dict[int, dict[int, float]] = {}
        for layer in schedule.layers_of(stage):
            for source in layer_inputs(tuple(layers), layer) if layer < len(layers) else ():
                if stage_of[source] != stage:
                    sizes.setdefault(stage_of[source], {})[source] = layers[source].output_bytes
        inputs.append([(source, float(sum(by.values()))) for source, by in sorted(sizes.items())])
    return inputs


def tied_stages(layers: Layers, stage_of: Sequence[int] | dict[int, int]) -> dict[int, dict[int, float]]:
    """Return for each stage those lower ones whose weights it uses, and the bytes of their gradients."""
    tied: dict[int, dict[int, float]] = defaultdict(dict)
    for number, layer in enumerate(layers):
        for source, size in layer.tied:
            user, owner = stage_of[number], stage_of[source]
            if user != owner:
                tied[user][owner] = tied[user].get(owner, 0.0) + size
    return tied


def _tied_to(schedule: Schedule, layers: Layers | None, stages: int) -> list[list[tuple[int, float]]]:
    """Return for each stage those that use its weights, and the bytes that each sends."""
    users: list[list[tuple[int, float]]] = [[] for _ in range(stages)]
    # On one device nothing is sent, and of workers each has all weights.
    sends = schedule.mode in ("pipeline", "layerpipe")
    if sends and layers is not None and any(layer.tied for layer in layers):
        stage_of = {layer: stage for stage in range(stages) for layer in schedule.layers_of(stage)}
        for user, owners in tied_stages(layers[: len(stage_of)], stage_of).items():
            for owner, size in owners.items():
                users[owner].append((user, size))
    return users


def _merged(edges: Iterable[Edges]) -> list[Edges]:
    """Merge edges of equal reason, size, step distance and tensor: thousands of stages give a few arrays."""
    groups: dict[tuple[str, float | None, int, int], list[tuple[Ints, Ints]]] = {}
    for edge in edges:
        key = edge.why, edge.message_bytes, edge.steps, edge.tensor
        groups.setdefault(key, []).append((edge.source, edge.target))
    merged = []
    for (why, size, steps, tensor), pairs in groups.items():
        source, target = (np.concatenate(nodes) for nodes in zip(*pairs, strict=True))
        merged.append(Edges(source, target, size, why, steps, tensor))
    return merged
