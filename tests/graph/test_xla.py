"""Compiled steps with dW on side streams: equal numbers, calls that survive XLA, reasons for what stays."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from xla_steps import ASKED, TOLERANCE, assert_near, plain_step, small, step_of, uncompilable

import tf_ooo
from grappler_passes.passes.base import tensor
from tests import zoo
from tf_ooo.compat import nests, xla
from tf_ooo.costs.table import GainTable
from tf_ooo.errors import GraphError, MemoryLimitError, OptionsError
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.compiled.controller import JOINT, RECOMPUTED, ways
from tf_ooo.modes.compiled.session import CONCURRENT_FLAGS, StreamSession
from tf_ooo.modes.compiled.step import StreamStep, Way

pytestmark = [zoo.needs_xla_streams, pytest.mark.takes(80)]


def fitted(build, callback=None, epochs=2, optimizer="momentum", batch_size=6, compile_options=None):
    """The model and its losses."""
    model, x, y = zoo.compiled(build, optimizer, jit_compile=True, **(compile_options or {}))
    zoo.make_variables(model, x, y)
    callbacks = [] if callback is None else [callback]
    history = model.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    )
    return model, history.history


@functools.cache
def stock_fit(build, optimizer):
    """(weights, losses) of the stock step: the same for all tests."""
    model, history = fitted(build, optimizer=optimizer)
    return model.get_weights(), history


@functools.cache
def differences(build, optimizer="momentum", **options):
    """(largest difference of a weight, the callback); what is compiled once serves several tests."""
    stock, stock_history = stock_fit(build, optimizer)
    callback = tf_ooo.OOOBackprop(**{**ASKED, **options})
    ours, history = fitted(build, callback, optimizer=optimizer)
    np.testing.assert_allclose(history["loss"], stock_history["loss"], rtol=1e-4)
    pairs = zip(stock, ours.get_weights(), strict=True)
    return max(float(np.abs(a.astype(float) - b).max(initial=0)) for a, b in pairs), callback


class MixedModel(zoo.TiedModel):
    """Tied, regularized and frozen weights in one model."""

    def __init__(self):
        super().__init__()
        self.regular = layers.Dense(
            7, activation="relu", kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2"
        )
        self.frozen = layers.Dense(8, activation="relu", trainable=False)

    def call(self, x):
        h = self.frozen(self.regular(self.hidden(self.embedding(x))))
        return tf.reduce_mean(tf.matmul(h, self.embedding.embeddings, transpose_b=True), axis=1)


def mixed():
    return MixedModel(), *zoo.tied()[1:]


def unrolled():
    """Two steps of each: XLA compiles every one."""
    return zoo.stack(
        zoo.tokens(2),
        layers.Embedding(11, 8),
        layers.LSTM(6, return_sequences=True, unroll=True),
        layers.GRU(5, unroll=True),
    )


class TestNumbers:
    @pytest.mark.parametrize(("name", "streams"), [("convolutions", 2), ("attention", 1)])
    def test_weights_are_those_of_the_stock_step(self, name, streams):
        difference, callback = differences(zoo.SMALL[name], streams=streams)
        assert callback.report.moved_ops, callback.report.notes
        assert not callback.report.fell_back
        assert difference <= TOLERANCE

    @pytest.mark.slow
    @pytest.mark.parametrize("build", [unrolled, zoo.lstm_gru, zoo.residual, mixed])
    def test_weights_of_more_networks(self, build):
        difference, callback = differences(build)
        assert callback.report.moved_ops, callback.report.notes
        assert difference <= TOLERANCE

    @pytest.mark.parametrize(
        ("optimizer", "store"),
        [("global_clip_norm", "backward"), pytest.param("adam", "none", marks=pytest.mark.slow)],
    )
    def test_optimizers_streams_and_ways_to_store_activations(self, optimizer, store):
        difference, callback = differences(zoo.mlp, optimizer, streams=2, store_activations=store)
        assert callback.report.moved_ops, callback.report.notes
        assert difference <= TOLERANCE
        assert {stream for _, stream in callback.report.planned.lanes} == {0, 1, 2}

    @pytest.mark.parametrize("optimizer", zoo.optimizers("accumulation", "ema", "loss_scale"))
    def test_updates_inside_a_conditional(self, optimizer):
        """Some steps skip the update: XLA gets it as a whole, with all gradients as its inputs."""
        difference, callback = differences(small, optimizer)
        assert callback.report.moved_ops, callback.report.notes
        assert difference <= TOLERANCE

    def test_a_function(self):
        weights = []
        for decorate in (tf.function(jit_compile=True), tf_ooo.function(jit_compile=True, **ASKED)):
            model, plain, x, y = plain_step()
            step = decorate(plain)
            for size in (4, 4, 3):
                out = step(x[:size], y=y[:size])
            assert out["none"] is None
            assert int(out["count"]) == 3
            weights.append(model.get_weights())
        assert step.report.moved_ops
        assert_near(*weights)


class TestSideUpdates:
    """Ops that lead from dW to one tensor of the update are part of the call."""

    @pytest.mark.parametrize(
        ("optimizer", "rides"),
        [
            (lambda: keras.optimizers.SGD(0.1), "AssignSubVariableOp"),  # up to the new weight
            (lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01), "sub"),  # the velocity
            (lambda: keras.optimizers.Adam(0.1), ""),  # dW has two readers
            (lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1), ""),  # it needs all other dW
        ],
        ids=["descent", "momentum", "adam", "global_norm"],
    )
    def test_as_far_as_one_result_goes(self, optimizer, rides):
        options = Options(schedule="multi_stream", any_platform=True, side_updates=True)
        weights = []
        for ours in (False, True):
            model, plain, x, y = plain_step(optimizer())
            stock = tf.function(plain, jit_compile=True)
            step = StreamStep(plain, stock, StreamSession(options), ways(options)[0]) if ours else stock
            for _ in range(2):
                step(tf.constant(x), tf.constant(y))
            weights.append(model.get_weights())
        assert_near(*weights)
        assert step.session.failure() is None
        (compiled,) = step._made.values()
        assert compiled.step_graph.calls
        functions = [
            f for f in compiled.step_graph.graph_def.library.function if "ooo_dW" in f.signature.name
        ]
        assert len(functions) == len(compiled.step_graph.calls)
        ops = [node.op for function in functions for node in function.node_def if node.op != "Const"]
        assert compiled.step_graph.result.moved_ops == len(ops)
        for call in compiled.step_graph.calls:
            (result,) = call.region.outputs
            assert (len(call.region.own) > 1) == bool(rides)
            assert rides in result[0] or rides in result[0].lower()


def assert_held_back(calls, nodes):
    """The first input of a call that waits passes a barrier together with what the call waits for."""
    held = [call for call in calls if call.waits_for]
    assert held
    assert {name for name in nodes if name.endswith("_after")} == {f"{call.name}_after" for call in held}
    for call in held:
        barrier = nodes[f"{call.name}_after"]
        assert barrier.op == "XlaOptimizationBarrier"
        assert nodes[call.name].input[0] == barrier.name
        through = [nodes[text].input[0] if "ooo_stored" in text else text for text in barrier.input]
        assert through == [tensor(*port) for port in (call.region.inputs[0], *call.waits_for)]


TOGETHER = {"steps_per_execution": 2}


@pytest.fixture(scope="module")
def stock_in_twos():
    """(weights, losses) of the stock step, two steps an execution."""
    model, losses = fitted(zoo.mlp, batch_size=2, compile_options=TOGETHER)
    return model.get_weights(), losses


class TestSeveralSteps:
    @pytest.mark.parametrize("region", ["F:0", "F:1"])
    def test_weight_gradients_wait_for_the_next_forward_pass(self, tmp_path, region, stock_in_twos):
        """dW of the last layer is to run beside the next step's first or second layer."""
        gains = GainTable({(region, 3): 1.0, ("dO:1", 2): 1.0}).save(tmp_path / "gains.json")
        callback = tf_ooo.OOOBackprop(**ASKED, gains=gains, unroll=2)
        weights, losses = stock_in_twos
        ours, our_losses = fitted(zoo.mlp, callback, batch_size=2, compile_options=TOGETHER)
        np.testing.assert_allclose(our_losses["loss"], losses["loss"], rtol=1e-4)
        assert_near(weights, ours.get_weights())
        steps = callback._life.mode.controller.rewritten.steps
        (compiled,) = steps._made.values()
        delayed = [call.name for call in compiled.step_graph.calls if call.delayed]
        assert delayed == ["ooo_dW_s0_3_0"], "only the first of two steps has a next one"
        nodes = {node.name: node for node in compiled.step_graph.graph_def.node}
        assert "ooo_dW_s0_3_0" not in nodes["ooo_join_0"].input
        assert "ooo_dW_s1_3_0" in nodes["ooo_join_1"].input
        (waits,) = [call.waits_for for call in compiled.step_graph.calls if call.delayed]
        assert waits, "it runs beside the forward pass, not beside this step's backward pass"
        assert_held_back(compiled.step_graph.calls, nodes)


