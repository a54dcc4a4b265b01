"""tf.function: what an upgrade breaks."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import tensorflow as tf

from tests.graph.compat_models import square_step
from tf_ooo.compat import tf_functions


def test_plain_functions(caplog):
    """Python's conditions stay, and TensorFlow does not warn of many functions that are traced once."""
    body = lambda x: x + 1.0 if isinstance(x, tf.Tensor) else None  # noqa: E731
    for _ in range(8):
        assert tf_functions.plain_function(body)(tf.constant(1.0)) == 2.0
    assert "retracing" not in caplog.text, "Function._omit_frequent_tracing_warning is gone"
    once = tf_functions.plain_function(body, (tf.TensorSpec(()),))
    assert tf_functions.concrete_functions_of(once) == [once.get_concrete_function()]
    assert once.input_signature is not None
    assert tf_functions.compiles_with_xla(tf_functions.plain_function(body, compiled=True))
    concrete = tf_functions.concrete_function(body, [tf.TensorSpec(())])
    assert tf_functions.is_concrete_function(concrete)


def test_is_tf_function():
    weight, concrete = square_step()
    function = tf.function(lambda x: concrete(x) * 2.0)
    assert tf_functions.is_tf_function(function), "Function lost experimental_get_tracing_count"
    assert not tf_functions.is_tf_function(concrete)
    assert not tf_functions.is_tf_function(abs)
    counting = SimpleNamespace(experimental_get_tracing_count=lambda: 3)
    assert tf_functions.concrete_functions_of(counting) == [], "a function of ours that counts as one does"
    del weight


def test_is_concrete_function():
    weight, concrete = square_step()
    assert tf_functions.is_concrete_function(concrete), "ConcreteFunction lost an attribute"
    assert not tf_functions.is_concrete_function(tf.function(lambda x: x))
    assert not tf_functions.is_concrete_function(concrete.graph.as_graph_def())
    del weight


def test_untraced_copy():
    function = tf.function(lambda x: x, input_signature=[tf.TensorSpec((None, 2))], reduce_retracing=True)
    function(tf.ones((3, 2)))
    copy = tf_functions.untraced_copy(function)
    assert copy.experimental_get_tracing_count() == 0, "Function._clone keeps traces: nothing is rewritten"
    assert copy.input_signature == function.input_signature
    assert copy.python_function is function.python_function


def test_compiles_with_xla():
    assert tf_functions.compiles_with_xla(tf.function(abs, jit_compile=True)), "Function lost _jit_compile"
    assert not tf_functions.compiles_with_xla(tf.function(abs))
    assert not tf_functions.compiles_with_xla(None)


def test_decorated_methods_are_traced_anew():
    class Owner:
        @tf.function
        def read(self):
            return self.weight.read_value()

    one, other = Owner(), Owner()
    for owner in (one, other):
        owner.weight = tf.Variable(1.0)
        assert owner.read() == 1.0
        owner.weight = tf.Variable(2.0)
    tf_functions.forget_traces(one)
    assert one.read() == 2.0
    assert other.read() == 1.0  # as TensorFlow has it


def test_what_tf_function_was_given():
    class Owner:
        factor = 3.0

        @tf.function
        def scaled(self, x):
            if tf.reduce_sum(x) > 0.0:
                x = x * self.factor
            return x

    owner = Owner()
    inlined = tf_functions.undecorated(owner.scaled)
    tf_functions.forget_traces(owner)
    traced = tf.function(lambda x: inlined(x), autograph=False)
    assert traced(tf.constant(2.0)) == 6.0
    assert traced(tf.constant(-2.0)) == -2.0
    assert not [op for op in traced.get_concrete_function(tf.constant(2.0)).graph.get_operations()
                if op.type.endswith("PartitionedCall")]  # fmt: skip
    assert tf_functions.undecorated(len) is len


def test_traced_as_for_xla():
    """Loops are traced in another way then."""
    from tensorflow.python.ops import control_flow_util

    seen = []

    def step(x):
        seen.append(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
        return [x]

    tf_functions.concrete_function(step, [tf.TensorSpec(())], compiled=True)
    assert seen == [True]


def test_variables_made_at_once():
    """One trace; of a variable that is computed in the function two, as TensorFlow does it."""

    class Lazy:
        def __init__(self, initial):
            self.variable, self.initial, self.traces = None, initial, 0

        def __call__(self, x):
            self.traces += 1
            with tf_functions.variables_made_at_once():
                if self.variable is None:
                    self.variable = tf.Variable(self.initial(x), shape=(2,), dtype=tf.float32)
            return self.variable.assign_add([1.0, x])

    lazy = Lazy(lambda x: lambda: tf.constant([1.0, 2.0]))
    assert tf_functions.plain_function(lazy)(tf.constant(1.0)).numpy().tolist() == [2.0, 3.0]
    assert lazy.traces == 1, "tf.Variable lost experimental_enable_variable_lifting: steps are traced twice"
    assert lazy.variable.numpy().tolist() == [2.0, 3.0]
    inside = Lazy(lambda x: lambda: tf.stack([x, 2.0]))
    assert tf_functions.plain_function(inside)(tf.constant(1.0)).numpy().tolist() == [2.0, 3.0]
    assert inside.traces == 2


def test_functions_of():
    inner = tf.function(lambda x: x + 1)

    def around(x):
        return inner(x)

    assert tf_functions.functions_of(inner) == [inner]
    assert tf_functions.functions_of(around) == [inner], "Keras' train function closes over its tf.function"


def test_step_of_fit():
    an_inner = tf.function(lambda x: x + 1)
    an_outer = tf.function(lambda x: an_inner(x))

    def around(x, a=None):
        return an_outer(x) if a is None else an_inner(x)

    assert tf_functions.step_of_fit(around) is None
    around(tf.constant(1), 2)
    assert tf_functions.step_of_fit(around) is None, "train_on_batch calls the inner one alone"
    around(tf.constant(1.0))
    assert tf_functions.step_of_fit(around) is not None


def test_code_around_a_caller_s_is_left_as_written(caplog):
    """A walrus is what AutoGraph cannot convert; a condition on a tensor is what it has to."""
    turns = []

    @tf_functions.left_as_written
    def ours(function, x):
        while (turn := len(turns)) < 2:
            turns.append(turn)
        return tf_functions.as_in_the_caller(function)(x)

    def users(x):
        return x + 1.0 if x > 0.0 else x

    assert tf.function(lambda x: ours(users, x))(tf.constant(1.0)) == 2.0, "AutoGraph's interface is another"
    assert turns == [0, 1]
    assert "could not be transformed" not in caplog.text


def test_abandon():
    with mock.patch("tensorflow.python.client.session.tf_session.TF_CloseSession") as close:
        session = tf.compat.v1.Session(graph=tf.Graph())
        tf_functions.abandon(session)
        del session
        assert not close.called, "Session._closed: the end of a session waits for a worker that is lost"
        tf.compat.v1.Session(graph=tf.Graph()).close()
        assert close.called
