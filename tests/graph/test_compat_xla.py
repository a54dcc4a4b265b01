"""XLA's flags, ops that put functions on streams, compiled functions: what an upgrade breaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat import runtime
from grappler_passes.compat.shape_inference import OutputInfo
from tests.zoo import needs_xla_streams
from tf_ooo.compat import func_graphs, tf_functions, xla
from tf_ooo.errors import BackendError
from tf_ooo.modes.compiled.outline import module_text
from tf_ooo.modes.compiled.session import watched


@needs_xla_streams
class TestFlags:
    """Flags of XLA for one compilation; a failure: the two functions are gone, or TensorFlow copies flags."""

    def compiled(self, number):
        run = tf.function(lambda x: x @ x + number, jit_compile=True)
        return run(tf.ones((2, 2)))

    def test_they_can_be_changed(self):
        assert xla.why_flags_are_fixed() is None

    def test_they_hold_inside_and_are_gone_behind(self, tmp_path):
        before = xla.flags_of_process()
        with xla.added([f"--xla_dump_to={tmp_path}"]):
            self.compiled(1.0)
        written = len(list(tmp_path.iterdir()))
        assert written
        self.compiled(2.0)
        assert len(list(tmp_path.iterdir())) == written
        assert xla.flags_of_process() == before

    def test_flags_of_the_process_hold_again(self, tmp_path):
        users, ours = tmp_path / "users", tmp_path / "ours"
        with xla.added([f"--xla_dump_to={users}"]):
            with xla.added([f"--xla_dump_to={ours}"]):
                self.compiled(3.0)
            assert not users.exists()
            self.compiled(4.0)
            assert users.exists()

    def test_a_failure_inside_puts_them_back(self):
        before = xla.flags_of_process()
        with pytest.raises(KeyError), xla.added(["--xla_dump_hlo_as_text"]):
            raise KeyError
        assert xla.flags_of_process() == before

    def test_where_they_are_fixed(self, monkeypatch):
        monkeypatch.setattr(xla, "_LIBRARIES", ("libnothing.so",))
        assert "does not export" in xla.why_flags_are_fixed()
        raises = pytest.raises(BackendError, match="--xla_dump_hlo_as_text: this TensorFlow")
        with raises, xla.added(["--xla_dump_hlo_as_text"]):
            pass

    def test_what_was_compiled_says_its_bytes(self):
        with watched() as watch:
            self.compiled(5.0)
        assert watch.module is not None
        assert watch.module.total_bytes >= 2 * 16, "the report of XLA's memory use has another form"


@needs_xla_streams
def test_the_ops_are_there():
    assert xla.why_no_streams() is None, "xla_call_module, xla_optimization_barrier or xla_data_pb2 is gone"


def test_frontend_attributes_are_what_xla_reads():
    from tensorflow.compiler.xla import xla_data_pb2

    attributes = xla_data_pb2.FrontendAttributes.FromString(xla.frontend_attributes(3))
    assert dict(attributes.map) == {"_xla_stream_annotation": "3", "inlineable": "false"}


@needs_xla_streams
def test_a_call_reaches_hlo_with_its_stream():
    """Built from nodes alone: function, call, barrier."""
    info = OutputInfo("float32", (2, 2), 4)
    graph = tf.Graph()
    with graph.as_default():
        a = tf.compat.v1.placeholder(tf.float32, (2, 2), name="in_function")
        tf.linalg.matmul(a, a, name="square")
    nodes = func_graphs.without_placeholders(graph.as_graph_def()).node
    name = func_graphs.unique_name("ooo_test")
    function = func_graphs.function_def(name, nodes, [("in_function", "float32")], [("square:0", "float32")])
    body = tf.compat.v1.GraphDef(versions=graph.as_graph_def().versions)
    body.library.function.append(function)
    module = module_text([info], [info])
    body.node.append(xla.call_node("call", 3, name, module, ["x:0"], ([info], [info])))
    body.node.append(xla.barrier_node("behind", ["call:0", "x:0"], ["float32", "float32"]))
    runtime.register_functions(body)
    spec = tf.TensorSpec((2, 2))
    run = tf_functions.plain_function(
        lambda x: func_graphs.import_here(body, {"x:0": x}, ["behind:0"]), [spec], compiled=True
    )
    assert xla.stream_calls(xla.hlo_of(run, [spec])) == [3], "the call lost its frontend attributes"
    x = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
    np.testing.assert_array_equal(run(x)[0], x @ x)


@pytest.mark.parametrize(
    ("gpus", "built_with", "found"),
    [([], "cuda", "CPU"), (["GPU:0"], "cuda", "CUDA"), (["GPU:0"], "rocm", "ROCM"),
     (["GPU:0"], "metal", "a GPU plug-in without CUDA")],
)  # fmt: skip
def test_platform(monkeypatch, gpus, built_with, found):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
    for name in ("cuda", "rocm"):
        monkeypatch.setattr(tf.test, f"is_built_with_{name}", lambda name=name: name == built_with)
    assert xla.platform() == found


def test_device_name():
    """The GPU's name stands in tables of gains; measured on another one they do not count."""
    gpus = tf.config.list_physical_devices("GPU")
    assert (xla.device_name() == "CPU") is (not gpus)


