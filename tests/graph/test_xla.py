"""Compiled steps with dW on side streams: equal numbers, calls that survive XLA, reasons for what stays."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests import zoo
from tf_ooo.errors import GraphError, OptionsError
from tf_ooo.options import Options
from tf_ooo.xla import compat
from tf_ooo.xla.controller import rewriters
from tf_ooo.xla.gains import GainTable
from tf_ooo.xla.session import StreamSession
from tf_ooo.xla.step import StreamStep

# XLA compiles the two graphs on their own and may merge other ops.  Seen on x86: 0 with momentum, 7e-8
# after ten steps of Adam on convolutions.
TOLERANCE = 1e-6
ASKED = {"schedule": "multi_stream", "any_platform": True, "profile_steps": 0, "strict": True}


def fitted(build, callback=None, epochs=2, optimizer="momentum", batch_size=6, compile_options=None):
    """The model and its losses."""
    model, x, y = zoo.compiled(build, optimizer, jit_compile=True, **(compile_options or {}))
    callbacks = [] if callback is None else [callback]
    history = model.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    )
    return model, history.history


def differences(build, optimizer="momentum", **options):
    """(largest difference of a weight, the callback)."""
    stock, stock_history = fitted(build, optimizer=optimizer)
    callback = tf_ooo.OOOBackprop(**{**ASKED, **options})
    ours, history = fitted(build, callback, optimizer=optimizer)
    np.testing.assert_allclose(history["loss"], stock_history["loss"], rtol=1e-4)
    pairs = zip(stock.get_weights(), ours.get_weights(), strict=True)
    return max(float(np.abs(a.astype(float) - b).max(initial=0)) for a, b in pairs), callback


class TestNumbers:
    @pytest.mark.parametrize("name", ["convolutions", "attention"])
    def test_weights_are_those_of_the_stock_step(self, name):
        difference, callback = differences(zoo.SMALL[name])
        assert callback.report.moved_ops, callback.report.notes
        assert not callback.report.fell_back
        assert difference <= TOLERANCE

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name", ["unrolled_rnn", "lstm_gru", "residual", "tied", "regularized", "frozen_layer"]
    )
    def test_weights_of_more_networks(self, name):
        difference, callback = differences(zoo.SMALL[name])
        assert callback.report.moved_ops, callback.report.notes
        assert difference <= TOLERANCE

    @pytest.mark.parametrize(
        "optimizer",
        ["global_clip_norm", pytest.param("adam", marks=pytest.mark.slow)],
    )
    def test_optimizers(self, optimizer):
        difference, _ = differences(zoo.mlp, optimizer)
        assert difference <= TOLERANCE

    @pytest.mark.slow
    def test_gradients_that_are_accumulated_stay_in_the_stock_step(self):
        # They are read inside a conditional, which XLA gets as a whole.
        with pytest.raises(tf_ooo.GraphError, match="no weight gradient can run on a stream"):
            differences(zoo.mlp, "accumulation")

    @pytest.mark.parametrize("store", ["backward", pytest.param("none", marks=pytest.mark.slow)])
    def test_several_streams_and_ways_to_store_activations(self, store):
        difference, callback = differences(zoo.mlp, streams=2, store_activations=store)
        assert difference <= TOLERANCE
        assert {stream for _, stream in callback.report.planned.lanes} == {0, 1, 2}

    def test_a_function(self):
        weights = []
        for decorate in (tf.function(jit_compile=True), tf_ooo.function(jit_compile=True, **ASKED)):
            keras.utils.set_random_seed(1)
            model, x, y = zoo.mlp()
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
            step = decorate(_step_of(model, optimizer))
            for size in (4, 4, 3):
                out = step(x[:size], y=y[:size])
            assert out["none"] is None
            assert int(out["count"]) == 3
            weights.append(model.get_weights())
        assert step.report.moved_ops
        for one, two in zip(*weights, strict=True):
            np.testing.assert_allclose(one, two, atol=TOLERANCE)


def _step_of(model, optimizer):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": loss, "count": 3, "none": None}

    return step


def _plain_step():
    """An MLP, a step of it, and a batch."""
    keras.utils.set_random_seed(1)
    model, x, y = zoo.mlp()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    return model, _step_of(model, optimizer), x, y


class TestSeveralSteps:
    def test_weight_gradients_wait_for_the_next_forward_pass(self, tmp_path):
        """dW of the last layer is to run beside the next step's second layer."""
        gains = GainTable({("F:1", 3): 1.0, ("dO:1", 2): 1.0}).save(tmp_path / "gains.json")
        callback = tf_ooo.OOOBackprop(**ASKED, gains=gains, unroll=2)
        together = {"steps_per_execution": 2}
        stock, losses = fitted(zoo.mlp, batch_size=2, compile_options=together)
        ours, our_losses = fitted(zoo.mlp, callback, batch_size=2, compile_options=together)
        np.testing.assert_allclose(our_losses["loss"], losses["loss"], rtol=1e-4)
        for one, two in zip(stock.get_weights(), ours.get_weights(), strict=True):
            np.testing.assert_allclose(one, two, atol=TOLERANCE)
        steps = callback._session.controller.rewritten.steps
        (compiled,) = steps._made.values()
        delayed = [call.name for call in compiled.made.calls if call.delayed]
        assert delayed == ["ooo_dW_s0_3_0"], "only the first of two steps has a next one"


