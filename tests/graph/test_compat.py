"""One test per function of the three compat.py.

A failure here after an upgrade names what TensorFlow or Keras changed; the message says what in this
package stops working, the file to read is the compat.py of the test's class.
"""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat import (
    flattening,
    graph_protos,
    keras_values,
    op_types,
    runtime,
    shape_inference,
    traced_functions,
)
from grappler_passes.compat.shape_inference import OutputInfo
from tests.zoo import needs_keras_3
from tf_ooo import BackendError
from tf_ooo.compat import func_graphs, iterators, nests, tf_functions, train_function, versions
from tf_ooo.compat.nests import Packed


def square_step():
    """A variable and a function that calls another one, reads the variable and has a branch."""
    weight = tf.Variable([1.0, 2.0], name="weight")

    @tf.function
    def inner(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x * weight, lambda: x - weight)

    function = tf.function(lambda x: inner(x) + 1.0)
    return weight, function.get_concrete_function(tf.TensorSpec([None, 2]))


def dense_model(**compile_options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", **{"jit_compile": False, **compile_options})
    return model


def ops_of(graph_def):
    return [node.op for node in graph_def.node]


def described(graph_def):
    """The JSON of ``_ooo_variable``, one per placeholder that has it."""
    return [json.loads(n.attr["_ooo_variable"].s) for n in graph_def.node if "_ooo_variable" in n.attr]


class TestGrapplerPasses:
    """grappler_passes/compat.py"""

    def test_infer_outputs(self):
        graph_def, _ = traced_functions.graph_def_of(square_step()[1])
        outputs = shape_inference.infer_outputs(graph_def)
        assert set(outputs) == {node.name for node in graph_def.node}, "infer_outputs lost nodes"
        handles = [o for info in outputs.values() for o in info if o.dtype == "resource"]
        assert handles, "a variable's handle is no longer of dtype resource"
        argument = next(n.name for n in graph_def.node if n.op == "Placeholder" and n.name == "x")
        assert outputs[argument] == (OutputInfo("float32", (None, 2), 4),), (
            "the C API import no longer gives shapes: costs, peaks and layers go wrong"
        )

    def test_infer_outputs_reads_the_shape_behind_a_handle(self):
        """Read of a variable: known only if the handle's shape reaches shape inference."""
        weight = tf.Variable(np.zeros((4, 5), "float32"))
        function = tf.function(lambda: weight.read_value()).get_concrete_function()
        graph_def, _ = traced_functions.graph_def_of(function)
        outputs = shape_inference.infer_outputs(graph_def)
        shapes = {outputs[n.name][0].shape for n in graph_def.node if n.op == "ReadVariableOp"}
        assert shapes == {(4, 5)}, "_Arg with _handle_shapes no longer tells what a handle points to"

    def test_output_info_is_number(self):
        assert OutputInfo("bool", (), 1).is_number
        assert not any(OutputInfo(d, (), 1).is_number for d in ("resource", "variant", "string"))

    def test_graph_def_of(self):
        weight, function = square_step()
        graph_def, fetches = traced_functions.graph_def_of(function)
        assert described(graph_def) == [{"name": "weight", "trainable": True}], (
            "FuncGraph.captures, Variable.handle or FuncGraph._weak_variables changed: no variable is found"
        )
        handle = next(node for node in graph_def.node if "_ooo_variable" in node.attr)
        shape = handle.attr[shape_inference.HANDLE_SHAPES].list.shape[0]
        assert [dim.size for dim in shape.dim] == weight.shape, "handle_data_util no longer knows the shape"
        assert set(fetches) <= {node.name for node in graph_def.node}

    def test_graph_def_of_survives_a_deleted_variable(self):
        weight, function = square_step()
        del weight
        assert traced_functions.graph_def_of(function)[1]

    def test_is_stateful(self):
        assert op_types.is_stateful("AssignVariableOp"), "op_def_registry: state is no longer told"
        assert op_types.is_stateful("NoSuchOpAnywhere"), "an unknown op must count as stateful"
        assert not op_types.is_stateful("MatMul")

    def test_inline_graph_def(self):
        weight, function = square_step()
        graph_def, fetches = traced_functions.graph_def_of(function)
        flat = flattening.inline_graph_def(graph_def, fetches)
        ops = ops_of(flat)
        assert "PartitionedCall" not in ops, "Grappler's function optimizer no longer inlines calls"
        assert "Switch" in ops, "control flow is no longer lowered to Switch and Merge"
        assert not {"If", "StatelessIf"} & set(ops)
        assert described(flat) == [{"name": "weight", "trainable": True}], "node attributes were dropped"
        del weight


class TestTfOoo:
    """tf_ooo/compat.py"""

    def test_check_versions(self, monkeypatch):
        versions.check_versions()
        for version in ("2.14.1", "2.22.0-rc1"):
            monkeypatch.setattr(tf, "__version__", version)
            with pytest.raises(BackendError, match=f"TensorFlow {version} is not supported; pip install"):
                versions.check_versions()

    def test_check_keras_backend(self, monkeypatch):
        versions.check_keras_backend()
        monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(BackendError, match="set KERAS_BACKEND=tensorflow"):
            versions.check_keras_backend()
        monkeypatch.setattr(keras, "__version__", "2.14.0")
        with pytest.raises(BackendError, match=r"Keras 2\.14\.0 is not supported"):
            versions.check_keras_backend()

    def test_train_function_of(self):
        model = dense_model()
        assert model.train_function is None, "Keras makes the train function before fit now"
        function = train_function.train_function_of(model)
        assert function is model.train_function is train_function.train_function_of(model), (
            "Keras keeps its train function elsewhere: OOOBackprop would not be called"
        )

    def test_new_train_function(self):
        model = dense_model()
        first = train_function.train_function_of(model)
        second = train_function.new_train_function(model)
        assert model.train_function is first
        assert second is not first, "make_train_function no longer makes a new function: nothing is retraced"
        logs = second(iter(tf.data.Dataset.from_tensors((tf.ones((4, 3)), tf.ones((4, 2))))))
        assert "loss" in logs, "a train function no longer takes an iterator and returns logs"

    def test_why_not_rewritable(self):
        model = dense_model()
        assert train_function.why_not_rewritable(model) is None
        assert "run_eagerly" in train_function.why_not_rewritable(dense_model(run_eagerly=True))
        model.trainable = False
        assert "no trainable weights" in train_function.why_not_rewritable(model)

    def test_is_concrete_function(self):
        weight, concrete = square_step()
        assert tf_functions.is_concrete_function(concrete), "ConcreteFunction lost an attribute"
        assert not tf_functions.is_concrete_function(tf.function(lambda x: x))
        assert not tf_functions.is_concrete_function(concrete.graph.as_graph_def())
        del weight

    def test_traces_of_a_tf_function(self):
        weight, concrete = square_step()
        function = tf.function(lambda x: concrete(x) * 2.0)
        assert tf_functions.is_tf_function(function), "Function lost _list_all_concrete_functions"
        assert not tf_functions.is_tf_function(concrete)
        assert not tf_functions.is_tf_function(abs)
        function(tf.ones((1, 2)))
        function(tf.ones((3, 2)))
        traced = tf_functions.concrete_functions_of(function)
        assert len(traced) == function.experimental_get_tracing_count()
        found = dict(func_graphs.ops_reached_from(traced[0].graph))
        assert {"Mul", "Sub", "ReadVariableOp"} <= set(found.values()), (
            "FuncGraph._functions: the called functions and their branches are no longer looked at"
        )
        assert any("/" in name for name in found), "ops of functions are named with their function"
        del weight

    def test_dtype_name(self):
        assert nests.dtype_name(tf.ones(2, tf.bfloat16)) == "bfloat16"
        assert nests.dtype_name(keras.Input((3,), dtype="int32")) == "int32"

    def test_synchronize(self):
        """Waits for each tensor, passes over what is none."""
        seen = []

        class Value:
            def numpy(self):
                seen.append(1)

        nests.synchronize({"loss": Value(), "more": [Value(), 3, None]})
        nests.synchronize(tf.constant(1.0))
        assert len(seen) == 2, "tf.nest.flatten no longer reaches into a dict of logs"

    def test_install_train_function(self):
        model, calls = dense_model(), []
        stock = train_function.train_function_of(model)

        def ours(iterator):
            calls.append(1)
            return stock(iterator)

        class Install(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                train_function.install_train_function(self.model, ours, stock)

        x, y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[Install()])
        assert len(calls) == 2, "fit no longer looks self.train_function up for each batch"
        model.fit(x, y, batch_size=4, verbose=0)
        assert len(calls) == 2, "fit no longer begins with make_train_function: ours stays installed"
        assert model.train_function is stock

    def test_remove_train_function(self):
        model = dense_model()
        stock = train_function.train_function_of(model)
        train_function.install_train_function(model, print, stock)
        assert model.train_function is print
        train_function.remove_train_function(model)
        assert model.train_function is stock
        assert "make_train_function" not in vars(model), "the model's own make_train_function stays shadowed"
        train_function.remove_train_function(model)
        train_function.install_train_function(model, print, stock)
        model.train_function = max
        train_function.remove_train_function(model)
        assert model.train_function is max, "a train function set by someone else must be kept"

    def test_untraced_copy(self):
        function = tf.function(lambda x: x, input_signature=[tf.TensorSpec((None, 2))], reduce_retracing=True)
        function(tf.ones((3, 2)))
        copy = tf_functions.untraced_copy(function)
        assert copy.experimental_get_tracing_count() == 0, (
            "Function._clone keeps traces: nothing is rewritten"
        )
        assert copy.input_signature == function.input_signature
        assert copy.python_function is function.python_function

    def test_compiles_with_xla(self):
        assert tf_functions.compiles_with_xla(tf.function(abs, jit_compile=True)), (
            "Function lost _jit_compile"
        )
        assert not tf_functions.compiles_with_xla(tf.function(abs))
        assert not tf_functions.compiles_with_xla(None)

    def test_shapes_of(self):
        floats, ints = tf.float32.as_datatype_enum, tf.int64.as_datatype_enum
        values = (
            np.ones((2, 3), "float32"),
            {"a": tf.ones((2, 3)), "b": tf.constant(1, tf.int64), "c": None},
        )
        assert nests.shapes_of(values) == ((floats, (2, 3)), (ints, ()))
        rows = tf.ragged.constant([[1.0], [2.0, 3.0]])
        assert (floats, (3,)) in nests.shapes_of(rows)

    def test_is_iterator(self):
        data = tf.data.Dataset.range(3)
        assert iterators.is_iterator(iter(data))
        assert not iterators.is_iterator(data)
        assert not iterators.is_iterator(iter([1]))

    def test_take(self):
        iterator = iter(tf.data.Dataset.range(3))
        assert [int(value) for value in iterators.take(iterator, 2)] == [0, 1]
        assert [int(value) for value in iterators.take(iterator, 2)] == [2], "take lost an element"

    def test_iterator_over(self):
        data = tf.data.Dataset.from_tensor_slices(np.arange(7.0)).batch(4)
        iterator = iter(data)
        total = tf.function(lambda it: tf.reduce_sum(next(it)))
        again = iterators.iterator_over(iterators.take(iterator, 2), iterator)
        assert [float(total(again)), float(total(again))] == [6.0, 15.0]
        total(iter(data))
        assert total.experimental_get_tracing_count() == 1, "the first batch would run in a trace of its own"


class TestPlugin:
    """grappler_passes/plugin/compat.py"""

    def test_load_library(self):
        """Loading itself is tested in test_plugin_process.py: a second library ends the process."""
        with pytest.raises(tf.errors.NotFoundError):
            runtime.load_library("/no/such/library.so")

    def test_has_gpu(self):
        assert runtime.has_gpu() is bool(tf.config.list_physical_devices("GPU"))

    def test_runtime_devices(self):
        assert "/job:localhost/replica:0/task:0/device:CPU:0" in runtime.runtime_devices(), (
            "full device names changed: the check of an answer's devices would refuse every graph"
        )

    def test_func_graph_transforms(self):
        seen = []
        transforms = traced_functions.func_graph_transforms()
        transforms.append(seen.append)
        try:
            tf.function(lambda x: x + 1.0)(tf.constant(1.0))
        finally:
            transforms.remove(seen.append)
        assert seen, "FUNC_GRAPH_TRANSFORMS is no longer called: no graph is marked, nothing is rewritten"
        assert hasattr(seen[0], "captures")
        assert hasattr(seen[0], "variables")

    def test_set_string_attr(self):
        with tf.Graph().as_default() as graph:
            op = tf.constant(1.0, name="one").op
            traced_functions.set_string_attr(op, "_ooo_test", "value")
        node = graph.as_graph_def().node[0]
        assert node.attr["_ooo_test"].s == b"value", "Operation._set_attr no longer writes into the graph"

    def test_has_gradient(self):
        assert keras_values.has_gradient(tf.bfloat16)
        assert keras_values.has_gradient("complex64")
        assert not keras_values.has_gradient(tf.int64), "Keras 2's counters of steps would count as weights"

    @needs_keras_3
    def test_variable_of_keras(self):
        variable = keras.Variable([1.0], name="v")
        assert isinstance(keras_values.variable_of_keras(variable), tf.Variable), (
            "keras.Variable._value is no longer the tf.Variable: frozen layers are not recognized"
        )
        own = tf.Variable(1.0)
        assert keras_values.variable_of_keras(own) is own

    def test_path_of_keras(self):
        assert keras_values.path_of_keras(tf.Variable(1.0, name="v")) is None
        path = keras_values.path_of_keras(dense_model().layers[0].kernel)
        keras_2 = versions.is_keras_2(keras)
        assert path is None if keras_2 else path.endswith("/kernel"), "variables lost Keras' own names"

    def test_op_def(self):
        assert op_types.op_def("MatMul").input_arg[0].name == "a"
        assert op_types.op_def("NoSuchOpAnywhere") is None

    def test_tensor_proto(self):
        assert tf.make_ndarray(graph_protos.tensor_proto("text")) == b"text"
        assert not tf.make_ndarray(graph_protos.tensor_proto(False))

    @pytest.mark.parametrize("device", ["/job:localhost/replica:0/task:0/device:GPU:1", ""])
    def test_host_device(self, device):
        wanted = device.replace("GPU:1", "CPU:0") or "/device:CPU:0"
        assert runtime.host_device(device) == wanted

    def test_parse_graph_def(self):
        _, function = square_step()
        graph_def = function.graph.as_graph_def()
        parsed = graph_protos.parse_graph_def(graph_def.SerializeToString())
        assert parsed == graph_def
        with pytest.raises(Exception, match="(?i)pars|decod"):
            graph_protos.parse_graph_def(b"no graph")

    def test_is_graph_def(self):
        assert graph_protos.is_graph_def(tf.compat.v1.GraphDef())
        assert not graph_protos.is_graph_def(b"")
        assert not graph_protos.is_graph_def(tf.compat.v1.NodeDef())


def test_packed_nests():
    values = ({"x": tf.constant(1.0), "n": None, "k": 3}, [np.zeros((2,), "int32")])
    packed = Packed(values)
    assert [spec.shape.as_list() for spec in packed.specs] == [[], [2]]
    again = packed.unpack([tf.constant(5.0), tf.constant([1, 2])])
    assert float(again[0]["x"]) == 5.0
    assert again[0]["k"] == 3
    assert nests.signature(values) == nests.signature(packed.unpack(packed.tensors))
    assert nests.signature(values) != nests.signature(({**values[0], "k": 4}, values[1]))
