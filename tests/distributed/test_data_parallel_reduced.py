"""Train steps that reduce their gradients by themselves: whatever they do with them, it is not done twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

import tf_ooo
from tests.distributed import training as t
from tests.zoo import needs_keras_3
from tf_ooo.modes import data_parallel

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [pytest.mark.takes(50), needs_keras_3]
Gradients = list[Any]
on_each_engine = pytest.mark.parametrize("engine", [t.BY_HAND, t.COLLECTIVES], indirect=True)


_NUMBERS = itertools.count()


def summed(gradient: Any) -> Any:
    """Over all ranks, by whatever engine the test has."""
    engine, name = data_parallel.connect(), f"own_{next(_NUMBERS)}"
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = engine.gather_rows(gradient, name)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return engine.sum(gradient, name)


def all_summed(gradients: Gradients) -> Gradients:
    return [summed(gradient) for gradient in gradients]


def reshaped(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    flat = all_summed([tf.reshape(gradient, [-1]) for gradient in gradients])
    return [tf.reshape(part, gradient.shape) for part, gradient in zip(flat, gradients, strict=True)]


def in_one_buffer(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    total = summed(tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0))
    parts = tf.split(total, [gradient.shape.num_elements() for gradient in gradients])
    return [tf.reshape(part, gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]


def with_decay(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    return [part + 0.01 * weight for part, weight in zip(all_summed(gradients), weights, strict=True)]


def with_noise(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    noise = [tf.random.stateless_normal(tf.shape(gradient), (3, 5), stddev=0.1) for gradient in gradients]
    return [part + more for part, more in zip(all_summed(gradients), noise, strict=True)]


def in_half_precision(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    halves = all_summed([tf.cast(gradient, tf.float16) for gradient in gradients])
    return [tf.cast(part, tf.float32) / 2.0 for part in halves]


def clipped(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    return list(tf.clip_by_global_norm(all_summed(gradients), 0.5)[0])


def without_nan(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    return [
        tf.where(tf.math.is_finite(part), tf.clip_by_value(part, -0.3, 0.3), tf.zeros_like(part))
        for part in all_summed(gradients)
    ]


def in_a_function(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    return list(tf.function(lambda parts: [2.0 * part for part in all_summed(parts)])(gradients))


def if_finite(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    parts = all_summed(gradients)
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])
    return list(
        tf.cond(finite, lambda: [0.5 * part for part in parts], lambda: list(map(tf.zeros_like, parts)))
    )


def centred(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    return [part - tf.reduce_mean(part, 0, keepdims=True) for part in all_summed(gradients)]


def by_horovods_tape(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    import horovod.tensorflow as hvd

    return [tf.transpose(tf.transpose(hvd.allreduce(part, op=hvd.Sum))) for part in gradients]


def stepping_by(
    make: Callable[[], keras.Model], reduce: Callable[[Gradients, Sequence[Any]], Gradients]
) -> keras.Model:
    """A model whose ``train_step`` reduces so."""

    class Reducing(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = [variable.value for variable in self.trainable_variables]
            gradients = reduce(tape.gradient(loss, weights), weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    of = make()
    return t.compiled(Reducing(of.inputs, of.outputs), keras.optimizers.SGD(0.05, momentum=0.9))


def assert_not_reduced_again(
    engine: Any, reduce: Callable[..., Gradients], op: str, make: Any = t.mlp, data: Any = t.data
) -> None:
    """The bits are those of a fit without the callback."""
    alone, watched = (stepping_by(make, reduce) for _ in range(2))
    t.fit(alone, data(engine.rank, 80))
    callback = t.ours(watched, data(engine.rank, 80), options={"op": op})
    averaging = callback._life.mode.averaged.averaging
    assert not averaging.averaged
    assert averaging.left_alone == {weight.path for weight in watched.trainable_weights}
    assert t.bits(alone) == t.bits(watched)
    assert t.equal_on_all_ranks(engine, watched)


FORMS = (
    reshaped, in_one_buffer, with_decay, with_noise, in_half_precision, clipped, without_nan, in_a_function,
    if_finite, centred,
)  # fmt: skip


def a_layer_for_each_form() -> keras.Model:
    hidden = [keras.layers.Dense(16, activation="tanh") for _ in FORMS[1:]]
    return keras.Sequential([keras.Input((12,)), *hidden, keras.layers.Dense(4)])


def in_all_forms(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    """Kernel and bias of each layer in another one."""
    pairs = [slice(first, first + 2) for first in range(0, len(weights), 2)]
    parts = [form(gradients[pair], weights[pair]) for form, pair in zip(FORMS, pairs, strict=True)]
    return [gradient for part in parts for gradient in part]


@on_each_engine
def test_a_step_that_reduces_is_not_summed_again(engine):
    assert_not_reduced_again(engine, in_all_forms, "Sum", a_layer_for_each_form)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["Sum", "Average", "Adasum"])
def test_a_step_that_reduces_with_horovod_is_left_to_it(engine, op):
    assert_not_reduced_again(engine, by_horovods_tape, op)


def scaled_slices(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    assert isinstance(gradients[0], tf.IndexedSlices)
    first, *rest = all_summed(gradients)
    return [tf.IndexedSlices(0.5 * first.values, first.indices, first.dense_shape), *rest]


@on_each_engine
def test_slices_that_were_gathered_are_not_gathered_again(engine):
    assert_not_reduced_again(engine, scaled_slices, "Sum", t.with_embedding, t.words)


# -- partly -------------------------------------------------------------------------------------------


def biases_only(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    return [summed(part) if place % 2 else part for place, part in enumerate(gradients)]


@on_each_engine
def test_what_a_step_does_not_reduce_is_reduced(engine):
    alone = stepping_by(t.mlp, lambda gradients, weights: all_summed(gradients))
    watched = stepping_by(t.mlp, biases_only)
    t.fit(alone, t.data(engine.rank, 80))
    averaging = t.ours(watched, t.data(engine.rank, 80), options={"op": "Sum"})._life.mode.averaged.averaging
    assert (len(averaging.averaged), len(averaging.left_alone)) == (2, 2)
    assert t.bits(alone) == t.bits(watched)


def with_something_own(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    return [tf.reshape(2.0 * (summed(part) + part), part.shape) for part in gradients]


@on_each_engine
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_a_gradient_that_is_partly_reduced_is_refused(engine, op):
    model = stepping_by(t.mlp, with_something_own)
    with pytest.raises(
        tf_ooo.BackendError, match=r"reduces the gradient of \S+kernel over the ranks by itself"
    ):
        t.ours(model, t.data(engine.rank, 80), options={"op": op})


def with_noise_of_each_rank(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    seed = (data_parallel.connect().rank, 5)
    return [part + tf.random.stateless_normal(part.shape, seed) for part in all_summed(gradients)]


@on_each_engine
def test_noise_of_each_rank_is_noticed(engine):
    """It is no part of the graph that a rank's noise is another's."""
    model = stepping_by(t.mlp, with_noise_of_each_rank)
    with pytest.raises(tf_ooo.BackendError, match="4 weights, first .*, are not the same on all ranks"):
        t.ours(model, t.data(engine.rank, 80), options={"op": "Sum"})


# -- gradients that are added up in variables -----------------------------------------------------------


def accumulating(reduce_each: bool) -> keras.Model:
    """Applies the sum of two steps' gradients at the second, reduced by itself in each step or not at all."""

    class Accumulating(keras.Model):
        def build_sums(self) -> keras.Model:
            self.sums = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in self.trainable_variables]
            self.steps = tf.Variable(0, trainable=False)
            return self

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, [variable.value for variable in self.trainable_variables])
            gradients = all_summed(gradients) if reduce_each else gradients
            for total, part in zip(self.sums, gradients, strict=True):
                total.assign_add(part)
            self.steps.assign_add(1)
            tf.cond(self.steps % 2 == 0, self.apply_sums, lambda: None)
            return {"loss": loss}

        def apply_sums(self) -> None:
            halves = [0.5 * total.read_value() for total in self.sums]
            self.optimizer.apply_gradients(zip(halves, self.trainable_variables, strict=True))
            for total in self.sums:
                total.assign(tf.zeros_like(total))

    of = t.mlp()
    return t.compiled(Accumulating(of.inputs, of.outputs).build_sums(), keras.optimizers.SGD(0.05))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_sums_in_variables_are_reduced_once(engine, op):
    alone, watched, left = accumulating(True), accumulating(True), accumulating(False)
    t.fit(alone, t.data(engine.rank, 80))
    averaging = t.ours(watched, t.data(engine.rank, 80), options={"op": op})._life.mode.averaged.averaging
    assert (len(averaging.averaged), len(averaging.left_alone)) == (0, 4)
    assert t.bits(alone) == t.bits(watched)
    averaging = t.ours(left, t.data(engine.rank, 80), options={"op": op})._life.mode.averaged.averaging
    assert (len(averaging.averaged), len(averaging.left_alone)) == (4, 0)
    assert t.equal_on_all_ranks(engine, left)


