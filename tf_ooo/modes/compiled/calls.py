"""Turns a schedule into calls: which region goes to which stream, and which tensors each call waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from grappler_passes.graph.training_graph import OpKind, TrainingGraph, forward_layers
from tf_ooo.compat.xla import MLIR_TYPES
from tf_ooo.modes.compiled.outline import CALL_PREFIX, Call
from tf_ooo.modes.compiled.regions import FlatStep, GraphDef, Port, Region
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.rewriting.lowering import TaskOps


@dataclass(frozen=True)
class Parts:
    """Holds one step of the graph, classified; ``stays`` says by layer why its dW has no regions."""

    number: int
    graph: TrainingGraph
    tasks: TaskOps
    regions: Mapping[int, list[Region]]
    stays: Mapping[str, str]

    @cached_property
    def forward(self) -> Mapping[int, Sequence[str]]:
        by_layer: dict[int, list[str]] = {}
        for name, layer in forward_layers(self.graph).items():
            by_layer.setdefault(layer, []).append(name)
        return by_layer


@dataclass(frozen=True)
class StepToPlan:
    """Holds the first of the graph's steps, from which a plan is made.

    ``lowered`` is that step's flat graph with loops lowered and static shapes.
    """

    step: FlatStep
    parts: Parts
    lowered: GraphDef

    @property
    def movable(self) -> frozenset[int]:
        """Return the layers whose dW can leave the main stream."""
        return frozenset(self.parts.regions)


def make_calls(step: FlatStep, steps: Sequence[Parts], schedule: Schedule) -> list[list[Call]]:
    """Make for each step the calls of all dW in side lanes, in the lanes' order.

    A dW scheduled beside the next step's forward waits for it, or for the end of this step's backward pass.
    In the last step, and where that forward needs the dW, it starts as soon as it can.
    """
    by_step = []
    for parts, following in zip(steps, [*steps[1:], None], strict=True):
        prefix = f"{CALL_PREFIX}_s{parts.number}" if len(steps) > 1 else CALL_PREFIX
        placed = [
            (task, number, region, stream)
            for (_, stream), lane in schedule.lanes.items()
            for task in lane
            if stream and task.kind == "dW"
            for number, region in enumerate(parts.regions.get(task.stage, ()))
        ]
        regions = [region for _, _, region, _ in placed]
        waves = waves_of(step, regions)
        pins = _Pins(step, schedule, parts, following, list(zip(waves, regions, strict=True)))
        calls: list[Call] = []
        for wave, (task, number, region, stream) in zip(waves, placed, strict=True):
            after, delayed = pins.of(task, region, wave)
            calls.append(Call(f"{prefix}_{task.stage}_{number}", region, stream, after, delayed, wave))
        by_step.append(calls)
    return by_step


def waves_of(step: FlatStep, regions: Sequence[Region]) -> list[int]:
    """Return the length of the chain of other regions whose results each region needs, mostly 0.

    A step whose second part reads weights that its first part has updated has two waves.
    """
    index, waves = step.index, [0] * len(regions)
    inside = {index.of(name): number for number, region in enumerate(regions) for name in region.own}
    for _ in regions:  # a region's results are there when all of its inputs are: known in the next round
        before, depth = list(waves), [0] * len(index)
        for i in index.order:
            mine = inside.get(i)
            above = ((p, inside.get(p)) for p in index.preds(i))
            deepest = max(
                (depth[p] + (theirs is not None and theirs != mine) for p, theirs in above), default=0
            )
            if mine is not None:
                waves[mine] = deepest = max(waves[mine], deepest)
            depth[i] = deepest
        if waves == before:
            break
    return waves


class _Pins:
    """Finds the tensors that the schedule's dW wait for; ``regions`` are all that move, by wave."""

    def __init__(
        self,
        step: FlatStep,
        schedule: Schedule,
        parts: Parts,
        following: Parts | None,
        regions: Sequence[tuple[int, Region]],
    ) -> None:
        self.step, self.parts, self.regions = step, parts, regions
        self._ahead = parts if following is None else following
        self._waits = {task: (other, steps) for task, other, steps in schedule.after}
        main = [task for (_, stream), lane in schedule.lanes.items() if not stream for task in lane]
        self._last = next((task for task in reversed(main) if task.kind == "dO"), None)
        self._delays = following is not None and not any(wave for wave, _ in regions)

    def of(self, task: Task, region: Region, wave: int) -> tuple[tuple[Port, ...], bool]:
        """Return (tensors to wait for, whether the dW is to run beside the next step's forward pass)."""
        other, steps = self._waits.get(task, (None, 0))
        # Behind the last dO there is nothing but that.
        delayed = self._delays and (steps == 1 or other == self._last)
        if other is None or steps > delayed:
            return (), False
        if not steps:
            graph, names = self.parts.graph, self.parts.tasks.ops.get(other, ())
        else:
            graph, names = self._ahead.graph, tuple(self._ahead.forward.get(other.stage, ()))
        ends = ends_of(self.step, graph, names)
        # Readers of what one call of a wave makes wait for all calls of that wave, but the delayed.
        together = [region] if delayed else [r for their, r in self.regions if their >= wave]
        needed = self.step.behind(name for r in together for name in r.own)
        if not ends or any(name in needed for name, _ in ends):
            return (), False
        return ends, delayed


def ends_of(step: FlatStep, graph: TrainingGraph, names: Sequence[str]) -> tuple[Port, ...]:
    """Return the tensors that exist once these ops are done: those that others read."""
    inside = set(names)
    ends: list[Port] = []
    for name in names:
        if not step.has(graph, name):
            continue
        read = {(reader, port) for reader, port in step.readers[name] if port >= 0}
        if any(reader in inside for reader, _ in read):
            continue
        ends += [(name, port) for port in sorted({port for _, port in read})]
    return tuple(port for port in ends if step.is_float(port) and step.known(port).dtype in MLIR_TYPES)


def last_of_main(step: FlatStep, graph: TrainingGraph, calls: Sequence[Call]) -> tuple[Port, ...]:
    """Return the tensors with which the main stream's backward pass ends: nothing in it reads them."""
    behind = step.behind(name for call in calls for name in call.region.own)
    backward = (name for name, op in graph.ops.items() if op.kind in (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD))
    return ends_of(step, graph, [n for n in backward if n not in behind and step.has(graph, n)])