class TestHlo:
    def test_calls_keep_their_streams_through_optimization(self):
        callback = tf_ooo.OOOBackprop(**ASKED, streams=2)
        fitted(zoo.convolutions, callback, epochs=1)
        step = callback._session.controller.rewritten.step
        for compiled in step._made.values():
            wanted = [call.stream for call in compiled.made.calls]
            assert len(wanted) == 4
            for stage in ("hlo", "optimized_hlo"):
                hlo = compat.hlo_of(compiled._run, compiled.inputs.specs, stage)
                assert sorted(compat.stream_calls(hlo)) == sorted(wanted), stage
        notes = "\n".join(callback.report.notes)
        assert "dW stays on the main stream: it has no matrix product" in notes


class TestFallback:
    def test_without_streams_the_stock_step_runs(self):
        callback = tf_ooo.OOOBackprop()
        fitted(zoo.mlp, callback, epochs=1)
        assert "compiles for CPU" in callback.report.fallback_reason

    def test_named_orders_are_those_of_the_graph_executor(self):
        with pytest.raises(OptionsError, match="orders the graph executor"):
            fitted(zoo.mlp, tf_ooo.OOOBackprop(schedule="in_order", strict=True), epochs=1)
        model, x, y = zoo.compiled(zoo.mlp)
        callback = tf_ooo.OOOBackprop(schedule="multi_stream", strict=True)
        with pytest.raises(GraphError, match="needs jit_compile=True"):
            model.fit(x, y, callbacks=[callback], verbose=0)

    def test_open_shapes(self):
        keras.utils.set_random_seed(1)
        model, x, y = zoo.mlp()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        inner = tf.function(_step_of(model, optimizer), jit_compile=True)

        def open_step(x, y):
            keep = tf.where(y >= 0)  # a size that only the data tell
            return inner(tf.gather(x, keep[:, 0]), tf.gather(y, keep[:, 0]))

        step = tf_ooo.function(open_step, jit_compile=True, any_platform=True)
        step(x, y)
        step(x, y)
        assert step.report.fell_back
        assert step.report.fallback_reason

    def test_random_state_of_an_op(self):
        _, plain, x, y = _plain_step()
        noisy = tf_ooo.function(
            lambda x, y: plain(x + tf.random.normal(x.shape), y), jit_compile=True, any_platform=True
        )
        for _ in range(3):
            noisy(x, y)
        assert "draws random numbers" in noisy.report.fallback_reason

    def test_no_training_step(self):
        square = tf_ooo.function(lambda x: x * x, jit_compile=True, any_platform=True)
        for _ in range(3):
            assert float(square(tf.constant(3.0))) == 9.0
        assert "not a training graph" in square.report.fallback_reason

    def test_what_xla_cannot_compile(self):
        """The graph lowers to HLO, but XLA's backend knows no such custom call."""
        model, plain, x, y = _plain_step()
        options = Options(schedule="multi_stream", any_platform=True)
        session = StreamSession(options)

        def rewrite(graph_def, fetches):
            made = rewriters(options)["rewritten"](graph_def, fetches)
            unknown = made.graph_def.node.add(name="unknown", op="XlaCustomCallV2", input=[made.fetches[1]])
            unknown.attr["operand_dtypes"].list.type.append(tf.float32.as_datatype_enum)
            unknown.attr["result_dtypes"].list.type.append(tf.float32.as_datatype_enum)
            unknown.attr["result_shapes"].list.shape.add()
            unknown.attr["call_target_name"].s = b"nobody_knows"
            unknown.attr["backend_config"].s = b""
            unknown.attr["has_side_effect"].b = False
            return dataclasses.replace(made, fetches=(made.fetches[0], "unknown:0"))

        step = StreamStep(plain, tf.function(plain, jit_compile=True), session, rewrite)
        before = model.get_weights()
        assert float(step(tf.constant(x), tf.constant(y))["loss"]) > 0
        assert "nobody_knows" in session.failure()
        again = float(step(tf.constant(x), tf.constant(y))["loss"])
        assert again > 0
        assert not np.array_equal(before[0], model.get_weights()[0])

    def test_auto_compares_and_keeps_one(self):
        callback = tf_ooo.OOOBackprop(any_platform=True, profile_steps=1)
        fitted(zoo.mlp, callback, epochs=10)
        assert not callback.report.undecided
        assert callback.report.stock_step_s is not None
        assert any(note.startswith("compared: stock") for note in callback.report.notes)