# -- run eagerly ------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_step_that_runs_eagerly_is_not_summed_twice(engine):
    """There is no graph to look at: the gradients of its first step tell."""
    model = stepping_by(t.mlp, reshaped)
    model.run_eagerly = True
    with pytest.raises(tf_ooo.BackendError, match=r"same on all ranks before OOOBackprop\(op='Sum'\)"):
        t.ours(model, t.data(engine.rank, 80), options={"op": "Sum"})
    left = stepping_by(t.mlp, lambda gradients, weights: gradients)
    left.run_eagerly = True
    t.ours(left, t.data(engine.rank, 80), options={"op": "Sum"})
    assert t.equal_on_all_ranks(engine, left)


# -- models that communicate ------------------------------------------------------------------------------


class Centred(keras.layers.Layer):
    """Less the mean over all ranks' rows, as in synchronized normalization; so are its gradients."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def centre(rows: Any) -> tuple[Any, Callable[[Any], Any]]:
            def gradient(of: Any) -> Any:
                return of - summed(tf.reduce_mean(of, 0)) / 2.0

            return rows - summed(tf.reduce_mean(rows, 0)) / 2.0, gradient

        return centre(x)


def centred_embedding() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((6,), dtype="int32")
    rows = Centred()(layers.Embedding(20, 8)(inputs))
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(rows)))


def centred_bias() -> keras.Model:
    inputs = keras.Input((12,))
    return keras.Model(inputs, keras.layers.Dense(4)(Centred()(keras.layers.Dense(8)(inputs))))


@on_each_engine
@pytest.mark.parametrize("make", [centred_embedding, centred_bias])
def test_gradients_of_a_model_that_communicates_are_reduced(engine, make):
    model = t.compiled(make(), keras.optimizers.SGD(0.05))
    data = t.words if make is centred_embedding else t.data
    averaging = t.ours(model, data(engine.rank, 80), options={"op": "Sum"})._life.mode.averaged.averaging
    assert (len(averaging.averaged), averaging.left_alone) == (len(model.trainable_weights), set())
    assert t.equal_on_all_ranks(engine, model)
