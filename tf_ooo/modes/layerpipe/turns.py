"""Orders a processor's tasks within a round: F, dO, dW, one after the other.

A round's tasks belong to different batches and do not wait for each other: without an order all would run at
once and compete for caches.  F and dO, for which other processors wait, come first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tensorflow.core.framework import graph_pb2, types_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import split_input
from grappler_passes.errors import VerifyError
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.base import Pass, PassPipeline, PassResult, Relaxation, copy_of, relaxed_by
from grappler_passes.passes.verify import verify
from tf_ooo.modes.layerpipe.rounds import HIGH
from tf_ooo.modes.layerpipe.traced import Where
from tf_ooo.planning.model.schedule import Task
from tf_ooo.rewriting.ordering import firsts_of, lasts_of, order_lane

_NAME = "tf_ooo_turn"
# A given input has no op to wait for.
_NO_WORK = ("Const", "NoOp", "Placeholder")
_LANE = tuple(Task(kind, 0) for kind in ("F", "dO", "dW"))


@dataclass(frozen=True)
class Turns:
    """Holds a round whose tasks are in order.

    ``before``: ``{op: control input}`` for the first ops of each processor, if another round comes before.
    ``ends``: ``{control input: tensor}``, the tensor of the round before for which it stands.
    """

    graph_def: graph_pb2.GraphDef
    before: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)

    def copy(self, number: int, given: Collection[str], folder: Path | None) -> graph_pb2.GraphDef:
        """Return the graph for one of several rounds, behind a round that gives these control inputs."""
        controls = {name: (control,) for name, control in self.before.items() if control in given}
        return verified(self.graph_def, folder, WaitsPass({}, {}, controls), ReseedPass(number))


def in_turns(
    graph_def: graph_pb2.GraphDef, where: Where, device_of: Mapping[str, str], folder: Path | None
) -> Turns:
    """Order a round; it stays unordered if tasks of two processors wait for each other in a cycle.

    Inputs that name none of the ops in the graph are given.
    """
    index = GraphIndex(with_given(graph_def))
    tasks = _tasks(index, where, device_of)
    joins: dict[str, str] = {}
    controls: dict[str, list[str]] = {}
    before: dict[str, str] = {}
    ends: dict[str, str] = {}
    for number, device in enumerate(sorted(set(device_of.values()))):
        if device not in tasks:
            continue
        ops, name = tasks[device], f"{_NAME}_{number}"
        lane = [task for task in _LANE if task in ops]
        order = order_lane(index, lane, ops, f"{name}_join")
        before |= {index.names[i]: f"^{name}_before" for i in firsts_of(index, ops[lane[0]])}
        ends[f"{name}_end"] = device
        last = [(index.names[i], f"{name}_end") for i in lasts_of(index, ops[lane[-1]])]
        joins |= dict.fromkeys(order.joins, device)
        for earlier, later in [*order.edges, *last]:
            controls.setdefault(later, []).append(f"^{earlier}")
    waits = WaitsPass(joins, ends, controls)
    try:
        ordered = verified(graph_def, folder, waits, ran=1)
    except VerifyError as error:
        if error.rule != "acyclic":
            raise
        return Turns(graph_def)
    return Turns(ordered, before, {f"^{end.removesuffix('end')}before": f"{end}:0" for end in ends})


def verified(
    graph_def: graph_pb2.GraphDef, folder: Path | None, *changes: Pass, ran: int = 0
) -> graph_pb2.GraphDef:
    """Return a round after passes.  VerifyError: they change more than they declare."""
    result = PassPipeline(changes, folder, ran)(graph_def)
    if result.modified:
        allowed = relaxed_by(*changes) | {Relaxation.NEW_NODES}
        verify(with_given(graph_def), with_given(result.graph_def), replaced=result.replaced, relaxes=allowed)
    return result.graph_def


@dataclass(frozen=True)
class WaitsPass(Pass):
    """Has ops wait for others: adds control inputs, also to added ops, on these devices.

    ``joins`` only wait; ``ends`` are tensors that exist once a processor's last task is done.
    """

    joins: Mapping[str, str]
    ends: Mapping[str, str]
    controls: Mapping[str, Sequence[str]]
    name: ClassVar[str] = "waits"
    relaxes = frozenset({Relaxation.NEW_NODES, Relaxation.MORE_WAITS})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        if not (self.joins or self.ends or self.controls):
            return PassResult(graph_def, False)
        ordered = copy_of(graph_def)
        for name, device in self.joins.items():
            ordered.node.add(name=name, op="NoOp", device=device)
        for name, device in self.ends.items():
            end = ordered.node.add(name=name, op="Const", device=device)
            end.attr["dtype"].type = types_pb2.DT_INT32
            end.attr["value"].tensor.CopyFrom(graph_protos.tensor_proto(0))
        for node in ordered.node:
            node.input.extend(self.controls.get(node.name, ()))
        return PassResult(ordered, True)


@dataclass(frozen=True)
class ReseedPass(Pass):
    """Gives ops with a seed of their own (``tf.random.normal``) another seed in each copy of a step.

    Each copy of such an op begins its stream anew: with one seed, all copies would draw the same numbers.
    Stateless ops, which Keras 3 uses, read their seeds from variables.  ``number``: the copy's, from 1.
    """

    number: int
    name: ClassVar[str] = "reseed"
    relaxes = frozenset({Relaxation.REPLACED_NODES})

    def run(self, graph_def: graph_pb2.GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        copy = copy_of(graph_def)
        with_seeds = [node for node in copy.node if "seed" in node.attr and "seed2" in node.attr]
        # Two that are 0 mean any.
        seeded = [node for node in with_seeds if node.attr["seed"].i or node.attr["seed2"].i]
        for node in seeded:
            node.attr["seed2"].i += self.number
        if not seeded:
            return PassResult(graph_def, False)
        return PassResult(copy, True, replaced=frozenset(node.name for node in seeded))


def _tasks(index: GraphIndex, where: Where, device_of: Mapping[str, str]) -> dict[str, dict[Task, list[int]]]:
    """Return the ops of each device's tasks, of all layers together, in topological order."""
    tasks: dict[str, dict[Task, list[int]]] = {}
    for i in index.order:
        name = index.names[i]
        kind = where[name][0] if name in where else ""
        task = Task("dO" if kind == HIGH else kind, 0) if kind else None
        if task in _LANE and name in device_of and index.ops[i] not in _NO_WORK:
            tasks.setdefault(device_of[name], {}).setdefault(task, []).append(i)
    return tasks


def with_given(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return a round with placeholders for its given inputs."""
    names = {node.name for node in graph_def.node}
    read = {split_input(text)[0] for node in graph_def.node for text in node.input}
    whole = copy_of(graph_def)
    for name in sorted(read - names):
        whole.node.add(name=name, op="Placeholder")
    return whole
