"""Private TensorFlow API of the XLA mode; a failure says what an upgrade broke."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat import flattening, runtime
from grappler_passes.compat.shape_inference import OutputInfo
from tests.zoo import needs_xla_streams
from tf_ooo.compat import func_graphs, tf_functions, xla_flags, xla_functions, xla_nodes
from tf_ooo.errors import BackendError
from tf_ooo.modes.compiled.captured import watched
from tf_ooo.modes.compiled.outline import module_text


@needs_xla_streams
def test_the_ops_are_there():
    assert xla_nodes.why_no_streams() is None, (
        "xla_call_module, xla_optimization_barrier or xla_data_pb2 is gone"
    )


def test_frontend_attributes_are_what_xla_reads():
    from tensorflow.compiler.xla import xla_data_pb2

    attributes = xla_data_pb2.FrontendAttributes.FromString(xla_nodes.frontend_attributes(3))
    assert dict(attributes.map) == {"_xla_stream_annotation": "3", "inlineable": "false"}


@needs_xla_streams
def test_a_call_reaches_hlo_with_its_stream():
    """Built from nodes alone: function, call, barrier."""
    info = OutputInfo("float32", (2, 2), 4)
    graph = tf.Graph()
    with graph.as_default():
        a = tf.compat.v1.placeholder(tf.float32, (2, 2), name="in_function")
        tf.linalg.matmul(a, a, name="square")
    nodes = func_graphs.without_placeholders(graph.as_graph_def())
    name = xla_nodes.unique_name("ooo_test")
    inputs = [("in_function", "float32", (2, 2))]
    function = xla_nodes.function_def(name, nodes, inputs, ["square:0"])
    body = tf.compat.v1.GraphDef(versions=graph.as_graph_def().versions)
    body.library.function.append(function)
    module = module_text([info], [info])
    body.node.append(xla_nodes.call_node("call", 3, name, module, ["x:0"], ([info], [info])))
    body.node.append(xla_nodes.barrier_node("behind", ["call:0", "x:0"], ["float32", "float32"]))
    runtime.register_functions(body)
    spec = tf.TensorSpec((2, 2))
    run = tf_functions.plain_function(
        lambda x: func_graphs.import_here(body, {"x:0": x}, ["behind:0"]), [spec], compiled=True
    )
    assert xla_functions.stream_calls(xla_functions.hlo_of(run, [spec])) == [3], (
        "the call lost its frontend attributes"
    )
    x = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
    np.testing.assert_array_equal(run(x)[0], x @ x)


def test_traced_as_for_xla():
    """Loops are traced in another way then."""
    from tensorflow.python.ops import control_flow_util

    seen = []

    def step(x):
        seen.append(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
        return [x]

    tf_functions.concrete_function(step, [tf.TensorSpec(())], compiled=True)
    assert seen == [True]


def test_flat_graphs_agree_on_names():
    @tf.function(jit_compile=True)
    def step(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * 2.0), (0, x))[1]

    graph_def = step.get_concrete_function(tf.TensorSpec(())).graph.as_graph_def()
    functional, _ = flattening.flat_graphs(graph_def, ["Identity"])
    assert any("While" in node.op for node in functional.node)


def test_a_conditional_is_lowered_where_it_is_classified():
    """Traced for XLA it is not marked: TensorFlow would leave it as one op, also in functions."""

    @tf.function
    def inner(x):
        return tf.cond(x > 0.0, lambda: x * 2.0, lambda: x)

    concrete = tf_functions.concrete_function(lambda x: [inner(x) + 1.0], [tf.TensorSpec(())], compiled=True)
    graph_def = concrete.graph.as_graph_def()
    functional, lowered = flattening.flat_graphs(graph_def, ["Identity"])
    assert [node.op for node in functional.node if node.op.endswith("If")]
    assert not [node.op for node in lowered.node if node.op.endswith("If")]
    assert "Merge" in {node.op for node in lowered.node}


@pytest.mark.parametrize(
    ("gpus", "built_with", "found"),
    [([], "cuda", "CPU"), (["GPU:0"], "cuda", "CUDA"), (["GPU:0"], "rocm", "ROCM"),
     (["GPU:0"], "metal", "a GPU plug-in without CUDA")],
)  # fmt: skip
def test_platform(monkeypatch, gpus, built_with, found):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
    for name in ("cuda", "rocm"):
        monkeypatch.setattr(tf.test, f"is_built_with_{name}", lambda name=name: name == built_with)
    assert xla_nodes.platform() == found


@needs_xla_streams
def test_asking_for_hlo_draws_no_random_numbers():
    """TensorFlow finds out the device by drawing one, where it is not told."""
    spec = tf.TensorSpec((2,))
    run = tf_functions.plain_function(lambda x: x * 2.0, [spec], compiled=True)
    drawn = []
    for asks in (False, True):
        tf.random.set_seed(3)
        if asks:
            assert "multiply" in xla_functions.hlo_of(run, [spec])
        shuffled = tf.data.Dataset.range(20).shuffle(20)
        drawn.append((tf.random.normal(()).numpy(), [int(number) for number in shuffled]))
    assert drawn[0] == drawn[1]


def test_run_errors_are_exceptions():
    assert all(issubclass(error, Exception) for error in xla_functions.run_errors())


@needs_xla_streams
class TestFlags:
    """Flags of XLA for one compilation; a failure: the two functions are gone, or TensorFlow copies flags."""

    def compiled(self, number):
        run = tf.function(lambda x: x @ x + number, jit_compile=True)
        return run(tf.ones((2, 2)))

    def test_they_can_be_changed(self):
        assert xla_flags.why_flags_are_fixed() is None

    def test_they_hold_inside_and_are_gone_behind(self, tmp_path):
        before = xla_flags.flags_of_process()
        with xla_flags.added([f"--xla_dump_to={tmp_path}"]):
            self.compiled(1.0)
        written = len(list(tmp_path.iterdir()))
        assert written
        self.compiled(2.0)
        assert len(list(tmp_path.iterdir())) == written
        assert xla_flags.flags_of_process() == before

    def test_flags_of_the_process_hold_again(self, tmp_path):
        users, ours = tmp_path / "users", tmp_path / "ours"
        with xla_flags.added([f"--xla_dump_to={users}"]):
            with xla_flags.added([f"--xla_dump_to={ours}"]):
                self.compiled(3.0)
            assert not users.exists()
            self.compiled(4.0)
            assert users.exists()

    def test_a_failure_inside_puts_them_back(self):
        before = xla_flags.flags_of_process()
        with pytest.raises(KeyError), xla_flags.added(["--xla_dump_hlo_as_text"]):
            raise KeyError
        assert xla_flags.flags_of_process() == before

    def test_where_they_are_fixed(self, monkeypatch):
        monkeypatch.setattr(xla_flags, "_LIBRARIES", ("libnothing.so",))
        assert "does not export" in xla_flags.why_flags_are_fixed()
        raises = pytest.raises(BackendError, match="--xla_dump_hlo_as_text: this TensorFlow")
        with raises, xla_flags.added(["--xla_dump_hlo_as_text"]):
            pass

    def test_what_was_compiled_says_its_bytes(self):
        with watched() as watch:
            self.compiled(5.0)
        assert watch.found is not None
        assert watch.found.total_bytes >= 2 * 16, "the report of XLA's memory use has another form"
