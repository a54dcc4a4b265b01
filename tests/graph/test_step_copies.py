"""A step that is traced once and copied: the bits of Keras' own train function, for every kind of op."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.models import Network
from tests import zoo
from tests.graph.pipeline_models import DoubledByPython
from tests.same_bits import same, values_of, variables_of
from tf_ooo.tracing.flat import CopiedStep, StepSource, Unrolled

ROWS, STEPS = 8, 4


def encoder_and_data():
    """Its sums over several gradients were added in another order when steps were traced flat."""
    keras.backend.clear_session()  # summands are sorted by name: the same layer names each time
    keras.utils.set_random_seed(2)
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 20}
    model = Network("encoder", 1, (6,), sizes, classes=4).build()
    x = np.random.default_rng(1).integers(0, 20, (STEPS * ROWS, 6)).astype("int32")
    return model, x, (x.sum(1) % 4).astype("int64")


def numpy_function_and_data():
    keras.backend.clear_session()
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7), DoubledByPython(), keras.layers.Dense(4)]
    )
    return model, *features()


def loop_and_data():
    keras.backend.clear_session()
    keras.utils.set_random_seed(2)
    layers = keras.layers
    inner = [layers.Reshape((5, 1)), layers.GRU(6), layers.Dropout(0.3, seed=3), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((5,)), *inner, layers.Dense(4)]), *features()


def features():
    random = np.random.default_rng(1)
    return random.normal(size=(STEPS * ROWS, 5)).astype("float32"), random.integers(0, 4, STEPS * ROWS)


def compiled(made, optimizer=None):
    model, x, y = made
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or keras.optimizers.Adam(0.01, global_clipnorm=0.7)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model, x, y


def batches_of(x, y):
    return list(tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS))


def spec_of(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS).element_spec


# Keras 2's GRU and Dropout draw random numbers from a state of their own, and are not copied.
LOOP = pytest.param(loop_and_data, marks=zoo.needs_keras_3)


@pytest.mark.parametrize("make", [encoder_and_data, numpy_function_and_data, LOOP])
def test_copies_give_the_bits_of_keras_own_steps(make):
    """Nothing is rewritten, there is no request: what is asked is whether a copied step is Keras' step."""
    model, x, y = compiled(make())
    if zoo.KERAS_3:
        zoo.make_variables(model, x, y)
    start = values_of(model)
    history = model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history
    stock = values_of(model)
    for name, value in start.items():
        variables_of(model)[name].assign(value)
    logs = Unrolled(StepSource(model, lambda step: step, spec_of(x, y)), 2)(batches_of(x, y))
    assert {key: float(value) for key, value in logs.items()} == {k: v[-1] for k, v in history.items()}
    assert not same(stock, start)
    assert same(values_of(model), stock)


def test_the_train_step_runs_once_in_python_whatever_the_number_of_functions():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
    model, x, y = compiled((model, *features()), "sgd")
    calls = []

    def wrap(step):
        def counted(data):
            calls.append(1)
            return step(data)

        return counted

    source = StepSource(model, wrap, spec_of(x, y))
    source.trace()
    calls.clear()  # one more where variables are made
    Unrolled(source, 3)(batches_of(x, y))  # a function of three steps and one of one
    assert not calls
    assert int(model.optimizer.iterations.numpy()) == STEPS


def test_steps_with_random_numbers_of_their_own_are_not_copied():
    tf.random.set_seed(5)
    keras.utils.set_random_seed(5)

    class Noise(keras.layers.Layer):
        def call(self, x):
            noise = tf.random.uniform(tf.shape(x))
            seen.append(noise)
            return x + noise

    seen = []
    model = keras.Sequential([keras.Input((5,)), Noise(), keras.layers.Dense(4)])
    model, x, y = compiled((model, *features()), "sgd")
    seen.clear()
    Unrolled(StepSource(model, lambda step: step, spec_of(x, y)), 3)(batches_of(x, y))
    seeds = {noise.op.get_attr("seed2") for noise in seen if noise.op.type == "RandomUniform"}
    assert len(seeds) >= 3


def test_a_copy_has_one_scope_attributes_and_control_edges_of_its_own():
    variable = tf.Variable(1.0)

    def step(batch):
        variable.assign_add(batch["a"])
        return {"now": variable.read_value(), "nothing": None, "given": batch["a"]}

    copied = CopiedStep(step, {"a": tf.TensorSpec((), tf.float32)})

    @tf.function
    def twice(a):
        return [copied({"a": a}, f"copy_{i}", {"_ooo_step": i}) for i in range(2)]

    one, two = twice(tf.constant(2.0))
    assert (float(one["now"]), float(two["now"]), float(two["given"])) == (3.0, 5.0, 2.0)
    assert one["nothing"] is None
    graph = twice.get_concrete_function(tf.TensorSpec((), tf.float32)).graph
    assert [v.name for v in graph.variables] == [variable.name]
    marked = [op for op in graph.get_operations() if op.name.startswith("copy_1/")]
    assert {op.get_attr("_ooo_step") for op in marked} == {1}
    (reads,) = [op for op in marked if op.type == "AssignAddVariableOp"]
    assert any(other.name.startswith("copy_0/") for other in reads.control_inputs)