class TestHlo:
    def test_calls_keep_their_streams_through_optimization(self):
        _, callback = differences(zoo.convolutions, streams=2)
        step = callback._life.mode.controller.rewritten.step
        for compiled in step._made.values():
            wanted = [call.stream for call in compiled.step_graph.calls]
            assert len(wanted) == 4
            for stage in ("hlo", "optimized_hlo"):
                hlo = xla.hlo_of(compiled._run, compiled.inputs.specs, stage)
                assert sorted(xla.stream_calls(hlo)) == sorted(wanted), stage
        notes = "\n".join(callback.report.notes)
        assert "dW stays on the main stream: it has no matrix product" in notes


class TestFallback:
    def test_without_streams_the_stock_step_runs(self):
        callback = tf_ooo.OOOBackprop()
        fitted(zoo.one_layer, callback, epochs=1)
        assert "compiles for CPU" in callback.report.fallback_reason

    @pytest.mark.parametrize(
        ("broken", "said"),
        [("version", "TensorFlow 2.18.1: its XLA inlines calls"), ("op", "has no xla_optimization_barrier")],
    )
    def test_a_tensorflow_that_lacks_what_is_needed(self, monkeypatch, broken, said):
        """An older one says so, and one without the op; the stock step trains."""
        from tensorflow.compiler.tf2xla.ops import gen_xla_ops

        if broken == "version":
            monkeypatch.setattr(tf, "__version__", "2.18.1")
        else:
            monkeypatch.delattr(gen_xla_ops, "xla_optimization_barrier")
        _, plain, x, y = plain_step()
        step = tf_ooo.function(plain, jit_compile=True, any_platform=True)
        assert float(step(tf.constant(x), tf.constant(y))["loss"]) > 0
        assert step.report.fell_back
        assert said in step.report.fallback_reason

    def test_an_op_that_xla_knows_nothing_of(self):
        """The user's own compiled step cannot run either: the error is TensorFlow's and names the op."""
        _, plain, x, y = plain_step()

        def step(x, y):
            return plain(tf.ensure_shape(tf.numpy_function(np.asarray, [x], tf.float32), x.shape), y)

        for options in ({"schedule": "multi_stream"}, {}):
            ours = tf_ooo.function(step, jit_compile=True, any_platform=True, **options)
            with pytest.raises(tf.errors.InvalidArgumentError, match="PyFunc"):
                ours(tf.constant(x), tf.constant(y))

    def test_named_orders_are_those_of_the_graph_executor(self):
        with pytest.raises(OptionsError, match="orders the graph executor"):
            fitted(zoo.one_layer, tf_ooo.OOOBackprop(schedule="in_order", strict=True), epochs=1)
        model, x, y = zoo.compiled(zoo.one_layer)
        callback = tf_ooo.OOOBackprop(schedule="multi_stream", strict=True)
        with pytest.raises(GraphError, match="needs jit_compile=True"):
            model.fit(x, y, callbacks=[callback], verbose=0)

    def test_open_shapes(self):
        keras.utils.set_random_seed(1)
        model, x, y = zoo.mlp()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        inner = tf.function(step_of(model, optimizer), jit_compile=True)

        def open_step(x, y):
            keep = tf.where(y >= 0)  # a size that only the data tell
            return inner(tf.gather(x, keep[:, 0]), tf.gather(y, keep[:, 0]))

        step = tf_ooo.function(open_step, jit_compile=True, **(ASKED | {"strict": False}))
        step(x, y)
        step(x, y)
        assert step.report.fell_back
        assert "hidden inside StatefulPartitionedCall" in step.report.fallback_reason

    def test_an_input_of_open_shape(self):
        _, plain, x, y = plain_step()
        step = tf_ooo.function(plain, jit_compile=True, **(ASKED | {"strict": False}))
        specs = [tf.TensorSpec((None, 7)), tf.TensorSpec((None,), tf.int64)]
        whole = tf.function(step, input_signature=specs, autograph=False)
        assert float(whole(x, y)["loss"]) > 0
        assert "an input of open shape" in step.report.fallback_reason
        assert "(None, 7)" in step.report.fallback_reason

    def test_sizes_that_only_the_data_tell(self):
        _, plain, x, y = plain_step()

        def masked(x, y):
            keep = tf.where(y >= 0)[:, 0]
            return plain(tf.gather(x, keep), tf.gather(y, keep))

        step = tf_ooo.function(masked, jit_compile=True, **(ASKED | {"strict": False}))
        assert float(step(tf.constant(x), tf.constant(y))["loss"]) > 0
        assert "sizes that are known only when the step runs" in step.report.fallback_reason

    def test_random_state_of_an_op(self):
        _, plain, x, y = plain_step()
        noisy = tf_ooo.function(
            lambda x, y: plain(x + tf.random.normal(x.shape), y),
            jit_compile=True,
            any_platform=True,
            compare=True,
        )
        for _ in range(5):  # stock, and the four ways that are compared with it
            noisy(x, y)
        assert "draws random numbers" in noisy.report.fallback_reason

    def test_what_xla_cannot_compile(self):
        """The graph lowers to HLO, but XLA's backend knows no such custom call."""
        model, plain, x, y = plain_step()
        options = Options(schedule="multi_stream", any_platform=True)
        session = StreamSession(options)

        rewrite = uncompilable(ways(options)[0].rewrite)
        step = StreamStep(plain, tf.function(plain, jit_compile=True), session, Way(rewrite))
        before = model.get_weights()
        assert float(step(tf.constant(x), tf.constant(y))["loss"]) > 0
        assert "nobody_knows" in session.failure()
        again = float(step(tf.constant(x), tf.constant(y))["loss"])
        assert again > 0
        assert not np.array_equal(before[0], model.get_weights()[0])

    def test_concurrency_that_the_process_asks_for_is_not_compared_with_itself(self, monkeypatch):
        monkeypatch.setattr(xla, "flags_of_process", lambda: " ".join(CONCURRENT_FLAGS))
        names = [way.name for way in ways(Options(any_platform=True))]
        assert names == ["rewritten", JOINT, RECOMPUTED]


