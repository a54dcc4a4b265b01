"""GraphDefs and what stands in their nodes; flat ones, whose calls are inlined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_pb2


def parse_graph_def(data: bytes) -> graph_pb2.GraphDef:
    """Return a GraphDef from its serialized form."""
    from tensorflow.core.framework import graph_pb2

    return graph_pb2.GraphDef.FromString(data)


def is_graph_def(value: object) -> TypeGuard[graph_pb2.GraphDef]:
    """Return whether a value is a GraphDef message."""
    from tensorflow.core.framework import graph_pb2

    return isinstance(value, graph_pb2.GraphDef)


def tensor_proto(value: bool | int | float | str) -> tensor_pb2.TensorProto:
    """Return a value as it stands in a constant node."""
    import tensorflow as tf

    return tf.make_tensor_proto(value)


def zero_of(dtype: int) -> tensor_pb2.TensorProto:
    """Return a zero, False or an empty text, as it stands in a constant node; ``dtype`` as in nodes.

    TypeError: a type without values, such as that of a variable's handle.
    """
    import tensorflow as tf

    kind = tf.as_dtype(dtype)
    if kind in (tf.resource, tf.variant):
        raise TypeError(f"{kind.name} has no zero")
    return tf.make_tensor_proto("" if kind == tf.string else kind.as_numpy_dtype(0), kind)


def copy_of(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return a deep copy, to be changed."""
    copy = type(graph_def)()
    copy.CopyFrom(graph_def)
    return copy


def with_nodes(graph_def: graph_pb2.GraphDef, nodes: Iterable[node_def_pb2.NodeDef]) -> graph_pb2.GraphDef:
    """Return the graph with copies of these nodes in place of its own; the library stays."""
    out = copy_of(graph_def)
    del out.node[:]
    out.node.extend(nodes)
    return out


def keep_colocations(node: node_def_pb2.NodeDef, kept: Callable[[str], bool]) -> None:
    """Takes from a node the wish to stand beside nodes that are not ``kept``, by name; changes the node."""
    wishes = node.attr["_class"].list.s if "_class" in node.attr else ()
    left = [wish for wish in wishes if kept(wish.decode().removeprefix("loc:@"))]
    if len(left) == len(wishes):
        return
    del node.attr["_class"]
    if left:
        node.attr["_class"].list.s.extend(left)


# A condition none of whose branches reads or changes a state; what it was lowered by.
WHOLE_BRANCH = "StatelessIf"
_LOWER = "_lower_using_switch_merge"
_CONDITIONALS = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})


def inline_graph_def(graph_def: graph_pb2.GraphDef, fetches: list[str]) -> graph_pb2.GraphDef:
    """Return a flat copy of ``graph_def``: function calls inlined, While and If lowered to Switch and Merge.

    Runs Grappler's function optimizer alone, as TensorFlow itself does for TFLite and TensorRT.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
    from tensorflow.python.grappler import tf_optimizer

    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(_without_implementations(graph_def), name="")
        meta_graph = tf.compat.v1.train.export_meta_graph(graph=graph)
    collection = meta_graph_pb2.CollectionDef()
    collection.node_list.value.extend(fetches)
    meta_graph.collection_def["train_op"].CopyFrom(collection)
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes = -1
    options.optimizers.append("function")
    options.function_optimization = options.AGGRESSIVE
    # The graph may carry our marks: a rewrite would wait for OptimizeGraph, which holds a lock here.
    options.use_plugin_optimizers = options.OFF
    return tf_optimizer.OptimizeGraph(config, meta_graph)


def with_whole_branches(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return the graph whose conditions without side effects stay one op each where functions are inlined."""
    out = copy_of(graph_def)
    for node in _all_nodes(out):
        if node.op == WHOLE_BRANCH:
            node.attr.pop(_LOWER, None)
    return out


def flat_graphs(
    graph_def: graph_pb2.GraphDef, fetches: list[str]
) -> tuple[graph_pb2.GraphDef, graph_pb2.GraphDef]:
    """The graph without calls, once with loops and conditionals as single ops and once with them lowered.

    Traced for XLA a conditional is not marked to be lowered: one that may skip an update would read all
    gradients.
    """
    functional, lowered = copy_of(graph_def), copy_of(graph_def)
    for node in _all_nodes(functional):
        node.attr.pop(_LOWER, None)
    for node in _all_nodes(lowered):
        if node.op in _CONDITIONALS:
            node.attr[_LOWER].b = True
    return inline_graph_def(functional, fetches), inline_graph_def(lowered, fetches)


def _all_nodes(graph_def: graph_pb2.GraphDef) -> Iterator[node_def_pb2.NodeDef]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _without_implementations(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Drops ``api_implements``: it would keep the calls that have a cuDNN twin from being inlined."""
    out = copy_of(graph_def)
    for function in out.library.function:
        function.attr.pop("api_implements", None)
    _drop_unused_functions(out)
    # Grappler leaves colocation with nodes that it has removed; tf.import_graph_def refuses it.
    names = {node.name for node in out.node}
    for node in out.node:
        keep_colocations(node, names.__contains__)
    return out


def _drop_unused_functions(graph_def: graph_pb2.GraphDef) -> None:
    """Drop functions that no node calls: Grappler may leave inconsistent ones, which cannot be imported."""
    functions = {function.signature.name: function for function in graph_def.library.function}
    used: set[str] = set()
    todo = called_by(graph_def.node)
    while todo:
        name = todo.pop()
        if name in functions and name not in used:
            used.add(name)
            todo |= called_by(functions[name].node_def)
    kept = [function for name, function in functions.items() if name in used]
    del graph_def.library.function[:]
    graph_def.library.function.extend(kept)
    gradients = [g for g in graph_def.library.gradient if g.function_name in used and g.gradient_func in used]
    del graph_def.library.gradient[:]
    graph_def.library.gradient.extend(gradients)


def called_by(nodes: Iterable[node_def_pb2.NodeDef]) -> set[str]:
    """Names of functions that nodes call: by their op, or in an attribute (a loop's body, a branch)."""
    values = [value for node in nodes for value in node.attr.values()]
    named = {value.func.name for value in values if value.HasField("func")}
    listed = {function.name for value in values for function in value.list.func}
    return {node.op for node in nodes} | named | listed
