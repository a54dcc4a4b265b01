"""A training step in tasks: the ops of each layer's F, dO, dW and U."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from grappler_passes.graph.training_graph import Op, OpKind, TrainingGraph

# A task's kind, such as ``"dO"``, and its layer.
LayerTask = tuple[str, int]
Tasks = Mapping[LayerTask, Sequence[str]]
_FORWARD = (OpKind.FORWARD, OpKind.OTHER)


@dataclass(frozen=True)
class BackwardTasks:
    """The ops of each task in topological order, and the layers as the backward pass reaches them."""

    ops: Mapping[LayerTask, tuple[str, ...]]
    layers: tuple[int, ...]


def backward_tasks(graph: TrainingGraph) -> BackwardTasks:
    """Cuts the backward pass into tasks; constants, which can be made at any time, belong to none.

    A layer's dO are the dO ops that its dW ops read, and those upstream that no layer nearer to the loss has.
    """
    place = {name: i for i, name in enumerate(graph.ops)}
    reads: dict[int, list[str]] = {}
    ops: dict[LayerTask, tuple[str, ...]] = {}
    for layer in graph.layers:
        weight_grads = [n for n in layer.weight_grad_ops if n in graph.ops and graph.ops[n].type != "Const"]
        producers = {producer for name in weight_grads for producer in graph.ops[name].producers}
        reads[layer.index] = [name for name in producers if _is_output_grad(graph, name)]
        if weight_grads:
            ops["dW", layer.index] = tuple(weight_grads)
    # Equal places (two layers that read one dO): the higher layer is the one nearer to the loss.
    reached = sorted(reads, key=lambda i: (max((place[name] for name in reads[i]), default=-1), -i))
    claimed: set[str] = set()
    for index in reached:
        own = _upstream(graph, reads[index], claimed, place)
        if own:
            ops["dO", index] = tuple(own)
    return BackwardTasks(ops, tuple(reached))


def _is_output_grad(graph: TrainingGraph, name: str) -> bool:
    return name in graph.ops and graph.ops[name].kind is OpKind.OUTPUT_GRAD


def _upstream(
    graph: TrainingGraph, start: Iterable[str], claimed: set[str], place: Mapping[str, int]
) -> list[str]:
    """The dO ops that ``start`` depends on and that are not claimed, in topological order; claims them."""
    own, stack = [], [name for name in start if name not in claimed]
    while stack:
        name = stack.pop()
        if name in claimed:
            continue
        claimed.add(name)
        if graph.ops[name].type != "Const":
            own.append(name)
        stack += [p for p in producers_of(graph.ops[name]) if _is_output_grad(graph, p) and p not in claimed]
    return sorted(own, key=place.__getitem__)


def producers_of(op: Op) -> list[str]:
    """Return the ops that it waits for, by data and by control edges."""
    return [*op.producers, *op.control_inputs]


def forward_layers(
    graph: TrainingGraph,
    together: Sequence[Collection[str]] = (),
    joins: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """Return the layer of each forward op: the highest whose weights its result depends on.

    One that depends on none (a dropout mask) counts for the lowest layer that reads it, and one that none
    reads (a metric of the labels) for the last.  ``together``: ops of one layer: loops, with edges that lead
    back.  ``joins``: ops that begin a layer without weights.
    """
    known = layers_of_weights_and_readers(graph, together, joins)
    last = len(graph.layers) - 1
    return {name: known.get(name, last) for name in graph.of_kind(OpKind.FORWARD)}


def layers_of_weights_and_readers(
    graph: TrainingGraph,
    together: Sequence[Collection[str]] = (),
    joins: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """:func:`forward_layers` without those that depend on no weights and are read by no layer."""
    at_least = {
        v.handle: layer.index for layer in graph.layers for v in graph.variables if v.name in layer.variables
    } | dict(joins)
    latest = _latest_weights(graph, at_least)
    while raised := _raised(graph, latest, together):
        at_least |= raised
        latest = _latest_weights(graph, at_least)
    return _earliest_reader(graph, latest) | latest


def _latest_weights(graph: TrainingGraph, at_least: Mapping[str, int]) -> dict[str, int]:
    """The highest layer that each forward op's result depends on; some ops and weights are known to."""
    latest: dict[str, int] = {}
    for name, op in graph.ops.items():
        if op.kind in _FORWARD or name in at_least:
            known = [latest[producer] for producer, _ in op.inputs if producer in latest]
            known += [at_least[name]] if name in at_least else []
            if known:
                latest[name] = max(known)
    return latest


def _raised(
    graph: TrainingGraph, latest: Mapping[str, int], together: Sequence[Collection[str]]
) -> dict[str, int]:
    """Return the layers of groups in which not all ops have the highest; empty: all have."""
    raised: dict[str, int] = {}
    for names in together:
        forward = [name for name in names if graph.ops[name].kind in _FORWARD]
        highest = max((latest[name] for name in forward if name in latest), default=None)
        if highest is not None and any(latest.get(name) != highest for name in forward):
            raised |= dict.fromkeys(forward, highest)
    return raised


def _earliest_reader(graph: TrainingGraph, latest: Mapping[str, int]) -> dict[str, int]:
    """Return, for ops that depend on no weights, the lowest layer among the forward ops that read them."""
    earliest: dict[str, int] = {}
    for name, op in reversed(list(graph.ops.items())):
        reader = latest.get(name, earliest.get(name)) if op.kind is OpKind.FORWARD else None
        if reader is not None:
            for producer, _ in op.inputs:
                if producer not in latest:
                    earliest[producer] = min(earliest.get(producer, reader), reader)
    return earliest


def ops_by_task(
    graph: TrainingGraph, tasks: Tasks | None = None, forward: Mapping[str, int] | None = None
) -> dict[LayerTask, list[str]]:
    """The ops of each (kind, layer); a kernel that computes both (``FusedBatchNormGradV3``) counts for dO."""
    tasks = backward_tasks(graph).ops if tasks is None else tasks
    forward = forward_layers(graph) if forward is None else forward
    output_grads = {name for (kind, _), names in tasks.items() if kind == "dO" for name in names}
    by_task: dict[LayerTask, list[str]] = {
        (kind, index): [name for name in names if kind == "dO" or name not in output_grads]
        for (kind, index), names in tasks.items()
    }
    for layer in graph.layers:
        by_task["U", layer.index] = [name for name in layer.update_ops if name in graph.ops]
    for name, index in forward.items():
        by_task.setdefault(("F", index), []).append(name)
    return by_task
