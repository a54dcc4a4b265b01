"""TensorFlow's private API of this mode, each with a test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grappler_passes.compat import info_of
from grappler_passes.graph.variables import VARIABLE_ATTR
from tf_ooo.compat import is_keras_2, keras_of
from tf_ooo.compat.pipeline import value_of


def concrete_function(function: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """The ConcreteFunction of ``function(*specs)``; raises whatever tracing raises."""
    import tensorflow as tf

    made = tf.function(tf.autograph.experimental.do_not_convert(function), autograph=False)
    made._omit_frequent_tracing_warning = True
    return made.get_concrete_function(*specs)


def open_rows(spec: Any, known: Any = None) -> Any:
    """The TensorSpec of batches with any number of rows.

    Args:
        spec: of a batch.
        known: what the data say of all batches; where it has a number of rows, that.
    """
    import tensorflow as tf

    if not spec.shape.rank:
        return tf.TensorSpec(spec.shape, spec.dtype)
    rows = known.shape[0] if isinstance(known, tf.TensorSpec) and known.shape.rank else None
    return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)


# A condition none of whose branches reads or changes a state; what it was lowered by.
WHOLE_BRANCH = "StatelessIf"
_LOWERED = "_lower_using_switch_merge"


def with_whole_branches(graph_def: Any) -> Any:
    """The graph whose conditions without side effects stay one op each where functions are inlined."""
    made = type(graph_def)()
    made.CopyFrom(graph_def)
    for nodes in (made.node, *(function.node_def for function in made.library.function)):
        for node in nodes:
            if node.op == WHOLE_BRANCH:
                node.attr.pop(_LOWERED, None)
    return made


_SLOT = {"trainable": False}


def name_variables(graph_def: Any, captured: Sequence[tuple[Any, Any]], variables: Mapping[str, Any]) -> None:
    """Says in a graph which Keras variables its placeholders are, by unique names.

    Args:
        graph_def: changed in place.
        captured: (tensor outside, placeholder inside).
        variables: Keras variables by name.
    """
    by_handle = {id(value_of(v).handle): name for name, v in variables.items() if value_of(v) is not None}
    nodes = {node.name: node for node in graph_def.node}
    for outside, placeholder in captured:
        node = nodes.get(placeholder.op.name)
        if node is not None and id(outside) in by_handle:
            # Legacy optimizers give fused ops the handles of their slots alone: of those nothing is known.
            known = json.loads(node.attr[VARIABLE_ATTR].s) if VARIABLE_ATTR in node.attr else _SLOT
            node.attr[VARIABLE_ATTR].s = json.dumps({**known, "name": by_handle[id(outside)]}).encode()


def register(dtype: Any, shape: Sequence[int | None] | None, device: str) -> Any:
    """A variable for values of a shape with open sizes, which holds none yet."""
    import tensorflow as tf

    with tf.init_scope(), tf.device(device):
        return tf.Variable(
            tf.zeros([size or 0 for size in shape or (0,)] if shape != () else (), dtype),
            shape=tf.TensorShape(None),
            trainable=False,
            validate_shape=False,
        )


def function(body: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """A ``tf.function`` for these inputs, without autograph; TensorFlow does not warn that there are several.

    Traced for batches of one size, graph optimizers would take the rows of the batch that comes in for those
    of the one before: they give a variable of any shape the shape of what is assigned to it.
    """
    import tensorflow as tf

    made = tf.function(
        tf.autograph.experimental.do_not_convert(body), input_signature=list(specs), autograph=False
    )
    made._omit_frequent_tracing_warning = True
    return made


@dataclass(frozen=True)
class TwoParts:
    """An op in two parts: its nodes, the first part's name, and outputs by name."""

    nodes: tuple[Any, ...]
    high: str
    outputs: dict[str, Any]


