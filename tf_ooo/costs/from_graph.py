"""Sums op seconds to the costs of a classified graph's layers, as docs/design/costs.md says."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grappler_passes.graph.training_graph import (
    LayerTask,
    Op,
    OpKind,
    Tasks,
    TrainingGraph,
    backward_tasks,
    forward_layers,
    ops_by_task,
    owns_memory,
)
from tf_ooo.costs.devices import DeviceModel, Work
from tf_ooo.costs.layer_costs import SECONDS, LayerCosts
from tf_ooo.errors import CostError
from tf_ooo.units import Places, count_text

_ASSUMED_ELEMENT_BYTES = 4
_SUMS = ("AddN", "AddV2", "Add")
_BACKWARD = (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD)
# A task keeps at least this many cores busy: rounding must not make it none.
_LEAST_CORES = 0.01


@dataclass(frozen=True)
class GraphCosts:
    """Holds the costs of a graph's layers, seconds by kind of ops without layer, and assumed sizes."""

    layers: tuple[LayerCosts, ...]
    left_out_s: Mapping[str, float]
    notes: tuple[str, ...] = ()


class _Sizes:
    """Holds bytes by layer, collected in one walk over the graph."""

    def __init__(self) -> None:
        self.kept, self.weight_grad, self.output = (defaultdict[int, float](float) for _ in range(3))
        self.unknown: list[str] = []


def graph_costs(
    graph: TrainingGraph,
    seconds: Mapping[str, float],
    tasks: Tasks | None = None,
    forward: Mapping[str, int] | None = None,
) -> GraphCosts:
    """Sum op seconds to layers.  CostError names an op whose seconds are missing or not a time."""
    tasks = backward_tasks(graph).ops if tasks is None else tasks
    forward = forward_layers(graph) if forward is None else forward
    by_task = ops_by_task(graph, tasks, forward)
    of_layers = {name for names in by_task.values() for name in names}
    sizes = _sizes(graph, tasks, forward)
    notes: list[str] = []
    if sizes.unknown:
        shown = Places.of_tasks(graph, by_task).listed(sizes.unknown)
        notes.append(f"{count_text(len(sizes.unknown), 'tensor')} of unknown size, taken as 0 bytes: {shown}")
    inputs = _layer_inputs(graph, forward)
    weights = variable_bytes(graph, notes)
    layers = []
    for layer in graph.layers:
        index = layer.index
        weight_grad = sizes.weight_grad[index]
        kinds_s: dict[str, Any] = {
            name: _total_s(graph, by_task.get((kind, index), ()), seconds) for kind, name in SECONDS.items()
        }
        layers.append(
            LayerCosts(
                **kinds_s,
                # dW also needs the gradient that dO made; if that is larger than what dO frees, it counts
                # from the start: better too much memory than too little.
                activation_bytes=max(sizes.kept[index], weight_grad),
                forward_bytes=sizes.kept[index] if weight_grad > sizes.kept[index] else None,
                weight_bytes=weights[index][0],
                output_bytes=sizes.output[index],
                weight_grad_bytes=weight_grad,
                inputs=inputs[index],
                name=layer.name,
                slot_bytes=weights[index][1],
                summand_bytes=_summand_bytes(graph, by_task.get(("dW", index), ())),
            )
        )
    left_s: defaultdict[str, float] = defaultdict(float)
    for name, op in graph.ops.items():
        if name not in of_layers and seconds.get(name, 0.0) > 0:
            left_s[op.kind.value] += seconds[name]
    return GraphCosts(tuple(layers), dict(left_s), tuple(notes))


def places(
    graph: TrainingGraph, tasks: Tasks | None = None, forward: Mapping[str, int] | None = None
) -> Places:
    """Say in words which layer each op belongs to; ``tasks`` and ``forward`` if they are already known."""
    return Places.of_tasks(graph, ops_by_task(graph, tasks, forward))


def unknown_activations(graph: TrainingGraph, tasks: Tasks, forward: Mapping[str, int]) -> tuple[str, ...]:
    """Return the tensors that :func:`graph_costs` counts as 0 bytes, because their sizes are unknown."""
    return tuple(_sizes(graph, tasks, forward).unknown)


def _total_s(graph: TrainingGraph, names: Iterable[str], seconds: Mapping[str, float]) -> float:
    total_s = 0.0
    for name in names:
        if name not in seconds:
            if graph.ops[name].type == "Const":
                continue
            raise CostError(f"op {name!r} ({graph.ops[name].type}): its seconds are missing")
        if not 0 <= seconds[name] < math.inf:
            raise CostError(f"op {name!r}: seconds must be finite and >= 0, got {seconds[name]!r}")
        total_s += seconds[name]
    return total_s


def _summand_bytes(graph: TrainingGraph, weight_grads: Iterable[str]) -> float:
    """Return the bytes of a weight gradient's summands (one per time step of an unrolled RNN)."""
    own = set(weight_grads)
    sums = (graph.ops[name] for name in own if graph.ops[name].type in _SUMS)
    parts = ([producer for producer, _ in add.inputs if producer in own] for add in sums)
    sizes = (sum(graph.ops[name].output_bytes or 0 for name in some) for some in parts if len(some) > 1)
    return float(max(sizes, default=0))


