"""The model of a set-up, compiled, and its data; the same each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.fuzz.kinds.drawing import OwnSetup
from tests.fuzz.kinds.layers import OVER_ROWS, Assigning, InTurns, Looping, Mixing, Stepping, loss_over_rows

layers = keras.layers
SHAPES = {"dense": (6,), "conv1d": (5, 3), "conv2d": (6, 5, 2), "tokens": (4,), "lstm": (3, 4)}
OUTPUTS, WORDS = 3, 11
DEEP = ("zb_v", "interleaved_1f1b")


def model_of(setup: OwnSetup) -> Any:
    """Built in a cleared session, so that names and weights are the same each time."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(setup.number % 2**31)
    half = "mixed_bfloat16" if setup.variant == "mixed_bfloat16" else "mixed_float16"
    keras.config.set_dtype_policy(half if setup.kind == "half precision" else setup.dtype)
    if setup.variant == "in turns":
        return _critic_and_generator(setup)
    model = _functional(setup)
    compiled(model, setup)
    return model


def data_of(setup: OwnSetup, rank: int = 0) -> tuple[Any, Any]:
    """Rows for a ``fit``."""
    numbers = np.random.default_rng([setup.number, rank])
    shape = (setup.rows, *SHAPES[setup.body])
    if setup.body == "tokens":
        x = numbers.integers(0, WORDS, shape)
    else:
        x = numbers.normal(size=shape).astype(setup.dtype)
    if setup.variant == "overflow" and setup.body != "tokens":
        x = x * 1e4
    y = numbers.uniform(size=(setup.rows, OUTPUTS)).astype(setup.dtype)
    if setup.kind == "sparse input":
        x = tf.sparse.from_dense(np.maximum(x, 0.0))
    return x, y


def optimizer_of(setup: OwnSetup) -> Any:
    name, options = setup.optimizer
    more = {"gradient_accumulation_steps": 2} if setup.variant == "option" else {}
    return getattr(keras.optimizers, name)(**options, **more)


def _functional(setup: OwnSetup) -> Any:
    tokens = setup.body == "tokens"
    i = keras.Input(
        SHAPES[setup.body],
        sparse=setup.kind == "sparse input",
        dtype="int32" if tokens else None,
    )
    h = _body(setup, i)
    dense = [
        layers.Dense(setup.widths[1], "tanh")
        for _ in range(3 if setup.options.get("schedule") in DEEP else 1)
    ]
    head = [*dense, layers.Dense(OUTPUTS, dtype=_wide(setup))]
    if setup.kind == "Model.call over rows":
        model = Mixing(keras.Model(i, h), OVER_ROWS[setup.variant], keras.Sequential(head))
        model(np.zeros((2, *SHAPES[setup.body]), "int32" if tokens else setup.dtype))
        return model
    for layer in (_of_kind(setup, h), *head):
        h = layer(h) if layer else h
    step = _step_of(setup)
    model = step(i, h)
    model.own = (setup.kind, setup.variant)
    return model


def _step_of(setup: OwnSetup) -> type:
    if setup.kind == "autograph loop" or setup.variant == "by hand":
        return Looping
    own = setup.kind in ("own logs", "scaled gradients") or setup.variant == "halves"
    return Stepping if own else keras.Model


def _wide(setup: OwnSetup) -> str:
    return "float32" if setup.kind == "half precision" else setup.dtype


def _body(setup: OwnSetup, i: Any) -> Any:
    """Features of each row."""
    width, act = setup.widths[0], setup.activation
    frozen = (setup.kind, setup.variant) in (("frozen", "first"), ("frozen after compile", "thawed"))
    first = {
        "dense": lambda: layers.Dense(width, act),
        "conv1d": lambda: layers.Conv1D(width, 2, padding="same", activation=act),
        "conv2d": lambda: layers.Conv2D(width, 3, padding="same", activation=act),
        "tokens": lambda: layers.Embedding(WORDS, width),
        "lstm": lambda: layers.LSTM(width),
    }[setup.body]()
    first.trainable = not frozen
    h = first(i)
    if setup.variant == "two layers":  # that look up rows of the same input
        h = layers.Concatenate()([h, layers.Dense(3, "tanh")(i)])
    return layers.Flatten()(h) if len(h.shape) > 2 else h


