"""The order of a processor's tasks within a round: F, dO, dW, one after the other.

A round's tasks belong to different batches and wait for nothing of each other: without an order all would
run at once and take each other's caches.  What other processors wait for, F and dO, comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.node_input import split_input
from grappler_passes.passes.base import copy_of
from tf_ooo.errors import GraphError
from tf_ooo.modes.layerpipe.stages import HIGH
from tf_ooo.planning.model.schedule import Task
from tf_ooo.rewriting.ordering import firsts_of, lasts_of, order_lane

_NAME = "tf_ooo_turn"
# Of those that are given there is no op to wait for.
_NO_WORK = ("Const", "NoOp", "Placeholder")
_LANE = tuple(Task(kind, 0) for kind in ("F", "dO", "dW"))


@dataclass(frozen=True)
class Turns:
    """A round in order.

    Attributes:
        graph_def: its ops.
        before: ``{op: control input}`` of what begins a processor's round, for when a round is before it.
        ends: ``{control input: tensor}``: what then stands for it, of the round before.
    """

    graph_def: Any
    before: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)

    def following(self, given: Collection[str]) -> Any:
        """The graph for a round that has another before it, which gives these control inputs."""
        if not given:
            return self.graph_def
        made = copy_of(self.graph_def)
        for node in made.node:
            if self.before.get(node.name) in given:
                node.input.append(self.before[node.name])
        return made


def in_turns(graph_def: Any, where: Mapping[str, tuple[str, int]], device_of: Mapping[str, str]) -> Turns:
    """Orders a round; no order where a task waits for another processor's of the same round, in a circle.

    Args:
        graph_def: its ops; inputs that name none of them are given.
        where: ``{op: (kind, layer)}``.
        device_of: the ops' devices.
    """
    index = _index(graph_def)
    tasks = _tasks(index, where, device_of)
    reach = index.ancestor_bits(index.order, {})
    made = copy_of(graph_def)
    controls: dict[str, list[str]] = {}
    before: dict[str, str] = {}
    ends: dict[str, str] = {}
    for number, device in enumerate(sorted(set(device_of.values()))):
        if device not in tasks:
            continue
        ops, name = tasks[device], f"{_NAME}_{number}"
        lane = [task for task in _LANE if task in ops]
        order = order_lane(index, lane, ops, reach, f"{name}_join")
        before |= {index.names[i]: f"^{name}_before" for i in firsts_of(index, ops[lane[0]], reach)}
        ends[f"^{name}_before"] = f"{name}_end:0"
        last = [(index.names[i], f"{name}_end") for i in lasts_of(index, ops[lane[-1]], reach)]
        for join in order.joins:
            made.node.add(name=join, op="NoOp", device=device)
        _add_end(made, f"{name}_end", device)
        for earlier, later in [*order.edges, *last]:
            controls.setdefault(later, []).append(f"^{earlier}")
    for node in made.node:
        node.input.extend(controls.get(node.name, ()))
    try:
        _index(made)
    except GraphError:
        return Turns(graph_def)
    return Turns(made, before, ends)


def _tasks(
    index: GraphIndex, where: Mapping[str, tuple[str, int]], device_of: Mapping[str, str]
) -> dict[str, dict[Task, list[int]]]:
    """The ops of each device's tasks, of all layers together, in topological order."""
    tasks: dict[str, dict[Task, list[int]]] = {}
    for i in index.order:
        name = index.names[i]
        kind = where[name][0] if name in where else ""
        task = Task("dO" if kind == HIGH else kind, 0) if kind else None
        if task in _LANE and name in device_of and index.ops[i] not in _NO_WORK:
            tasks.setdefault(device_of[name], {}).setdefault(task, []).append(i)
    return tasks


def _add_end(graph_def: Any, name: str, device: str) -> None:
    """A tensor that is there when the processor's last task is done."""
    import tensorflow as tf

    node = graph_def.node.add(name=name, op="Const", device=device)
    node.attr["dtype"].type = tf.int32.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0))


def _index(graph_def: Any) -> GraphIndex:
    """With placeholders for what is given."""
    names = {node.name for node in graph_def.node}
    read = {split_input(text)[0] for node in graph_def.node for text in node.input}
    made = copy_of(graph_def)
    for name in sorted(read - names):
        made.node.add(name=name, op="Placeholder")
    return GraphIndex(made)
