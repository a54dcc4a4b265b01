"""Gives each task its own copy of the views that it reads: XLA returns a view as a copy of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.errors import VerifyError
from grappler_passes.graph.node_input import control_inputs, data_inputs, split_input, tensor
from tf_ooo.rewriting.task_calls import TaskKey

# They rename what they are given; all else that they read is constant.
_VIEWS = frozenset({"ExpandDims", "Identity", "Reshape", "Squeeze"})
_SUFFIX = "/tf_ooo_view"


@dataclass(frozen=True)
class OwnViews:
    """A step in which no task reads a view of another one, but what that is a view of.

    ``copies``: each with the view that it is a copy of; tasks and general names are those of all ops.
    """

    graph_def: graph_pb2.GraphDef
    tasks: Mapping[str, TaskKey]
    general: Mapping[str, str]
    copies: Mapping[str, str]


def own_views(
    before: graph_pb2.GraphDef, tasks: Mapping[str, TaskKey], general: Mapping[str, str]
) -> OwnViews:
    """Return the step with the copies.  ``tasks``: of ops, by name; ``general``: as of CompileTasksPass."""
    graph_def = graph_protos.copy_of(before)
    nodes = {node.name: node for node in before.node}
    views = {name for name, node in nodes.items() if name in tasks and _is_view(node, nodes)}
    copies: dict[str, str] = {}
    tasks, general = dict(tasks), dict(general)

    def own(text: str, key: TaskKey, device: str) -> str:
        """Return the text for a tensor as this task reads it."""
        name, port = split_input(text)
        if name not in views or (tasks[name], nodes[name].device) == (key, device):
            return text
        copy = f"{name}{_SUFFIX}/{key.of_all}_{key.microbatch}"
        if copy not in copies:
            copies[copy], tasks[copy] = name, key
            general[copy] = f"{general.get(name, name)}{_SUFFIX}/{key.of_all}"
            made = graph_def.node.add()
            made.CopyFrom(nodes[name])
            made.name, made.device = copy, device
            made.input[:] = [own(read, key, device) for read in data_inputs(nodes[name])]
        return tensor(copy, port)

    for node in list(graph_def.node):
        key = tasks.get(node.name)
        if key is not None and any(split_input(text)[0] in views for text in node.input):
            node.input[:] = [own(text, key, node.device) for text in data_inputs(node)] + control_inputs(node)
    views_read = OwnViews(graph_def, tasks, general, copies)
    _check(before, views_read)
    return views_read


def _is_view(node: node_def_pb2.NodeDef, nodes: Mapping[str, node_def_pb2.NodeDef]) -> bool:
    others = (nodes[split_input(text)[0]].op for text in data_inputs(node)[1:])
    return node.op in _VIEWS and all(op == "Const" for op in others)


def _check(before: graph_pb2.GraphDef, made: OwnViews) -> None:
    """Raise VerifyError unless each op reads what it read, seen through the copies, and those are copies."""
    was = {node.name: node for node in before.node}
    if len(made.graph_def.node) != len(was) + len(made.copies):
        raise VerifyError("?", "new nodes", "there are others than copies of views")
    for node in made.graph_def.node:
        original = was[made.copies.get(node.name, node.name)]
        if node == original:
            continue
        read = [(made.copies.get(name, name), port) for name, port in map(split_input, data_inputs(node))]
        if read != list(map(split_input, data_inputs(original))):
            raise VerifyError(node.name, "data inputs", "reads other tensors")
        if node.name not in made.copies and control_inputs(node) != control_inputs(original):
            raise VerifyError(node.name, "waits", "waits for others")
        if (node.op, node.attr) != (original.op, original.attr):
            raise VerifyError(node.name, "attributes", f"is not what {original.name!r} is")
