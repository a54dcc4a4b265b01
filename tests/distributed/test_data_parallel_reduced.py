"""Train steps that reduce their gradients by themselves: whatever they do with them, it is not done twice."""

from __future__ import annotations

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
pytestmark = [pytest.mark.takes(60), needs_keras_3]
Gradients = list[Any]
on_each_engine = pytest.mark.parametrize("engine", [t.BY_HAND, t.COLLECTIVES], indirect=True)


def summed(gradient: Any, place: int = 0) -> Any:
    """Over all ranks, by whatever engine the test has."""
    engine = data_parallel.connect()
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = engine.gather_rows(gradient, f"own_{place}")
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return engine.sum(gradient, f"own_{place}")


def all_summed(gradients: Gradients) -> Gradients:
    return [summed(gradient, place) for place, gradient in enumerate(gradients)]


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
    assert len(averaging.left_alone) == len(watched.trainable_weights)
    assert t.bits(alone) == t.bits(watched)
    assert t.equal_on_all_ranks(engine, watched)


FORMS = (
    reshaped, in_one_buffer, with_decay, with_noise, in_half_precision, clipped, without_nan, in_a_function,
    if_finite, centred,
)  # fmt: skip


@on_each_engine
@pytest.mark.parametrize("reduce", FORMS, ids=[form.__name__ for form in FORMS])
def test_a_step_that_reduces_is_not_summed_again(engine, reduce):
    assert_not_reduced_again(engine, reduce, "Sum")


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
    return [summed(part, place) if place % 2 else part for place, part in enumerate(gradients)]


@on_each_engine
def test_what_a_step_does_not_reduce_is_reduced(engine):
    alone = stepping_by(t.mlp, lambda gradients, weights: all_summed(gradients))
    watched = stepping_by(t.mlp, biases_only)
    t.fit(alone, t.data(engine.rank, 80))
    averaging = t.ours(watched, t.data(engine.rank, 80), options={"op": "Sum"})._life.mode.averaged.averaging
    assert (len(averaging.averaged), len(averaging.left_alone)) == (2, 2)
    assert t.bits(alone) == t.bits(watched)


def with_something_own(gradients: Gradients, weights: Sequence[Any]) -> Gradients:
    return [
        tf.reshape(2.0 * (summed(part, place) + part), part.shape) for place, part in enumerate(gradients)
    ]


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
