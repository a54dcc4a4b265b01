"""TensorFlow's runtime in this process: what an upgrade breaks."""

from __future__ import annotations

import gc
import json
import os
import threading

import pytest
import tensorflow as tf

from grappler_passes.compat import runtime, shape_inference
from tests.forked import in_a_new_python
from tests.graph.compat_models import described, square_step
from tf_ooo.demo.waits import LOG, Log, library


def test_load_library():
    """Loading itself is tested in test_plugin_process.py: a second library ends the process."""
    with pytest.raises(tf.errors.NotFoundError):
        runtime.load_library("/no/such/library.so")


def ops_loaded():
    wait = runtime.load_ops(str(library())).ooo_wait
    two = tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(*two)
    log = Log(os.environ[LOG])
    log.wait(1.0)
    with tf.device("CPU:1"):
        assert wait(x=tf.constant(3.0), seconds=0.001).numpy() == 3.0
    assert [record["device"].decode()[-5:] for record in log.new()] == ["CPU:1"]


def test_load_ops(tmp_path):
    """The op's library is linked with nothing, and asks TensorFlow in which device it runs."""
    in_a_new_python(ops_loaded, **{LOG: str(tmp_path / "log")})


def test_call_function():
    concrete = tf.function(lambda x, y: (x - y, x)).get_concrete_function(*[tf.TensorSpec([])] * 2)
    results = runtime.call_function(
        concrete.function_def.signature.name, [tf.constant(5.0), tf.constant(2.0)], 2
    )
    assert [result.numpy() for result in results] == [3.0, 5.0], "context.call_function has another signature"


def test_has_gpu():
    assert runtime.has_gpu() is bool(tf.config.list_physical_devices("GPU"))


def test_runtime_devices():
    assert tf.constant(1.0) == 1.0
    assert "/job:localhost/replica:0/task:0/device:CPU:0" in runtime.runtime_devices(), (
        "full device names changed: the check of an answer's devices would refuse every graph"
    )


def test_device_memory_bytes():
    sizes = runtime.device_memory_bytes()
    assert set(sizes) == runtime.runtime_devices()
    cpu = "/job:localhost/replica:0/task:0/device:CPU:0"
    assert sizes[cpu] == 256 * 2**20, "a CPU's number means something now: it may be taken as its limit"


@pytest.mark.parametrize("device", ["/job:localhost/replica:0/task:0/device:GPU:1", ""])
def test_host_device(device):
    wanted = device.replace("GPU:1", "CPU:0") or "/device:CPU:0"
    assert runtime.host_device(device) == wanted


def test_register_functions():
    _, concrete = square_step()
    graph_def = concrete.graph.as_graph_def()
    function = graph_def.library.function[0]
    function.signature.name = "ooo_test_registered"
    runtime.register_functions(graph_def)
    runtime.register_functions(graph_def)
    context = runtime._context()
    assert context.has_function("ooo_test_registered"), "XLA would not find what a function_list names"


@pytest.mark.parametrize("kept", [True, False])
def test_keep_functions(kept):
    _, concrete = square_step()
    name, context = concrete.name, runtime._context()
    if kept:
        runtime.keep_functions()
    del concrete
    gc.collect()
    assert context.has_function(name) is kept, "AtomicFunction counts its uses in another way"


def test_keep_order_on_workers(monkeypatch):
    """Its effect over a worker is in tests/distributed/test_cluster_writes.py."""
    name = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"
    monkeypatch.setenv(name, "true")
    runtime.keep_order_on_workers()
    assert os.environ[name] == "true"
    monkeypatch.delenv(name)
    runtime.keep_order_on_workers()
    assert os.environ[name] == "false"


def test_failing_where_cut_off(monkeypatch):
    """Its effect over a worker is in tests/distributed/test_cluster_lost.py."""
    name = "GRPC_FAIL_FAST"
    monkeypatch.delenv(name, raising=False)
    with runtime.failing_where_cut_off():
        assert os.environ[name] == "true"
    assert name not in os.environ
    monkeypatch.setenv(name, "use_caller")
    with runtime.failing_where_cut_off():
        assert os.environ[name] == "true"
    assert os.environ[name] == "use_caller"


