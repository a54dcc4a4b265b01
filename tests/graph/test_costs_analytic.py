"""FLOP and bytes of TensorFlow's ops against sums worked out by hand, on graphs that TensorFlow traced."""

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.analysis.classify import flatten
from grappler_passes.compat import runtime
from tests import zoo
from tf_ooo.costs.analytic import FREE_OPS, analytic_ops, base_type
from tf_ooo.costs.devices import DeviceModel

DEVICE = DeviceModel(flop_per_s=1e9, bytes_per_s=1e9, launch_s=1e-6)


def _work(function, *shapes):
    """{op type: [work]} of a traced function of tensors of these shapes."""
    concrete = tf.function(function).get_concrete_function(*(tf.TensorSpec(s, tf.float32) for s in shapes))
    graph_def = concrete.graph.as_graph_def()
    found = analytic_ops(graph_def, DEVICE)
    assert not found.unknown
    out = {}
    for node in graph_def.node:
        out.setdefault(node.op, []).append(found.work[node.name])
    return out


def _bytes(*shapes):
    return 4 * sum(int(np.prod(shape)) for shape in shapes)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul(transpose_a, transpose_b):
    a, b = ((5, 3) if transpose_a else (3, 5)), ((7, 5) if transpose_b else (5, 7))
    (work,) = _work(lambda x, y: tf.matmul(x, y, transpose_a, transpose_b), a, b)["MatMul"]
    assert work.flop == 2 * 3 * 5 * 7
    assert work.moved_bytes == _bytes((3, 5), (5, 7), (3, 7))


def test_batch_matmul_with_broadcast():
    (work,) = _work(tf.matmul, (2, 1, 3, 5), (4, 5, 7))["BatchMatMulV2"]
    assert work.flop == 2 * 8 * 3 * 5 * 7
    assert work.moved_bytes == _bytes((2, 3, 5), (4, 5, 7), (8, 3, 7))


@pytest.mark.parametrize(
    ("equation", "a", "b", "flop"),
    [
        ("abc,cd->abd", (2, 3, 5), (5, 7), 2 * 2 * 3 * 5 * 7),
        ("...ij,...jk->...ik", (2, 1, 3, 5), (4, 5, 7), 2 * 2 * 4 * 3 * 5 * 7),
        ("aecd,abcd->acbe", (2, 3, 5, 7), (2, 11, 5, 7), 2 * 2 * 3 * 5 * 7 * 11),
    ],
)
def test_einsum(equation, a, b, flop):
    (work,) = _work(lambda x, y: tf.einsum(equation, x, y), a, b)["Einsum"]
    assert work.flop == flop


def test_convolution_and_its_gradients():
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = tf.nn.conv2d(x, w, strides=2, padding="SAME")
        return tape.gradient(y, [x, w])

    found = _work(step, (2, 8, 8, 6), (3, 3, 6, 10))
    for kind in ("Conv2DBackpropInput", "Conv2DBackpropFilter"):
        (work,) = found[kind]
        assert work.flop == 2 * (2 * 4 * 4 * 10) * (3 * 3 * 6)
    forward = _work(lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"), (2, 8, 8, 6), (3, 3, 6, 10))["Conv2D"][0]
    assert forward.flop == 2 * (2 * 4 * 4 * 10) * (3 * 3 * 6)
    assert forward.moved_bytes == _bytes((2, 8, 8, 6), (3, 3, 6, 10), (2, 4, 4, 10))


def test_grouped_convolution_counts_the_group_s_channels():
    (work,) = _work(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), (1, 4, 4, 6), (3, 3, 2, 9))["Conv2D"]
    assert work.flop == 2 * 16 * 9 * 9 * 2


def test_three_dimensional_convolution_and_its_gradients():
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = tf.nn.conv3d(x, w, [1, 1, 1, 1, 1], "SAME")
        return y, tape.gradient(y, [x, w])

    found = _work(step, (2, 4, 4, 4, 3), (3, 3, 3, 3, 5))
    for kind in ("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"):
        assert found[kind][0].flop == 2 * (2 * 64 * 5) * 81


def test_depthwise_convolution_and_its_gradients():
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME")
        return y, tape.gradient(y, [x, w])

    found = _work(step, (2, 4, 4, 3), (3, 3, 3, 2))
    for kind in ("", "BackpropInput", "BackpropFilter"):
        assert found["DepthwiseConv2dNative" + kind][0].flop == 2 * (2 * 16 * 6) * 9


def test_others_count_as_bytes():
    found = _work(lambda x, y: tf.gather(tf.nn.softmax(x + y), [1]), (8, 16), (16,))
    assert found["AddV2"][0].moved_bytes == _bytes((8, 16), (16,), (8, 16))
    assert found["Softmax"][0].moved_bytes == 3 * _bytes((8, 16))
    assert found["GatherV2"][0].moved_bytes == 2 * _bytes((1, 16))
    assert all(work.flop == 0 for works in found.values() for work in works)


def test_optimizer_op_reads_and_writes_its_variables():
    weight, slot = tf.Variable(tf.ones((8, 4))), tf.Variable(tf.ones((8, 4)))

    @tf.function
    def step(gradient):
        tf.raw_ops.ResourceApplyMomentum(
            var=weight.handle, accum=slot.handle, lr=0.1, grad=gradient, momentum=0.9
        )

    graph_def = step.get_concrete_function(tf.TensorSpec((8, 4))).graph.as_graph_def()
    found = analytic_ops(graph_def, DEVICE)
    name = next(node.name for node in graph_def.node if node.op == "ResourceApplyMomentum")
    assert found.work[name].moved_bytes == 5 * 8 * 4 * 4 + 2 * 4


