"""Graphs for the tests of this folder: traced by TensorFlow, inlined, lowered, and run again."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.framework import convert_to_constants
from tensorflow.python.grappler import tf_optimizer


def node(graph, name, op="NoOp", *inputs, **attrs):
    made = graph.node.add(name=name, op=op, input=inputs)
    for key, value in attrs.items():
        if isinstance(value, bool):
            made.attr[key].b = value
        elif isinstance(value, str):
            made.attr[key].s = value.encode()
        else:
            made.attr[key].type = value
    return made


def graph_of(*rows, **devices):
    """``"name Op: input input"``, and the devices of some; an Enter enters the frame ``loop``."""
    graph = graph_pb2.GraphDef()
    for row in rows:
        head, _, inputs = row.partition(":")
        name, op = head.split()
        frame = {"frame_name": "loop"} if op == "Enter" else {}
        node(graph, name, op, *inputs.split(), **frame).device = devices.get(name, "")
    return graph


def flat(function, *args):
    """(GraphDef, inputs, outputs) of a concrete function with calls inlined and control flow lowered."""
    concrete = function.get_concrete_function(*args)
    graph_def = convert_to_constants._run_inline_graph_optimization(
        concrete, lower_control_flow=True, aggressive_inlining=True
    )
    inputs = [t.name for t in concrete.inputs if t.dtype != tf.resource]
    outputs = [t.name for t in concrete.outputs]
    return graph_def, inputs, outputs


def as_optimizers_get_it(concrete):
    """The graph with ends in the place of its inputs and outputs."""
    graph_def = concrete.graph.as_graph_def()
    places = {tensor.op.name: place for place, tensor in enumerate(concrete.graph.inputs)}
    for node in graph_def.node:
        if node.name in places:
            dtype, shape = node.attr["dtype"].type, concrete.graph.inputs[places[node.name]].shape
            node.op = "_Arg"
            node.attr.clear()
            node.attr["_output_shapes"].list.shape.append(shape.as_proto())
            node.attr["T"].type, node.attr["index"].i = dtype, places[node.name]
    for place, tensor in enumerate(concrete.graph.outputs):
        node = graph_def.node.add(name=f"returned_{place}", op="_Retval", input=[tensor.name])
        node.attr["T"].type, node.attr["index"].i = tensor.dtype.as_datatype_enum, place
    return graph_def


def context_of(index, name):
    return index.contexts[index.of(name)]


def run(graph_def, inputs, outputs, values):
    """Outputs as numpy arrays."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            return session.run(outputs, dict(zip(inputs, values, strict=True)))


def assert_bit_equal(one, two):
    assert len(one) == len(two)
    assert len(one) > 0
    for a, b in zip(one, two, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def edge_set(graph_def: graph_pb2.GraphDef):
    return {(text, made.name) for made in graph_def.node for text in made.input}


def optimized(graph_def, outputs):
    """The graph after Grappler's pruning and dependency passes, as a plug-in sees it."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        meta_graph = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    meta_graph.collection_def["train_op"].node_list.value.extend(outputs)
    config = config_pb2.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.min_graph_nodes = -1
    rewrite.meta_optimizer_iterations = 2
    rewrite.optimizers.extend(["pruning", "dependency", "pruning"])
    return tf_optimizer.OptimizeGraph(config, meta_graph)


def recurrent(steps, inner=None, sliced=False):
    """Gradients of a small RNN with respect to its two weights and its input."""

    @tf.function
    def function(x, w, u):
        with tf.GradientTape() as tape:
            tape.watch([x, w, u])
            y = tf.TensorArray(tf.float32, 15).unstack(tf.transpose(x * 2.0, [1, 0, 2]))

            def body(t, h):
                h = tf.tanh((x[:, t] if sliced else y.read(t)) @ w + h @ u)
                return t + 1, h if inner is None else inner(t, h, u)

            h = tf.while_loop(lambda t, h: t < steps, body, (0, tf.zeros([2, 4])))[1]
            loss = tf.reduce_sum(h * h)
        return tape.gradient(loss, [x, w, u])

    graph, inputs, outputs = flat(
        function, tf.TensorSpec([2, 15, 3]), tf.TensorSpec([3, 4]), tf.TensorSpec([4, 4])
    )
    random = np.random.default_rng(0)
    values = [random.normal(size=size).astype("f") for size in ((2, 15, 3), (3, 4), (4, 4))]
    return optimized(graph, outputs), inputs, outputs, values
