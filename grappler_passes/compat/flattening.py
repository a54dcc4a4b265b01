"""Flat graphs: calls inlined, conditions and loops lowered or kept as single ops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos

# A condition none of whose branches reads or changes a state; what it was lowered by.
WHOLE_BRANCH = "StatelessIf"
_LOWER = "_lower_using_switch_merge"
_CONDITIONALS = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})


def inline_graph_def(graph_def: graph_pb2.GraphDef, fetches: list[str]) -> graph_pb2.GraphDef:
    """Return a flat copy of ``graph_def``: function calls inlined, While and If lowered to Switch and Merge.

    Runs Grappler's function optimizer alone, as TensorFlow itself does for TFLite and TensorRT.
    """
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
    out = graph_protos.copy_of(graph_def)
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
    functional, lowered = graph_protos.copy_of(graph_def), graph_protos.copy_of(graph_def)
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
    out = graph_protos.copy_of(graph_def)
    for function in out.library.function:
        function.attr.pop("api_implements", None)
    _drop_unused_functions(out)
    # Grappler leaves colocation with nodes that it has removed; tf.import_graph_def refuses it.
    names = {node.name for node in out.node}
    for node in out.node:
        graph_protos.keep_colocations(node, names.__contains__)
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
