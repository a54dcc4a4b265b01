"""A Keras layer whose F, dO and dW are waits; importing this loads the op."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.emulated.costs import ROWS, WIDTH
from benchmarks.emulated.waiting import library, prefer
from benchmarks.models import SEED, Workload
from tf_ooo.costs.table import CostTable
from tf_ooo.hosts.worker import serve

_WAIT = tf.load_op_library(str(library())).ooo_wait


class Emulated(keras.layers.Layer):  # type: ignore[misc]
    """Multiplies by a vector, so that there is a weight with a gradient; takes as long as the costs say."""

    def __init__(self, seconds: tuple[float, float, float], **settings: Any) -> None:
        super().__init__(**settings)
        self.seconds = seconds

    def build(self, shape: Any) -> None:
        """Make the weight."""
        self.weight = self.add_weight(shape=(shape[-1],), initializer="ones", name="weight")

    def call(self, x: Any) -> Any:
        """Wait for F, and for dO and dW when gradients come."""
        forward_s, output_grad_s, weight_grad_s = self.seconds

        def run(x: Any, weight: Any) -> Any:
            def gradients(dy: Any) -> tuple[Any, Any]:
                summands = _WAIT(x=dy * x, seconds=weight_grad_s)
                return _WAIT(x=dy * weight, seconds=output_grad_s), tf.reduce_sum(summands, axis=0)

            return _WAIT(x=x * weight, seconds=forward_s), gradients

        return tf.custom_gradient(run)(x, tf.convert_to_tensor(self.weight))


def workload_of(table: CostTable, microbatches: int = 1) -> Workload:
    """Compile a model of such layers, always with the same names: graphs of one kind are alike."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(SEED)
    layers = [
        Emulated((layer.forward_s, layer.output_grad_s, layer.weight_grad_s), name=layer.name)
        for layer in table.layers
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers], name="emulated")
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    x, y = np.random.default_rng(SEED).normal(size=(2, ROWS * microbatches, WIDTH)).astype("f4")
    return Workload(model, x, y)


def serve_worker(cluster: str, task: int) -> None:
    """Be a worker with an emulated device."""
    prefer()  # and with it all threads that are started from here
    serve(cluster, task, inter_op_threads=8, intra_op_threads=1)