class TestMemoryLimit:
    """XLA is asked what each step needs before one of them runs."""

    def test_no_way_stays_within_it(self):
        model, x, y = zoo.compiled(small, "momentum", jit_compile=True)
        zoo.make_variables(model, x, y)
        before = model.get_weights()
        callback = tf_ooo.OOOBackprop(any_platform=True, memory_limit_bytes=1000)
        with pytest.raises(MemoryLimitError, match="memory_limit_bytes=1000: even the lowest peak") as raised:
            model.fit(x, y, batch_size=6, epochs=1, verbose=0, callbacks=[callback])
        for one, two in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, two)
        weights_bytes = sum(weight.nbytes for weight in before)
        assert raised.value.smallest_bytes > 2 * weights_bytes, "weights and momentum at least"

    def test_what_stays_within_it_runs(self):
        options = Options(schedule="multi_stream", any_platform=True, memory_limit_bytes=10**6)
        session = StreamSession(options)
        _, plain, x, y = plain_step()
        step = StreamStep(plain, tf.function(plain, jit_compile=True), session, ways(options)[0])
        inputs = (tf.constant(x), tf.constant(y))
        assert float(step(*inputs)["loss"]) > 0
        assert session.failure() is None
        assert 0 < session.stock_peak_bytes <= 10**6
        assert session.modules["rewritten"].total_bytes <= 10**6

    def test_only_the_stock_step_stays_within_it(self):
        """The stock step's bytes are set to less than it needs: no small network differs enough."""
        options = Options(schedule="multi_stream", any_platform=True, memory_limit_bytes=1000)
        session = StreamSession(options)
        _, plain, x, y = plain_step()
        inputs = (tf.constant(x), tf.constant(y))
        session.stock_bytes[nests.signature((inputs, {}))] = 900
        step = StreamStep(plain, tf.function(plain, jit_compile=True), session, ways(options)[0])
        assert float(step(*inputs)["loss"]) > 0
        assert "above memory_limit_bytes=1000; the stock step needs 900" in session.failure()
        assert "rewritten" not in session.modules