def test_abort_collectives():
    """A collective that waits for a second worker, and one that begins later."""

    def total():
        key = tf.constant(1)
        arguments = {"group_size": tf.constant(2), "group_key": key, "instance_key": key}
        return tf.raw_ops.CollectiveReduceV2(
            input=tf.ones(1), **arguments, ordering_token=[], merge_op="Add", final_op="Id"
        )

    threading.Timer(1.0, runtime.abort_collectives, ("nobody is there",)).start()
    for _ in range(2):
        with pytest.raises(tf.errors.UnavailableError, match="nobody is there"):
            total()


def test_calls_not_optimized():
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.eager import context

    with runtime.calls_not_optimized():
        serialized = context.context().function_call_options.config_proto_serialized
    config = config_pb2.ConfigProto.FromString(serialized)
    assert config.graph_options.rewrite_options.disable_meta_optimizer, "it is optimized again, for seconds"
    serialized = context.context().function_call_options.config_proto_serialized
    config = config_pb2.ConfigProto.FromString(serialized)
    assert not config.graph_options.rewrite_options.disable_meta_optimizer, "nothing is optimized any more"


@pytest.mark.parametrize("kept", [True, False])
def test_kept_functions(kept):
    _, concrete = square_step()
    definition, context = concrete.graph.as_graph_def().library.function[0], runtime._context()
    definition.signature.name = f"ooo_test_kept_{kept}"
    held = runtime.kept_functions([definition])
    assert context.has_function(definition.signature.name)
    if not kept:
        del held
    gc.collect()
    assert context.has_function(definition.signature.name) is kept, "AtomicFunction counts its uses otherwise"


def test_calls_without_idle_optimizers():
    function = tf.function(lambda x: tf.add_n([x, x, x]) * 2.0, autograph=False)
    with runtime.calls_without_idle_optimizers():
        options = runtime._context().function_call_options.config_proto_serialized
        assert function(tf.ones([2])).numpy().tolist() == [6.0, 6.0]
    rewrites = tf.compat.v1.ConfigProto.FromString(options).graph_options.rewrite_options
    assert (rewrites.layout_optimizer == rewrites.OFF) is not runtime.has_gpu()
    assert (rewrites.memory_optimization == rewrites.NO_MEM_OPT) is not runtime.has_gpu()
    assert rewrites.disable_tfg_optimizer is not runtime.has_gpu()
    after = runtime._context().function_call_options.config_proto_serialized
    assert after != options or runtime.has_gpu(), "the options are for the calls in the block"


def test_graph_def_of():
    weight, function = square_step()
    graph_def, fetches = runtime.graph_def_of(function)
    assert described(graph_def) == [{"name": "weight", "trainable": True}], (
        "FuncGraph.captures, Variable.handle or FuncGraph._weak_variables changed: no variable is found"
    )
    handle = next(node for node in graph_def.node if "_ooo_variable" in node.attr)
    shape = handle.attr[shape_inference.HANDLE_SHAPES].list.shape[0]
    assert [dim.size for dim in shape.dim] == weight.shape, "handle_data_util no longer knows the shape"
    assert set(fetches) <= {node.name for node in graph_def.node}


def test_graph_def_of_survives_a_deleted_variable():
    weight, function = square_step()
    del weight
    assert runtime.graph_def_of(function)[1]


def test_func_graph_transforms():
    seen = []
    transforms = runtime.func_graph_transforms()
    transforms.append(seen.append)
    try:
        tf.function(lambda x: x + 1.0)(tf.constant(1.0))
    finally:
        transforms.remove(seen.append)
    assert seen, "FUNC_GRAPH_TRANSFORMS is no longer called: no graph is marked, nothing is rewritten"
    assert hasattr(seen[0], "captures")
    assert hasattr(seen[0], "variables")


def test_set_string_attr():
    with tf.Graph().as_default() as graph:
        op = tf.constant(1.0, name="one").op
        runtime.set_string_attr(op, "_ooo_test", "value")
    node = graph.as_graph_def().node[0]
    assert node.attr["_ooo_test"].s == b"value", "Operation._set_attr no longer writes into the graph"


def test_variables_of_one_name_are_told_apart():
    assert list(runtime.numbered(["a", "a_1", "a", "b", "a"])) == ["a", "a_1", "a_2", "b", "a_3"]
    first, second = tf.Variable([1.0, 2.0], name="kernel"), tf.Variable([3.0], name="kernel")
    concrete = tf.function(lambda: first[0] + second[0]).get_concrete_function()
    graph_def, _ = runtime.graph_def_of(concrete)
    described = [node.attr[runtime.VARIABLE_ATTR].s for node in graph_def.node]
    assert [json.loads(text)["name"] for text in described if text] == ["kernel", "kernel_1"]
