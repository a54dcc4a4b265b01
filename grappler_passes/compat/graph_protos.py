"""Reads GraphDefs (nodes, inputs as text, what the registry says of ops) and inlines their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_pb2

_COMMUNICATION_PREFIXES = ("Horovod", "Collective", "Nccl", "_Send", "_Recv", "_HostSend", "_HostRecv")


def parse_graph_def(data: bytes) -> graph_pb2.GraphDef:
    """Return a GraphDef from its serialized form."""
    from tensorflow.core.framework import graph_pb2

    return graph_pb2.GraphDef.FromString(data)


def is_graph_def(value: object) -> TypeGuard[graph_pb2.GraphDef]:
    """Return whether a value is a GraphDef message."""
    from tensorflow.core.framework import graph_pb2

    return isinstance(value, graph_pb2.GraphDef)


def tensor_proto(value: bool | int | float | str) -> tensor_pb2.TensorProto:
    """Return a value in the form that a constant node holds."""
    import tensorflow as tf

    return tf.make_tensor_proto(value)


def zero_of(dtype: int) -> tensor_pb2.TensorProto:
    """Return a zero, False or an empty text in the form that a constant node holds; ``dtype`` as in nodes.

    Raises TypeError for a type without values, such as the type of a variable's handle.
    """
    import tensorflow as tf

    kind = tf.as_dtype(dtype)
    if kind in (tf.resource, tf.variant):
        raise TypeError(f"{kind.name} has no zero")
    return tf.make_tensor_proto("" if kind == tf.string else kind.as_numpy_dtype(0), kind)


def copy_of(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return a deep copy that may be changed."""
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
    """Remove a node's colocation with nodes that are not ``kept`` (names); changes the node."""
    wishes = node.attr["_class"].list.s if "_class" in node.attr else ()
    left = [wish for wish in wishes if kept(wish.decode().removeprefix("loc:@"))]
    if len(left) == len(wishes):
        return
    del node.attr["_class"]
    if left:
        node.attr["_class"].list.s.extend(left)


# No branch of such a condition reads or changes a state; the attribute says that it was to be lowered.
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
    """Return the graph in which conditions without side effects will stay one op when inlined."""
    out = copy_of(graph_def)
    for node in _all_nodes(out):
        if node.op == WHOLE_BRANCH:
            node.attr.pop(_LOWER, None)
    return out


def flat_graphs(
    graph_def: graph_pb2.GraphDef, fetches: list[str]
) -> tuple[graph_pb2.GraphDef, graph_pb2.GraphDef]:
    """Return the graph without calls, twice: loops and conditionals as single ops, and lowered.

    A conditional traced for XLA is not marked to be lowered: one that may skip an update would read all
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
    """Return the names of functions that nodes call, by op or in an attribute (a loop's body, a branch)."""
    values = [value for node in nodes for value in node.attr.values()]
    named = {value.func.name for value in values if value.HasField("func")}
    listed = {function.name for value in values for function in value.list.func}
    return {node.op for node in nodes} | named | listed


def is_communication(op_type: str) -> bool:
    """Tell collectives and transfers by op type: dataflow cannot see that an op talks."""
    return op_type.startswith(_COMMUNICATION_PREFIXES)


def op_def(op_type: str) -> Any:
    """Return TensorFlow's definition of an op type; None if TensorFlow knows no such op."""
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(op_type)


def is_known_op(op_type: str) -> bool:
    """Say whether an op of this type is registered; libraries such as Horovod register theirs when loaded."""
    return op_def(op_type) is not None


def is_stateful(op_type: str) -> bool:
    """Return whether TensorFlow registered the op type as having state or side effects; True if unknown."""
    definition = op_def(op_type)
    return definition is None or definition.is_stateful


def has_reference_inputs(op_type: str) -> bool:
    """Say whether the op may change a reference variable it is given; control flow only hands it on."""
    definition = op_def(op_type)
    return (
        definition is not None
        and not op_type.startswith("Ref")
        and any(argument.is_ref for argument in definition.input_arg)
    )


@lru_cache(maxsize=4096)
def resource_inputs(op_type: str) -> tuple[int, ...]:
    """Return the positions of the inputs that are handles, up to the first input of variable length."""
    from tensorflow.core.framework import types_pb2

    definition = op_def(op_type)
    handles: list[int] = []
    for place, argument in enumerate(() if definition is None else definition.input_arg):
        if argument.number_attr or argument.type_list_attr:
            break
        if argument.type == types_pb2.DT_RESOURCE:
            handles.append(place)
    return tuple(handles)


@lru_cache(maxsize=4096)
def attribute_names(op_type: str) -> frozenset[str]:
    """Return the names of the attributes that an op's definition has; none for an unknown op."""
    definition = op_def(op_type)
    return frozenset(() if definition is None else (attribute.name for attribute in definition.attr))


def output_names(node: node_def_pb2.NodeDef) -> list[str]:
    """Return the names of a node's outputs within a function body, by port: ``op:result:number``."""
    names: list[str] = []
    for result in op_def(node.op).output_arg:
        count = node.attr[result.number_attr].i if result.number_attr else 1
        if result.type_list_attr:
            count = len(node.attr[result.type_list_attr].list.type)
        names += [f"{node.name}:{result.name}:{number}" for number in range(count)]
    return names


def allows_types(node: node_def_pb2.NodeDef) -> bool:
    """Return whether the types in a node's attributes are among those that its op's definition allows.

    Kernels may know more: oneDNN's convolutions on a CPU take bfloat16. TensorFlow checks types when it
    imports a graph, not when it runs one.
    """
    definition = op_def(node.op)
    return all(
        node.attr[attribute.name].type in attribute.allowed_values.list.type
        for attribute in (() if definition is None else definition.attr)
        if attribute.type == "type" and attribute.allowed_values.list.type and attribute.name in node.attr
    )


def keeps_random_state(op_type: str) -> bool:
    """Return whether an op draws random numbers from a state that its kernel keeps (``tf.random.*``)."""
    return (
        op_def(op_type) is not None and is_stateful(op_type) and {"seed", "seed2"} <= attribute_names(op_type)
    )


def data_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    """Return the data inputs as they are written; control inputs are left out."""
    return [text for text in node.input if text[0] != "^"]


def control_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    """Return the control inputs as they are written, ``^`` included."""
    return [text for text in node.input if text[0] == "^"]


def split_input(text: str) -> tuple[str, int]:
    """Split an input: ``"^a"`` is ``("a", -1)``, ``"a:2"`` is ``("a", 2)``, ``"a"`` is ``("a", 0)``."""
    if text.startswith("^"):
        return text[1:], -1
    name, colon, port = text.rpartition(":")
    if colon and port.isdecimal():
        return name, int(port)
    return text, 0


def tensor(name: str, port: int) -> str:
    """Return an input as text; port -1 is a control input."""
    if port < 0:
        return f"^{name}"
    return name if port == 0 else f"{name}:{port}"


def make_identity(node: node_def_pb2.NodeDef, inputs: Iterable[str]) -> None:
    """Change an op with one type ``T`` to an Identity of other inputs; attributes ``_...`` stay."""
    node.op = "Identity"
    for name in [name for name in node.attr if name != "T" and not name.startswith("_")]:
        del node.attr[name]
    node.input[:] = inputs
