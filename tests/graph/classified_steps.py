"""Small training steps in plain TensorFlow, one for each thing that classification has to tell apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

X = tf.TensorSpec((5, 3))
OPEN = tf.TensorSpec((None, 3))
IMAGES = tf.TensorSpec((4, 6, 6, 2))
STEPS: dict[str, tuple[Callable[[], Any], tuple[tf.TensorSpec, ...]]] = {}


def step(*specs: tf.TensorSpec) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a function that makes variables and returns a step."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        STEPS[make.__name__] = (make, specs)
        return make

    return register


def traced(name: str) -> tuple[Any, Any]:
    """(the traced step, the step, which has to stay: its variables are named by it)."""
    make, specs = STEPS[name]
    function = tf.function(make(), autograph=False)
    return function.get_concrete_function(*specs), function


def weights_of(*shapes: tuple[int, ...], names: str = "abcdefgh") -> list[tf.Variable]:
    random = tf.random.Generator.from_seed(1)
    return [tf.Variable(random.normal(shape), name=name) for name, shape in zip(names, shapes, strict=False)]


def gradients_of(loss_of: Callable[[], Any], weights: list[tf.Variable]) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        loss = loss_of()
    return loss, tape.gradient(loss, weights)


def descend(weights: list[tf.Variable], gradients: list[Any]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(0.1 * gradient)


def descended(loss_of: Callable[[], Any], weights: list[tf.Variable]) -> Any:
    """Return the loss, whose gradients have changed the weights."""
    loss, gradients = gradients_of(loss_of, weights)
    descend(weights, gradients)
    return loss


def dense(x: Any, kernel: Any, bias: Any) -> Any:
    return tf.nn.bias_add(x @ kernel, bias)


@step(OPEN)
def adam_by_hand() -> Any:
    """Two slots each, a step counter, gradients of biases on their way to rank 1."""
    weights = weights_of((3, 4), (4,), (4, 2), (2,))
    slots = [
        [tf.Variable(tf.zeros_like(w), name=f"{w.name[0]}{n}", trainable=False) for n in "mv"]
        for w in weights
    ]
    count = tf.Variable(0, name="count", trainable=False)

    def train(x: Any) -> Any:
        loss, gradients = gradients_of(
            lambda: tf.reduce_mean(dense(tf.nn.relu(dense(x, *weights[:2])), *weights[2:]) ** 2), weights
        )
        count.assign_add(1)
        rate = 0.1 / tf.cast(count, tf.float32)
        for weight, (mean, square), gradient in zip(weights, slots, gradients, strict=True):
            mean.assign(0.9 * mean + 0.1 * gradient)
            square.assign(0.9 * square + 0.1 * gradient**2)
            weight.assign_sub(rate * mean / (tf.sqrt(square) + 1e-7))
        return loss

    return train


@step(X)
def clipped_by_global_norm() -> Any:
    """One number of all gradients goes into each update; a weight of rank 0 among them."""
    weights = weights_of((3, 4), (), (4, 4), (4, 2))

    def train(x: Any) -> Any:
        loss, gradients = gradients_of(
            lambda: tf.reduce_sum(
                (tf.tanh(tf.tanh(x @ weights[0]) * weights[1] @ weights[2]) @ weights[3]) ** 2
            ),
            weights,
        )
        descend(weights, tf.clip_by_global_norm(gradients, 1.0)[0])
        return loss

    return train


@step(X)
def several_scalars() -> Any:
    """Three weights of rank 0, of which two are used in one layer."""
    weights = weights_of((3, 4), (), (), (4, 2), ())

    def train(x: Any) -> Any:
        def loss_of() -> Any:
            hidden = tf.tanh(x @ weights[0] * weights[1] + weights[2])
            return tf.reduce_sum(tf.tanh(hidden @ weights[3]) * weights[4])

        loss, gradients = gradients_of(loss_of, weights)
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(gradient**2) for gradient in gradients]))
        descend(weights, [gradient / norm for gradient in gradients])
        return loss

    return train


@step(OPEN)
def normalized_by_batch() -> Any:
    """Batch normalization written out: the sums of its dO go to the layer below; moving averages are kept."""
    weights = weights_of((3, 4), (4,), (4,), (4, 2))
    averages = [tf.Variable(tf.zeros(4), name=name, trainable=False) for name in ("mean", "variance")]

    def train(x: Any) -> Any:
        def loss_of() -> Any:
            y = x @ weights[0]
            mean, variance = tf.nn.moments(y, 0)
            for average, value in zip(averages, (mean, variance), strict=True):
                average.assign(0.9 * average + 0.1 * value)
            y = (y - mean) * tf.math.rsqrt(variance + 1e-3) * weights[1] + weights[2]
            return tf.reduce_mean((tf.nn.relu(y) @ weights[3]) ** 2)

        return descended(loss_of, weights)

    return train


@step(IMAGES)
def convolutions() -> Any:
    """A fused normalization, whose gradient op makes dO and dW; a kernel behind it."""
    weights = weights_of((3, 3, 2, 4), (4,), (4,), (3, 3, 4, 2))

    def train(x: Any) -> Any:
        def loss_of() -> Any:
            y = tf.nn.conv2d(x, weights[0], 1, "SAME")
            y = tf.nn.relu(tf.compat.v1.nn.fused_batch_norm(y, weights[1], weights[2])[0])
            return tf.reduce_mean(tf.nn.conv2d(y, weights[3], 1, "VALID") ** 2)

        return descended(loss_of, weights)

    return train


@step(X)
def tied() -> Any:
    """The lowest weight is used again at the top."""
    weights = weights_of((3, 4), (4, 4))

    def train(x: Any) -> Any:
        hidden_of = lambda: tf.tanh(tf.tanh(x @ weights[0]) @ weights[1])  # noqa: E731
        loss, gradients = gradients_of(
            lambda: tf.reduce_sum(tf.matmul(hidden_of(), weights[0], transpose_b=True) ** 2), weights
        )
        descend(weights, gradients)
        return loss

    return train


@step(tf.TensorSpec((5, 2), tf.int32))
def embedded() -> Any:
    """Rows that were looked up, updated row by row."""
    table, kernel = weights = weights_of((9, 4), (8, 2))

    def train(words: Any) -> Any:
        def loss_of() -> Any:
            return tf.reduce_sum(tf.tanh(tf.reshape(tf.gather(table, words), (5, 8))) @ kernel)

        loss, (rows, gradient) = gradients_of(loss_of, weights)
        table.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))
        kernel.assign_sub(0.1 * gradient)
        return loss

    return train


@step(tf.TensorSpec((6, 5, 3)))
def recurrent() -> Any:
    """A loop between two layers; its gradient loop reads what the forward loop has stored."""
    weights = weights_of((3, 4), (4, 4), (4,), (4, 2))

    def train(x: Any) -> Any:
        def loss_of() -> Any:
            below = tf.tensordot(x, weights[0], 1)

            def body(number: Any, state: Any) -> Any:
                return number + 1, tf.tanh(below[number] + tf.nn.bias_add(state @ weights[1], weights[2]))

            state = tf.while_loop(lambda number, _: number < 6, body, (0, tf.zeros((5, 4))))[1]
            return tf.reduce_sum((state @ weights[3]) ** 2)

        return descended(loss_of, weights)

    return train


@step(X, tf.TensorSpec((5, 2)))
def adversaries() -> Any:
    """The second update reads weights that the first has written."""
    critic, maker = weights_of((2, 4), (4, 1)), weights_of((3, 4), (4, 2), names="uv")

    def judged(x: Any) -> Any:
        return tf.nn.softplus(tf.tanh(x @ critic[0]) @ critic[1])

    def made(x: Any) -> Any:
        return tf.tanh(x @ maker[0]) @ maker[1]

    def train(latent: Any, real: Any) -> Any:
        losses = []
        first = gradients_of(
            lambda: tf.reduce_mean(judged(real)) - tf.reduce_mean(judged(made(latent))), critic
        )
        descend(critic, first[1])
        second = gradients_of(lambda: tf.reduce_mean(judged(made(latent))), maker)
        descend(maker, second[1])
        losses += [first[0], second[0]]
        return losses

    return train


@step(X)
def normalized_weights() -> Any:
    """Kernels of two weights; their gradients are no dO."""
    weights = weights_of((3, 4), (4, 6), (6,), (6, 2), (2, 2))

    def train(x: Any) -> Any:
        def loss_of() -> Any:
            hidden = tf.tanh(tf.tanh(x @ weights[0]) @ (tf.nn.l2_normalize(weights[1], 0) * weights[2]))
            return tf.reduce_sum((hidden @ (weights[3] @ weights[4])) ** 2)

        return descended(loss_of, weights)

    return train


@step(X)
def scaled_loss() -> Any:
    """A step whose gradients are not finite is left out, and the scale is halved."""
    weights = weights_of((3, 4), (4, 2))
    scale = tf.Variable(1024.0, name="scale", trainable=False)

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ weights[0]) @ weights[1]))
            scaled = loss * scale
        gradients = [gradient / scale for gradient in tape.gradient(scaled, weights)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
        descend(weights, [tf.where(finite, gradient, 0.0) for gradient in gradients])
        scale.assign(tf.where(finite, scale, scale / 2))
        return loss

    return train


@step(X)
def packed_allreduce() -> Any:
    """Two gradients travel as one; the third by itself; ops that scale them stand on either side."""
    weights = weights_of((3, 4), (4, 4), (4, 2))

    def reduced(value: Any, key: int) -> Any:
        return tf.raw_ops.CollectiveReduceV2(
            input=value, group_size=2, group_key=1, instance_key=key, ordering_token=[], merge_op="Add",
            final_op="Id",
        )  # fmt: skip

    def train(x: Any) -> Any:
        loss, gradients = gradients_of(
            lambda: tf.reduce_sum(tf.tanh(tf.tanh(x @ weights[0]) @ weights[1]) @ weights[2]), weights
        )
        packed = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients[1:]], 0)
        first, second = tf.split(reduced(packed * 0.5, 1), [16, 8])
        descend(
            weights, [reduced(gradients[0], 2) * 0.5, tf.reshape(first, (4, 4)), tf.reshape(second, (4, 2))]
        )
        return loss

    return train


@step(X)
def averaged_weights() -> Any:
    """Decay, momentum, a moving average of what was written, and an accuracy that is counted."""
    weights = weights_of((3, 4), (4,), (4, 2))
    copies = [tf.Variable(w, name=f"{w.name[0]}_average", trainable=False) for w in weights]
    slots = [tf.Variable(tf.zeros_like(w), name=f"{w.name[0]}_momentum", trainable=False) for w in weights]
    total = tf.Variable(0.0, name="total", trainable=False)

    def train(x: Any) -> Any:
        loss, gradients = gradients_of(
            lambda: tf.reduce_sum((tf.nn.gelu(dense(x, *weights[:2])) @ weights[2]) ** 2), weights
        )
        total.assign_add(loss)
        for weight, slot, copy, gradient in zip(weights, slots, copies, gradients, strict=True):
            weight.assign(weight * 0.99)
            slot.assign(0.9 * slot - 0.1 * gradient)
            weight.assign_add(slot)
            copy.assign(0.9 * copy + 0.1 * weight)
        return loss, total

    return train


@step(tf.TensorSpec((5, 5)))
def one_weight() -> Any:
    """The result has its shape by chance."""
    (weight,) = weights_of((5, 5))
    slot = tf.Variable(tf.zeros((5, 5)), name="slot", trainable=False)

    def train(x: Any) -> Any:
        loss, (gradient,) = gradients_of(lambda: tf.reduce_sum(tf.tanh(x @ weight) ** 2), [weight])
        slot.assign(0.9 * slot + gradient)
        weight.assign_sub(0.1 * slot)
        return loss

    return train


@step(OPEN)
def nothing_returned() -> Any:
    """Forward ops are told by the gradients that they change; slots by what they change."""
    weights = weights_of((3, 4), (4,), (4, 2))
    slots = [tf.Variable(tf.zeros_like(w), name=f"{w.name[0]}_slot", trainable=False) for w in weights]

    def train(x: Any) -> None:
        _, gradients = gradients_of(
            lambda: tf.reduce_sum((tf.tanh(dense(x, *weights[:2])) @ weights[2]) ** 2), weights
        )
        for weight, slot, gradient in zip(weights, slots, gradients, strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)

    return train


@step(X)
def prepared_kernel() -> Any:
    """Divided by its norm and written before it is used."""
    weights = weights_of((3, 4), (4, 2))

    def train(x: Any) -> Any:
        weights[0].assign(weights[0] / tf.norm(weights[0]))
        loss, gradients = gradients_of(lambda: tf.reduce_sum(tf.tanh(x @ weights[0]) @ weights[1]), weights)
        descend(weights, gradients)
        return loss

    return train


@step(X)
def gradients_that_are_the_output_gradient() -> Any:
    """Weights that are added to activations of their shape: what comes down is their gradient."""
    weights = weights_of((3, 4), (5, 4), (4, 2), (5, 2))

    def train(x: Any) -> Any:
        def loss_of() -> Any:
            hidden = tf.tanh(x @ weights[0] + weights[1])
            return tf.reduce_sum(tf.tanh(hidden @ weights[2] + weights[3]) ** 2)

        return descended(loss_of, weights)

    return train


@step(X)
def regularized_and_gated() -> Any:
    """Penalties on weights and on activations; all gradients pass one IdentityN."""
    weights = weights_of((3, 4), (4, 4), (4, 2))

    def train(x: Any) -> Any:
        def loss_of() -> Any:
            hidden = tf.tanh(x @ weights[0])
            penalty = tf.nn.l2_loss(weights[0]) + tf.reduce_sum(tf.abs(weights[2])) + tf.nn.l2_loss(hidden)
            return tf.reduce_sum(tf.tanh(hidden @ weights[1]) @ weights[2]) + 0.01 * penalty

        loss, gradients = gradients_of(loss_of, weights)
        descend(weights, tf.identity_n(gradients))
        return loss

    return train


@step(X)
def output_gradients_with_slots() -> Any:
    """The dO is the gradient of a weight of its shape: its average and its square are updates."""
    weights = weights_of((3, 4), (5, 4), (4, 2), (5, 2))
    slots = [
        [tf.Variable(tf.zeros_like(w), name=f"{w.name[0]}{n}", trainable=False) for n in "mv"]
        for w in weights
    ]

    def train(x: Any) -> Any:
        def loss_of() -> Any:
            hidden = tf.tanh(x @ weights[0] + weights[1])
            return tf.reduce_sum(tf.tanh(hidden @ weights[2] + weights[3]) ** 2)

        loss, gradients = gradients_of(loss_of, weights)
        for weight, (mean, square), gradient in zip(weights, slots, gradients, strict=True):
            mean.assign(0.9 * mean + gradient)
            square.assign(0.9 * square + gradient**2)
            weight.assign_sub(0.1 * mean / (tf.sqrt(square) + 1e-7))
        return loss

    return train


@step(X)
def carried_state() -> Any:
    """A memory of activations that the next batch reads is no weight, and shares no gradient with others."""
    weights = weights_of((3, 4), (4, 4), (4, 2))
    memory = tf.Variable(tf.zeros((5, 4)), name="memory")

    def train(x: Any) -> Any:
        def loss_of() -> Any:
            hidden = tf.tanh(x @ weights[0] + memory @ weights[1])
            memory.assign(hidden)
            return tf.reduce_sum((hidden @ weights[2]) ** 2)

        return descended(loss_of, weights)

    return train


@step(X)
def recomputed() -> Any:
    """The second layer runs again within the backward pass: no gradients come from what is computed there."""
    weights = weights_of((3, 4), (4, 4), (4,), (4, 2))

    def train(x: Any) -> Any:
        second = tf.recompute_grad(lambda hidden: tf.tanh(dense(hidden, *weights[1:3])))
        loss, gradients = gradients_of(
            lambda: tf.reduce_sum((second(tf.tanh(x @ weights[0])) @ weights[3]) ** 2), weights
        )
        descend(weights, gradients)
        return loss

    return train
