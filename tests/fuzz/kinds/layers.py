"""Layers and models as users write them, for set-ups of these kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

ops = keras.ops
# Functions in which the rows of a batch meet, of features for each row.
OVER_ROWS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda h: h - ops.mean(h, axis=0, keepdims=True),
    "deviation": lambda h: h / ops.sqrt(1.0 + ops.var(h, axis=0, keepdims=True)),
    "largest": lambda h: h - ops.max(h, axis=0, keepdims=True),
    "sum": lambda h: h + 0.1 * ops.sum(h, axis=0, keepdims=True),
    "cumulative": lambda h: 0.3 * ops.cumsum(h, axis=0),
    "sorted": lambda h: h + ops.sort(h, axis=0),
    "softmax": lambda h: h * (1.0 + ops.softmax(h, axis=0)),
    "rolled": lambda h: h + 0.5 * ops.roll(h, 1, axis=0),
    "gram": lambda h: h + ops.matmul(ops.softmax(ops.matmul(h, ops.transpose(h))), h),
}


class Assigning(keras.layers.Layer):
    """Changes a weight of its own in each step; the output depends on it."""

    def __init__(self, what: str, **options: Any) -> None:
        super().__init__(**options)
        self.what = what

    def build(self, shape: Any) -> None:
        self.state = self.add_weight(shape=(), trainable=False, initializer="ones", name="state")

    def call(self, x: Any, training: bool = False) -> Any:
        scale = ops.cast(self.state, x.dtype)
        if training:
            self.state.assign(ops.cast(self._next(x), self.state.dtype))
        return x * (0.5 + 1.0 / (1.0 + scale * scale))

    def _next(self, x: Any) -> Any:
        old = ops.cast(self.state, x.dtype)
        if self.what == "counter":
            return old + 1.0
        if self.what == "decay":
            return old * 0.9
        if self.what == "largest seen":
            return ops.maximum(old, ops.max(ops.abs(x)))
        return 0.8 * old + 0.2 * ops.mean(ops.abs(x))


class Mixing(keras.Model):
    """Rows meet in its own ``call``."""

    def __init__(self, body: Any, over_rows: Callable[[Any], Any], head: Any) -> None:
        super().__init__()
        self.body, self.over_rows, self.head = body, over_rows, head

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.over_rows(self.body(x, training=training)))


class Stepping(keras.Model):
    """A ``train_step`` of one's own, of the kind and variant in ``own``."""

    own = ("", "")

    def train_step(self, data: Any) -> Any:
        kind, variant = self.own
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        if kind == "accumulation":
            return self._by_hand(x, y)
        if variant == "updates inside":
            return self._updates_inside(x, y)
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=prediction)
            if variant == "over tensors":  # of two equal terms
                total = tf.zeros_like(loss)
                for _ in tf.range(2):
                    total += 0.5 * loss
                loss = total
            if variant == "sum of losses":
                for factor in tf.constant([0.1, 0.2], loss.dtype):
                    loss += factor * self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if variant == "unused":
            count = tf.constant(0)
            while count < 2:
                count += 1
        if kind == "scaled gradients":
            gradients = scaled(variant, gradients, x, prediction, loss)
        if variant == "halves":
            self._both(gradients)
        else:
            self.optimizer.apply(gradients, self.trainable_variables)
        logs = {"loss": loss}
        if kind == "own logs":
            logs |= own_logs(variant, x, prediction, gradients, self.optimizer)
        return logs

    def _both(self, gradients: list[Any]) -> None:
        half = len(gradients) // 2
        self.optimizer.apply(gradients[:half], self.trainable_variables[:half])
        self.second.apply(gradients[half:], self.trainable_variables[half:])

    def _updates_inside(self, x: Any, y: Any) -> Any:
        loss = tf.zeros((), self.compute_dtype)
        for _ in tf.range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def _by_hand(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, self.trainable_variables))
        for total, gradient in zip(self.totals, gradients, strict=True):
            total.assign_add(0.5 * gradient)
        self.micro_steps.assign_add(1)
        if self.micro_steps % 2 == 0:
            self.optimizer.apply([total + 0.0 for total in self.totals], self.trainable_variables)
            for total in self.totals:
                total.assign(tf.zeros_like(total))
        return {"loss": loss}


class Looping(Stepping):
    """The same as a graph function, in which AutoGraph makes graph ops of loops and branches."""

    @tf.function
    def train_step(self, data: Any) -> Any:
        return Stepping.train_step(self, data)


class InTurns(keras.Model):
    """A critic, then a generator by what the critic says, each by an optimizer of its own."""

    def compile_both(self, critic: Any, generator: Any, of_critic: Any, of_generator: Any) -> None:
        self.critic, self.generator = critic, generator
        self.of_critic, self.of_generator = of_critic, of_generator

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            critics = tf.reduce_mean(self.critic(self.generator(x))) - tf.reduce_mean(self.critic(y))
        weights = self.critic.trainable_variables
        self.of_critic.apply(tape.gradient(critics, weights), weights)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.critic(self.generator(x)))
        weights = self.generator.trainable_variables
        self.of_generator.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "critics": critics}


def scaled(variant: str, gradients: list[Any], x: Any, prediction: Any, loss: Any) -> list[Any]:
    if variant == "norm":
        return tf.clip_by_global_norm(gradients, 0.3)[0]
    factor = {
        "prediction": lambda: 1.0 + tf.reduce_max(tf.abs(prediction)),
        "loss": lambda: 1.0 / (1.0 + loss),
        "data": lambda: 1.0 + tf.reduce_mean(tf.cast(x, loss.dtype)) ** 2,
        "number": lambda: tf.constant(0.5, loss.dtype),
        "random": lambda: tf.random.stateless_uniform((), (1, 2), 0.5, 1.0, loss.dtype),
    }[variant]()
    return [factor * gradient for gradient in gradients]


def own_logs(variant: str, x: Any, prediction: Any, gradients: list[Any], optimizer: Any) -> dict[str, Any]:
    logs = {
        "rows": tf.shape(x)[0],
        "largest": tf.reduce_max(prediction),
        "norm": tf.linalg.global_norm(gradients),
        "rate": optimizer.learning_rate,
        "shape": tf.shape(prediction)[1],
        "smallest": tf.reduce_min(prediction),
        "mean": tf.reduce_mean(prediction**2),
    }
    return logs if variant == "all" else {variant: logs[variant]}


def loss_over_rows(variant: str, share: float) -> Callable[[Any, Any], Any]:
    """The mean of squares and a term in which rows meet, as large as ``share`` says."""

    def of_rows(true: Any, predicted: Any) -> Any:
        squares = tf.reduce_mean((true - predicted) ** 2)
        if variant == "sum":
            return squares + share * tf.reduce_sum((true - predicted) ** 2)
        if variant == "variance":
            return squares + share * tf.math.reduce_variance(predicted)
        if variant == "largest":
            return squares + share * tf.reduce_max((true - predicted) ** 2)
        apart = predicted[:, None] - predicted[None]
        return squares + share * tf.reduce_mean(tf.exp(-(apart**2)))

    return of_rows