def in_two_parts(node: Any, infos: Sequence[Any], gradient: int, sizes: int | None, share: float) -> TwoParts:
    """The nodes that compute an op on the first ``share`` of the rows and on the rest, and join them.

    Args:
        node: the NodeDef; the joined result gets its name.
        infos: of its inputs.
        gradient: the input that is divided by rows.
        sizes: the input that holds the shape of the result, None where there is none.
        share: between 0 and 1; each part has at least one row, of a single row the rest.
    """
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        inputs = [
            tf.compat.v1.placeholder(tf.as_dtype(i.dtype), i.shape, f"input_{n}") for n, i in enumerate(infos)
        ]
        with tf.name_scope(f"{node.name}_parts"):
            rows = tf.shape(inputs[gradient])[0]
            first = tf.cast(tf.round(tf.cast(rows, tf.float32) * share), tf.int32)
            first = tf.minimum(tf.maximum(first, 1), rows - 1)
            counts = [first, rows - first]
            pieces = tf.split(inputs[gradient], tf.stack(counts), num=2)
            results = []
            for number, piece in enumerate(pieces):
                given = list(inputs)
                given[gradient] = piece
                if sizes is not None:
                    given[sizes] = tf.concat([[counts[number]], inputs[sizes][1:]], 0)
                results.append(_again(graph, node, given, f"part_{number}"))
        joined = tf.concat(results, 0, name=node.name)
    names = {f"input_{n}": text for n, text in enumerate(t for t in node.input if t[0] != "^")}
    nodes = []
    for made in graph.as_graph_def().node:
        if made.name in names:
            continue
        renamed = [names.get(text.partition(":")[0], text) for text in made.input]
        del made.input[:]
        made.input.extend(renamed)
        nodes.append(made)
    outputs = {op.name: [info_of(t) for t in op.outputs] for op in graph.get_operations()}
    assert joined.op.name == node.name, "the name of the divided op is taken"
    return TwoParts(tuple(nodes), results[0].op.name, {n.name: outputs[n.name] for n in nodes})


def _again(graph: Any, node: Any, inputs: Sequence[Any], name: str) -> Any:
    attributes = {key: value for key, value in node.attr.items() if key not in ("_class", "_output_shapes")}
    operation = graph.create_op(
        node.op, list(inputs), attrs=attributes, name=name, dtypes=None, compute_device=False
    )
    return operation.outputs[0]


def learning_rate_handle(optimizer: Any) -> Any:
    """The resource of the learning rate's variable; None where it is a schedule."""
    rate = getattr(optimizer, "_learning_rate", None)
    return getattr(getattr(rate, "_value", rate), "handle", None)


def is_plain_sgd(optimizer: Any) -> bool:
    """Whether an update takes off the gradient times a number, the same one each time, and nothing else."""
    keras = keras_of(optimizer)
    if is_keras_2(keras) and isinstance(optimizer, keras.optimizers.legacy.SGD):
        return not optimizer._momentum  # its ``momentum`` is a variable
    more = ("momentum", "weight_decay", "clipnorm", "clipvalue")
    if not isinstance(optimizer, keras.optimizers.SGD) or any(getattr(optimizer, name) for name in more):
        return False
    return learning_rate_handle(optimizer) is not None  # not a schedule's


_GRADIENT = "_ooo_gradient"


def marked_gradient(gradient: Any, variable: Any) -> Any:
    """A variable's gradient, dense, behind an op that :func:`is_marked_gradient` knows; None stays None."""
    import tensorflow as tf
    from tensorflow.core.framework import attr_value_pb2

    if gradient is None:
        return None
    # That of lookups says its shape only when it runs.
    dense = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
    yes = attr_value_pb2.AttrValue(b=True)
    with tf.compat.v1.get_default_graph()._attr_scope({_GRADIENT: yes}):
        return tf.identity(dense)


def is_marked_gradient(node: Any) -> bool:
    """Whether :func:`marked_gradient` made a node."""
    return node.op == "Identity" and _GRADIENT in node.attr


def add_mean(graph_def: Any, node: Any, total: str, before: str, share: str) -> None:
    """Makes of an Identity of x the product of ``share`` and ``total``, which is the sum of x and ``before``.

    ``before`` and ``share`` are placeholders.
    """
    for name in (before, share):
        placeholder = graph_def.node.add(name=name, op="Placeholder")
        placeholder.attr["dtype"].CopyFrom(node.attr["T"])
    added = graph_def.node.add(name=total, op="AddV2", input=[node.input[0], before])
    added.attr["T"].CopyFrom(node.attr["T"])
    node.op, node.input[:] = "Mul", [total, share]


def gather_from_read(graph_def: Any, node: Any, read: str, axis: str) -> None:
    """Makes of a ResourceGather a GatherV2 from the whole variable, which the new node ``read`` reads."""
    import tensorflow as tf

    dims = node.attr["batch_dims"].i if "batch_dims" in node.attr else 0
    reader = graph_def.node.add(name=read, op="ReadVariableOp", input=[node.input[0]])
    reader.attr["dtype"].CopyFrom(node.attr["dtype"])
    constant = graph_def.node.add(name=axis, op="Const")
    constant.attr["dtype"].type = tf.int32.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(dims, tf.int32))
    node.op = "GatherV2"
    node.input[0] = read
    node.input.insert(2, axis)
    node.attr["Tparams"].CopyFrom(node.attr["dtype"])
    node.attr["Taxis"].type = tf.int32.as_datatype_enum
    node.attr["batch_dims"].i = dims
    for name in ("dtype", "validate_indices"):
        node.attr.pop(name, None)