def test_seconds_are_the_roofline_and_views_are_free():
    @tf.function
    def step(x):
        return tf.reshape(x @ x, (-1,)) + 1

    graph_def = step.get_concrete_function(tf.TensorSpec((100, 100))).graph.as_graph_def()
    seconds = {node.op: analytic_ops(graph_def, DEVICE).seconds[node.name] for node in graph_def.node}
    assert seconds["MatMul"] == pytest.approx(2e6 / 1e9 + 1e-6)
    assert seconds["AddV2"] == pytest.approx((2 * 40_000 + 4) / 1e9 + 1e-6)
    assert seconds["Reshape"] == 0


def test_unknown_shape_gets_a_reason_and_no_number():
    @tf.function
    def step(x):
        return x @ tf.ones((3, 3))

    graph_def = step.get_concrete_function(tf.TensorSpec((None, 3))).graph.as_graph_def()
    found = analytic_ops(graph_def, DEVICE)
    (name,) = (node.name for node in graph_def.node if node.op == "MatMul")
    assert name not in found.seconds
    assert found.unknown[name].startswith(f"op '{name}' (MatMul): the shape (None, 3)")


def test_op_without_a_formula_gets_a_reason():
    @tf.function
    def step(x):
        return tf.while_loop(lambda y: tf.reduce_sum(y) < 9, lambda y: (y + x,), (x,))

    graph_def = step.get_concrete_function(tf.TensorSpec((2,))).graph.as_graph_def()
    found = analytic_ops(graph_def, DEVICE)
    assert any("no formula" in reason for reason in found.unknown.values())


@pytest.mark.parametrize(
    ("op_type", "base"),
    [
        ("_MklNativeFusedConv2D", "Conv2D"),
        ("_FusedMatMul", "MatMul"),
        ("_MklMatMul", "MatMul"),
        ("BatchMatMulV3", "BatchMatMul"),
        ("_FusedBatchNormEx", "_FusedBatchNorm"),
        ("FusedBatchNormGradV3", "FusedBatchNormGrad"),
        ("_MklNativeConv2DBackpropFilterWithBias", "Conv2DBackpropFilter"),
        ("_MklNativeDepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropInput"),
        ("_FusedDepthwiseConv2dNative", "DepthwiseConv2dNative"),
        ("AddV2", "Add"),
    ],
)
def test_base_type(op_type, base):
    assert base_type(op_type) == base


def test_free_ops_exist():
    from tensorflow.python.framework import op_def_registry

    # Registered by the core; the underscored ones are internal.
    assert [name for name in sorted(FREE_OPS) if op_def_registry.get(name) is None] == []


@pytest.mark.parametrize("name", ["convolutions", "mlp"])
def test_every_op_of_a_keras_step_has_a_number(name):
    model, x, y = getattr(zoo, name)()
    model.compile("adam", zoo.keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    @tf.function
    def step(x, y):
        return model.train_step((x, y))

    graph_def, fetches = runtime.graph_def_of(step.get_concrete_function(tf.constant(x), tf.constant(y)))
    graph_def = flatten(graph_def, fetches)
    found = analytic_ops(graph_def, DEVICE)
    assert not found.unknown
    assert sum(found.seconds.values()) > 0


def test_reduction_of_open_size_counts_as_writing_what_it_reads():
    @tf.function
    def step(x, axes):
        return tf.reduce_sum(x, axes)

    specs = (tf.TensorSpec((8, 4)), tf.TensorSpec((None,), tf.int32))
    graph_def = step.get_concrete_function(*specs).graph.as_graph_def()
    (name,) = (node.name for node in graph_def.node if node.op == "Sum")
    assert analytic_ops(graph_def, DEVICE).work[name].moved_bytes == 2 * _bytes((8, 4))


def test_rows_that_only_a_run_counts_are_as_many_as_can_be():
    """Distinct rows of a lookup, their summed gradients, and what an optimizer makes of those."""

    def rows(ids, values):
        distinct, places = tf.unique(tf.cast(ids, tf.int32))
        summed = tf.math.unsorted_segment_sum(values, places, tf.size(distinct))
        return tf.square(summed) * 2.0

    found = _work(rows, (7,), (7, 5))
    assert [work.moved_bytes for work in found["Mul"]] == [_bytes((7, 5), (7, 5), ())]
    assert found["Square"][0].moved_bytes == _bytes((7, 5), (7, 5))


def test_fused_batch_norm_and_its_gradient():
    def step(x, scale):
        with tf.GradientTape() as tape:
            tape.watch([x, scale])
            y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, scale, is_training=True)
        return tape.gradient(y, [x, scale])

    found = _work(step, (2, 4, 4, 3), (3,))
    for kind in ("FusedBatchNormV3", "FusedBatchNormGradV3"):
        assert found[kind][0].moved_bytes >= 3 * _bytes((2, 4, 4, 3))


def test_an_open_batch_stays_open():
    concrete = tf.function(lambda x: tf.square(tf.unique(x)[0])).get_concrete_function(
        tf.TensorSpec([None], tf.float32)
    )
    assert set(analytic_ops(concrete.graph.as_graph_def(), DEVICE).unknown) == {"Unique", "Square"}
