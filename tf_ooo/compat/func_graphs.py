"""Graphs of functions: what they capture and call, marks on ops, graphs imported as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from grappler_passes.analysis.steps import SUM_ATTR, TURN_ATTR
from grappler_passes.compat import graph_protos
from tf_ooo.errors import BackendError


def captures_of(concrete: Any) -> list[tuple[Any, Any]]:
    """(tensor outside, placeholder inside).  Raises BackendError for what only a call could tell."""
    graph = concrete.graph
    if getattr(graph, "deferred_external_captures", None):
        raise BackendError("the step reads values that are only known when it is called (deferred captures)")
    return list(graph.captures)


def import_here(
    graph_def: graph_pb2.GraphDef, replaced: dict[str, Any], wanted: Sequence[str], name: str = ""
) -> list[Any]:
    """Imports the graph into the function that is being traced, below ``name``.

    ``replaced`` maps tensor names to tensors.
    """
    graph = tf.compat.v1.get_default_graph()
    inside = {name: graph.capture(t) if hasattr(graph, "capture") else t for name, t in replaced.items()}
    return list(tf.graph_util.import_graph_def(graph_def, inside, list(wanted), name=name))


def captured_here(concrete: Any) -> list[Any]:
    """Capture what a traced function captures in the one that is being traced, with its variables."""
    graph = tf.compat.v1.get_default_graph()
    for variable in concrete.graph.variables:
        graph.watch_variable(variable)
    return [graph.capture(tensor) for tensor in concrete.captured_inputs]


def made_again(op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
    """Return the results of an op of the same type and attributes, made here, of other inputs.

    Marks, and beside which op it is to stand, are left to where it is made.
    """
    own = {attribute.name for attribute in op.op_def.attr}
    attributes = {name: value for name, value in op.node_def.attr.items() if name in own}
    types = [result.dtype for result in op.outputs]
    again = op.graph.create_op(
        op.type, list(inputs), types, attrs=attributes, name=op.name.rpartition("/")[2]
    )
    return list(again.outputs)


def without_placeholders(graph_def: graph_pb2.GraphDef) -> Any:
    """Return the graph without its inputs, which whoever imports it provides."""
    return graph_protos.with_nodes(graph_def, (n for n in graph_def.node if n.op != "Placeholder"))


def is_within_another() -> bool:
    """Return whether the function that is being traced here is called by another one being traced."""
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return getattr(outer, "outer_graph", None) is not None


def bodies_of(op: tf.Operation) -> list[Any]:
    """The FuncGraphs that a graph op calls: a function's, or a condition's branches; [] for another op.

    Their ``inputs`` are the op's: the last of them, where a condition has others before.
    """
    keys = {attr.name for attr in op.op_def.attr} & {"f", "then_branch", "else_branch", "branches"}
    called = tf.nest.flatten([op.get_attr(key) for key in sorted(keys)])
    functions = [op.graph._get_function(function.name) for function in called]
    return [function.graph for function in functions if function is not None]


def captured_by(graph: object) -> dict[int, Any]:
    """Return what a FuncGraph captures so far, by ``id`` of the placeholder."""
    return {id(internal): external for external, internal in getattr(graph, "captures", ())}


# The ops that change the variable which is their first input.
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")


def written_by(graph: Any) -> set[int]:
    """Return the ``id`` of each tensor outside that stands for a variable which a FuncGraph writes to."""
    return {id(_outside(graph, tensor)) for op in graph.get_operations() for tensor in written_by_op(op)}


def written_by_op(op: tf.Operation) -> Iterator[Any]:
    """The inputs by which an op, or a function that it calls, writes to variables."""
    if op.type.startswith(_WRITES):
        yield op.inputs[0]
    for body in bodies_of(op):
        inside = {id(tensor) for within in body.get_operations() for tensor in written_by_op(within)}
        arguments = zip(body.inputs, op.inputs[len(op.inputs) - len(body.inputs) :], strict=True)
        yield from (outer for inner, outer in arguments if id(inner) in inside)


def _outside(graph: object, tensor: tf.Tensor) -> Any:
    """Follows a captured tensor to the outermost of the graphs that are traced within one another."""
    while id(tensor) in (captured := captured_by(graph)):
        tensor = captured[id(tensor)]
        graph = getattr(tensor, "graph", None)
    return tensor


def captures_so_far(graph: Any) -> set[str]:
    """Return names of the ops by which a graph that is being traced knows what is outside of it.

    Small values are constants, that stand for the same value wherever the function meets it again.
    """
    return {internal.op.name for _, internal in graph.captures}


def ops_reached_from(graph: Any) -> Iterator[tuple[str, str]]:
    """(name, type) of the ops of a graph and of all functions that it reaches, however old."""
    for op in graph.get_operations():
        yield op.name, op.type
    yield from ops_called_from(graph)


def ops_called_from(graph: Any) -> Iterator[tuple[str, str]]:
    """(name, type) of the ops of all functions that a graph reaches."""
    for function in graph._functions.values():
        definition = function.cached_definition
        for node in definition.node_def:
            yield f"{definition.signature.name}/{node.name}", node.op


def set_random_numbers(graph: Any, number: float = 0.37) -> None:
    """Has all ops of a graph that is being traced read one number in the place of random ones.

    What shuffles rows reverses them instead.  Functions that the graph calls keep theirs.
    """
    for op in graph.get_operations():
        if "Random" not in op.type or op.type.startswith("StatelessRandomGet") or not op.outputs:
            continue
        old = op.outputs[0]
        if not (old.dtype.is_floating or old.dtype.is_integer):
            continue
        readers = old.consumers()
        if op.type.endswith("Shuffle"):
            new = tf.reverse(op.inputs[0], [0])
        else:
            new = tf.fill(tf.shape(old), tf.cast(number, old.dtype))
        for reader in readers:
            for place in [place for place, tensor in enumerate(reader.inputs) if tensor is old]:
                reader._update_input(place, new)


# On the communications of a gradient that travels in slices: which of them.
PART_ATTR = "_ooo_part"
# On the ops of a message: its name.
_MESSAGE_ATTR = "_ooo_message"
# Grappler's arithmetic optimizer writes this on sums that it has looked at: with it, a chain of sums stays a
# chain. Else it becomes one AddN, which keeps the gradients of all micro-batches alive to the end.
_LEAVE_SUMS = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def _marked(attributes: Mapping[str, AttrValue]) -> AbstractContextManager[None]:
    scope: AbstractContextManager[None] = tf.compat.v1.get_default_graph()._attr_scope(attributes)
    return scope


@contextlib.contextmanager
def numbered_step(number: int, attribute: str, scope: str) -> Iterator[None]:
    """Ops made inside say which step they belong to: by an attribute, and by their scope if one is given.

    Also inside of another's.  TensorFlow's graph optimizers are not blind to names: in a scope the same step
    may differ in the last bit.
    """
    named = tf.name_scope(f"{scope}{number}/") if scope else contextlib.nullcontext()
    with _marked({attribute: AttrValue(i=number)}), named:
        yield


def numbered_turn(number: int) -> AbstractContextManager[None]:
    """Ops made inside say after how many updates of their step they come."""
    return _marked({TURN_ATTR: AttrValue(i=number)})


def numbered_part(number: int) -> AbstractContextManager[None]:
    """Ops made inside say which slice they belong to; of no use where ops run at once."""
    return contextlib.nullcontext() if tf.executing_eagerly() else _marked({PART_ATTR: AttrValue(i=number)})


def named_message(name: str) -> AbstractContextManager[None]:
    """Ops made inside say which message they belong to; of no use where ops run at once.

    Grappler merges ops that compute the same, Horovod's too, unless their attributes differ.  Where two
    weights have the same gradient it may see so in one rank's graph only, as it does if it knows the size of
    a batch: the other ranks would wait for a message that is gone.
    """
    mark = {_MESSAGE_ATTR: AttrValue(s=name.encode())}
    return contextlib.nullcontext() if tf.executing_eagerly() else _marked(mark)


def marked_sums() -> AbstractContextManager[None]:
    """Ops made inside are sums of gradients, which Grappler leaves as they are."""
    return _marked(dict.fromkeys((SUM_ATTR, _LEAVE_SUMS), AttrValue(b=True)))


def leave_sums(graph_def: graph_pb2.GraphDef) -> None:
    """Marks all sums of a graph: Grappler sorts what it joins by names, which gives each copy other bits."""
    for node in graph_def.node:
        if node.op in ("Add", "AddV2", "AddN"):
            node.attr[_LEAVE_SUMS].b = True
