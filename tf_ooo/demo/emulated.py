"""Defines layers whose tasks occupy their device for a time instead of computing, as kernels do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from grappler_passes.compat import runtime
from tf_ooo.demo.waits import library

# Loading it needs the environment's waits.LOG.
_WAIT = runtime.load_ops(str(library())).ooo_wait


class Emulated(keras.layers.Layer):  # type: ignore[misc]
    """Multiplies by a vector, so that there is a weight with a gradient.

    ``seconds``: what F, dO and dW take, for any number of rows.
    """

    def __init__(self, seconds: tuple[float, float, float], **settings: Any) -> None:
        super().__init__(**settings)
        self.seconds = seconds

    def build(self, shape: Any) -> None:
        """Make the weight, one number for each column."""
        self.weight = self.add_weight(shape=(shape[-1],), initializer="ones", name="weight")

    def call(self, x: Any) -> Any:
        """Return the product, after the seconds of F; gradients take theirs."""
        forward_s, output_grad_s, weight_grad_s = self.seconds

        def run(x: Any, weight: Any) -> Any:
            def gradients(dy: Any) -> tuple[Any, Any]:
                summands = _WAIT(x=dy * x, seconds=weight_grad_s, name="dW")
                return _WAIT(x=dy * weight, seconds=output_grad_s, name="dO"), tf.reduce_sum(summands, axis=0)

            return _WAIT(x=x * weight, seconds=forward_s, name="F"), gradients

        return tf.custom_gradient(run)(x, tf.convert_to_tensor(self.weight))


def emulated_model(
    layers: Sequence[Emulated], rows: int, width: int, seed: int
) -> tuple[keras.Model, Any, Any]:
    """Return a compiled model of such layers, and a batch for it, the same every time."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((width,)), *layers], name="emulated")
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    x, y = np.random.default_rng(seed).normal(size=(2, rows, width)).astype("float32")
    return model, x, y