def _sizes(graph: TrainingGraph, tasks: Tasks, forward: Mapping[str, int]) -> _Sizes:
    """Return activations, each counted once: where dW reads it, else at the lowest dO reading it."""
    task_of = {name: task for task, names in tasks.items() for name in names}
    readers: dict[str, set[LayerTask]] = {}
    outside: set[str] = set()
    for name, op in graph.ops.items():
        for tensor in _tensors_read(graph, op):
            if op.kind in _BACKWARD and name in task_of:
                readers.setdefault(tensor, set()).add(task_of[name])
            elif name in forward and tensor in forward and forward[tensor] != forward[name]:
                outside.add(tensor)
    sizes = _Sizes()
    for tensor, reading in readers.items():
        weight_readers = sorted(stage for kind, stage in reading if kind == "dW")
        size = graph.ops[tensor].output_bytes
        if graph.ops[tensor].kind not in (OpKind.FORWARD, OpKind.OUTPUT_GRAD):
            continue
        if size is None:
            sizes.unknown.append(tensor)
            continue
        if tensor in forward:
            sizes.kept[(weight_readers or sorted(stage for _, stage in reading))[0]] += size
        if weight_readers:
            sizes.weight_grad[weight_readers[0]] += size
    for tensor in outside:
        sizes.output[forward[tensor]] += graph.ops[tensor].output_bytes or 0
    return sizes


def _tensors_read(graph: TrainingGraph, op: Op) -> Iterator[str]:
    """Yield the ops whose memory an op reads, seen through views, without weights and constants."""
    for producer in {producer for producer, _ in op.inputs}:
        owner = producer
        while owner in graph.ops and not owns_memory(graph.ops[owner]):
            above = graph.ops[owner].inputs
            owner = above[0][0] if above else ""
        if owner in graph.ops:
            yield owner


def _layer_inputs(graph: TrainingGraph, forward: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return for each layer the lower layers whose tensors its forward ops read, also by skip connections."""
    inputs: list[set[int]] = [set() for _ in graph.layers]
    for name, reader in forward.items():
        for tensor in _tensors_read(graph, graph.ops[name]):
            if tensor in forward and forward[tensor] < reader:
                inputs[reader].add(forward[tensor])
    return [tuple(sorted(indices)) for indices in inputs]


def variable_bytes(graph: TrainingGraph, notes: list[str]) -> list[tuple[float, float]]:
    """Return (bytes of weights, bytes of slots) for each layer; a slot is as large as its weight."""
    read = {
        op.inputs[0][0]: op.output_bytes
        for op in graph.ops.values()
        if op.type == "ReadVariableOp" and op.output_bytes is not None
    }
    variables = {variable.name: variable for variable in graph.variables}
    out = []
    for layer in graph.layers:
        weight_bytes, slot_bytes = 0.0, 0.0
        for variable in (variables[name] for name in layer.variables):
            size: float | None = read.get(variable.handle)
            if size is None:
                size = float(math.prod(variable.shape or (0,)) * _ASSUMED_ELEMENT_BYTES)
                how = f"{_ASSUMED_ELEMENT_BYTES} bytes an element" if variable.shape else "0 bytes"
                notes.append(f"the size of variable {variable.name!r} is not known: {how} assumed")
            weight_bytes += size
            slot_bytes += size * len(variable.slots)
        out.append((weight_bytes, slot_bytes))
    return out


def with_cores(
    layers: Sequence[LayerCosts],
    graph: TrainingGraph,
    seconds: Mapping[str, float],
    core_s: Mapping[str, float],
    cores: int,
    tasks: Tasks,
    forward: Mapping[str, int],
) -> tuple[LayerCosts, ...]:
    """Return the layers with the shares of a machine's cores that their F, dO and dW keep busy.

    ``core_s`` holds for each op the seconds of all cores together.  An op without them counts one core, and
    so does a task that was not seen.
    """
    by_task = ops_by_task(graph, tasks, forward)

    def share(kind: str, index: int) -> float:
        names = by_task.get((kind, index), ())
        all_s = sum(seconds.get(name, 0.0) for name in names)
        busy_s = sum(core_s.get(name, seconds.get(name, 0.0)) for name in names)
        return min(1.0, max(busy_s / all_s, _LEAST_CORES) / cores) if all_s else 1 / cores

    return _with_shares(layers, share)


def with_occupancy(
    layers: Sequence[LayerCosts],
    graph: TrainingGraph,
    work: Mapping[str, Work],
    device: DeviceModel,
    tasks: Tasks | None = None,
) -> tuple[LayerCosts, ...]:
    """Return the layers with the shares of the device that F, dO and dW keep busy; seconds stay."""
    if len(layers) != len(graph.layers):
        raise CostError(f"{len(layers)} layers have costs, the graph has {len(graph.layers)}")
    by_task = ops_by_task(graph, tasks)

    def share(kind: str, index: int) -> float:
        kernels = [work[n] for n in by_task.get((kind, index), ()) if n in work]
        return device.occupancy(kernel for kernel in kernels if kernel.flop or kernel.moved_bytes)

    return _with_shares(layers, share)


def _with_shares(layers: Sequence[LayerCosts], share: Callable[[str, int], float]) -> tuple[LayerCosts, ...]:
    return tuple(
        replace(layer, occupancy=(share("F", index), share("dO", index), share("dW", index)))
        for index, layer in enumerate(layers)
    )