def test_calls_and_constants():
    """Built from nodes alone: a call that is inlined, and a constant."""
    info = OutputInfo("float32", (2,), 4)
    graph = tf.Graph()
    with graph.as_default():
        a = tf.compat.v1.placeholder(tf.float32, (2,), name="in_function")
        tf.identity(a * 2.0, name="double")
    name = func_graphs.unique_name("ooo_test")
    assert name != func_graphs.unique_name("ooo_test")
    nodes = func_graphs.without_placeholders(graph.as_graph_def()).node
    function = func_graphs.function_def(name, nodes, [("in_function", "float32")], [("double:0", "float32")])
    body = tf.compat.v1.GraphDef(versions=graph.as_graph_def().versions)
    body.library.function.append(function)
    body.node.append(xla.constant_node("three", np.array([3.0, 4.0], "float32")))
    body.node.append(xla.plain_call_node("call", name, ["three:0"], ([info], [info])))
    runtime.register_functions(body)
    run = tf_functions.plain_function(lambda: func_graphs.import_here(body, {}, ["call:0"]), [])
    np.testing.assert_array_equal(run()[0], [6.0, 8.0])


@needs_xla_streams
def test_barrier():
    run = tf_functions.plain_function(
        lambda x: xla.barrier([x, x + 1.0]), [tf.TensorSpec((2,))], compiled=True
    )
    np.testing.assert_array_equal(run(tf.zeros((2,)))[1], [1.0, 1.0])
    assert "opt-barrier" in xla.hlo_of(run, [tf.TensorSpec((2,))])


@needs_xla_streams
def test_asking_for_hlo_draws_no_random_numbers():
    """TensorFlow finds out the device by drawing one, where it is not told."""
    spec = tf.TensorSpec((2,))
    run = tf_functions.plain_function(lambda x: x * 2.0, [spec], compiled=True)
    drawn = []
    for asks in (False, True):
        tf.random.set_seed(3)
        if asks:
            assert "multiply" in xla.hlo_of(run, [spec])
        shuffled = tf.data.Dataset.range(20).shuffle(20)
        drawn.append((tf.random.normal(()).numpy(), [int(number) for number in shuffled]))
    assert drawn[0] == drawn[1]


@needs_xla_streams
def test_repeated_function():
    """All rounds are in one loop of known length, none is left out."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (2, 2), name="x")
        tf.linalg.matmul(x, x, name="square")
    specs = {"x:0": tf.TensorSpec((2, 2))}
    run = xla.repeated_function(graph.as_graph_def(), specs, ["square:0"], 5)
    np.testing.assert_array_equal(run(tf.ones((2, 2)))[0], np.full((2, 2), 2.0))
    hlo = xla.hlo_of(run, list(specs.values()), "optimized_hlo")
    assert hlo.count("while(") == 1
    assert "opt-barrier" in xla.hlo_of(run, list(specs.values()))
    assert xla.stream_calls(hlo) == []


def test_functions_with_state_say_so():
    graph = tf.Graph()
    with graph.as_default():
        tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(), name="variable")
    function = func_graphs.function_def("f", graph.as_graph_def().node, [], [("variable:0", "resource")])
    assert function.signature.is_stateful