def _of_kind(setup: OwnSetup, h: Any) -> Callable[[Any], Any] | None:
    """Return what stands between the body and the head."""
    dense, variant = layers.Dense(setup.widths[1], "tanh"), setup.variant
    if setup.kind == "ops over rows":
        return OVER_ROWS[variant]
    if setup.kind == "frozen":
        return _frozen(variant, dense, h)
    if setup.kind == "remat":
        return _remat(variant, dense, h)
    makers = {
        "Lambda over rows": lambda: layers.Lambda(OVER_ROWS[variant]),
        "layer over rows": lambda: getattr(layers, variant)(
            axis=0 if variant != "LayerNormalization" else -1
        ),
        "layer that assigns": lambda: (
            layers.SpectralNormalization(dense) if variant == "spectral" else Assigning(variant)
        ),
        "BatchNormalization": lambda: layers.BatchNormalization(
            momentum=0.5 if variant == "momentum" else 0.99, trainable=variant != "not trainable"
        ),
        "Dropout": lambda: getattr(layers, variant)(0.3, seed=setup.seed),
    }
    return makers[setup.kind]() if setup.kind in makers else None


def _frozen(variant: str, dense: Any, h: Any) -> Any:
    if variant == "model":
        i = keras.Input(h.shape[1:])
        dense = keras.Model(i, layers.Dense(4, "tanh")(dense(i)))
    dense.trainable = variant == "first"
    return dense


def _remat(variant: str, dense: Any, h: Any) -> Any:
    """A layer whose forward pass runs again; built before, as functions hold no weights."""
    if variant == "convolution":
        convolution = layers.Conv1D(5, 2, padding="same", activation="relu")
        convolution.build((None, h.shape[1], 1))
        return layers.Lambda(lambda t: keras.ops.mean(keras.remat(convolution)(t[..., None]), axis=1))
    dense.build(h.shape)
    again = keras.remat(dense) if variant == "remat" else tf.recompute_grad(dense)
    return layers.Lambda(lambda t: again(t))


def compiled(model: Any, setup: OwnSetup) -> None:
    loss = setup.loss
    if loss == "binary_crossentropy":
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
    if setup.kind == "loss over rows":
        loss = loss_over_rows(setup.variant, setup.share)
    model.compile(
        optimizer_of(setup),
        loss,
        metrics=None if isinstance(model, Stepping) else list(setup.metrics) or None,
        jit_compile=False,
        steps_per_execution=setup.steps_per_execution,
    )
    if setup.variant == "halves":
        model.second = keras.optimizers.Adam(0.02, epsilon=1e-3)
        half = len(model.trainable_variables) // 2
        model.optimizer.build(model.trainable_variables[:half])
        model.second.build(model.trainable_variables[half:])
    if setup.variant == "by hand":
        model.totals = [
            tf.Variable(tf.zeros_like(v.value), trainable=False) for v in model.trainable_variables
        ]
        model.micro_steps = tf.Variable(0, trainable=False)


def _critic_and_generator(setup: OwnSetup) -> Any:
    width, optimizers = setup.widths[0], keras.optimizers
    critic = keras.Sequential([keras.Input((OUTPUTS,)), layers.Dense(width, "tanh"), layers.Dense(1)])
    generator = keras.Sequential(
        [keras.Input(SHAPES["dense"]), layers.Dense(width, setup.activation), layers.Dense(OUTPUTS)]
    )
    i = keras.Input(SHAPES["dense"])
    model = InTurns(i, critic(generator(i)))
    model.compile_both(critic, generator, optimizer_of(setup), optimizers.SGD(0.05))
    model.of_critic.build(critic.trainable_variables)
    model.of_generator.build(generator.trainable_variables)
    model.compile(jit_compile=False, steps_per_execution=setup.steps_per_execution)
    return model
