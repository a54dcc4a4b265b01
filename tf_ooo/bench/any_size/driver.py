"""The process that trains for ``tf-ooo bench any-size``: over workers, or on its own device."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tf_ooo.bench.shared.processes import end_with, requests
from tf_ooo.bench.shared.rows import Row

if TYPE_CHECKING:
    import keras

_LENGTH, _VOCABULARY, _HEADS = 32, 512, 8
# Fewer make smaller graphs, which are in the workers' memory, too.
MICROBATCHES = 2


@dataclass(frozen=True)
class AnySizeRun:
    """``cluster``: addresses of workers; empty: stock Keras on one device.  ``planned_bytes``: of each."""

    layers: int
    width: int
    rows: int
    steps: int
    cluster: str = ""
    planned_bytes: int = 0


def main(asked: AnySizeRun) -> None:
    """Trains and tells."""
    import numpy as np

    import tf_ooo

    callbacks: list[Any] = []
    if asked.cluster:
        callbacks.append(
            tf_ooo.OOOBackprop(
                tf_ooo.Pipeline(
                    devices=asked.cluster,
                    microbatches=MICROBATCHES,
                    schedule="1f1b",
                    memory_limit_bytes=asked.planned_bytes,
                    profile_steps=0,
                )
            )
        )
    with tf_ooo.host_memory() if asked.cluster else contextlib.nullcontext():
        model = _compiled(asked)
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, (asked.rows * asked.steps, _LENGTH))
    x, y = tokens.astype("int32"), np.roll(tokens, -1, 1)
    seen = _of_each_step()
    settings = {"batch_size": asked.rows, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[*callbacks, seen], **settings)
    row: Row = {
        "weights_bytes": sum(4 * int(np.prod(weight.shape)) for weight in model.weights),
        "losses": seen.losses,
        "step_s": seen.seconds,
    }
    if callbacks:
        row["predicted_peak_bytes"] = list(callbacks[0].report.pipeline.predicted_peak_bytes)
    end_with(row)


def _compiled(asked: AnySizeRun) -> keras.Model:
    import keras

    from tf_ooo.bench.shared.networks import gpt2

    keras.utils.set_random_seed(1)
    model = gpt2(asked.layers, asked.width, _HEADS, _LENGTH, _VOCABULARY)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    return model


def _of_each_step() -> Any:
    import keras

    class EachStep(keras.callbacks.Callback):  # type: ignore[misc]
        """The loss of each batch by itself, and the seconds that it took."""

        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.seconds: list[float] = []
            self._began_s = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.reset_metrics()
            self._began_s = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.losses.append(float(logs["loss"]))
            self.seconds.append(time.perf_counter() - self._began_s)

    return EachStep()


if __name__ == "__main__":
    main(*requests(AnySizeRun))
