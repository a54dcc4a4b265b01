"""``model.evaluate(callbacks=[...])`` on several processes: each has its rows, all get the mean."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_fits, keras_layers
from tf_ooo.hosts.ranks.base import Engine, naming_the_lost
from tf_ooo.tracing import sync

if TYPE_CHECKING:
    import keras


def numbers_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of logs that are numbers."""
    out = {}
    for key, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            out[key] = float(value)
    return out


def average_evaluation(engine: Engine, model: keras.Model) -> None:
    """The evaluation that begins ends with logs averaged over all ranks, weighted by samples."""
    callbacks = keras_fits.running_callback_list()
    if engine.size == 1 or callbacks is None:
        return
    own = callbacks.on_test_end

    def on_test_end(logs: dict[str, Any] | None = None) -> None:
        keras_layers.set_on(callbacks, "on_test_end", None)
        logs = {} if logs is None else logs
        with naming_the_lost(engine, "at the end of an evaluation"):
            replies = engine.gather([numbers_of(logs), keras_fits.samples_seen(model)])
        logs.update(sync.average_logs(*zip(*replies, strict=True)))
        own(logs)

    keras_layers.set_on(callbacks, "on_test_end", on_test_end)
