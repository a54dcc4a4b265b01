"""A model trained from one start in TensorFlow's own order and rewritten: the bits must be the same."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import tf_ooo
from tests import zoo
from tests.zoo import KERAS_3, keras
from tf_ooo.report.report import Report
from tf_ooo.rewriting import one_device
from tf_ooo.rewriting.result import RewriteResult

# Two steps are the six examples of tests/zoo.py; an epoch has them several times.
BATCH_SIZE, EPOCHS, TIMES = 3, 2, 5
# One trace and no step timed: what is asked is only whether the bits are the same.
PLAIN = {"schedule": "fast_forward", "profile_steps": 0, "strict": True}
# Nothing can be put before anything in these, for this reason.
NOTHING_MOVES = {
    "one_layer": "one trainable layer, the first: there is no dO to put before its dW",
    "only_an_embedding": "one trainable layer, and what leads to it is its dO alone",
    "only_a_kernel": "one trainable layer, and what leads to it is its dO alone",
}


@dataclass(frozen=True)
class Trained:
    """Holds what one ``fit`` left: every variable that training may write, and the losses of its epochs."""

    state: dict[str, np.ndarray]
    history: dict[str, list[float]]


@dataclass(frozen=True)
class Rewritten:
    """Holds what a ``fit`` in our order left; ``rewrites`` are (GraphDef that came, what was made of it)."""

    trained: Trained
    report: Report
    rewrites: list[tuple[Any, RewriteResult]]


def bits_of(model: Any) -> int:
    """A check sum of the bits of a model's variables and its optimizer's."""
    bits = 0
    for variable in (*model.variables, *model.optimizer.variables):
        bits = zlib.crc32(np.asarray(variable).tobytes(), bits)
    return bits


def variables_of(model: Any) -> dict[str, Any]:
    """Weights, seeds, metrics, the state of every optimizer."""
    optimizers = getattr(model, "optimizers", (model.optimizer,))
    groups = {f"optimizer {number}": optimizer.variables for number, optimizer in enumerate(optimizers)}
    groups |= {"model": model.variables, "metrics": [v for metric in model.metrics for v in metric.variables]}
    return {f"{group}, {i}": v for group, variables in groups.items() for i, v in enumerate(variables)}


def values_of(model: Any) -> dict[str, np.ndarray]:
    return {name: np.array(variable) for name, variable in variables_of(model).items()}


@contextmanager
def recorded_rewrites() -> Iterator[list[tuple[Any, RewriteResult]]]:
    """(GraphDef that came, what was made of it) of each rewrite in the block."""
    rewrites: list[tuple[Any, RewriteResult]] = []
    rewrite_graph = one_device.rewrite_graph

    def recorded(graph_def: Any, *arguments: Any) -> RewriteResult:
        result = rewrite_graph(graph_def, *arguments)
        rewrites.append((graph_def, result))
        return result

    with mock.patch.object(one_device, "rewrite_graph", recorded):
        yield rewrites


class Training:
    """Trains a model in stock order at once, and in ours when asked, each time from the same start.

    The model is made once: to go back its variables are set.  With ``fresh`` it is made anew each time, and
    has no variables but its weights before its first step.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str = "",
        epochs: int = EPOCHS,
        fresh: bool = False,
        **fit_options: Any,
    ) -> None:
        self.name, self._make, self._fresh = name, make, fresh or not KERAS_3
        self._fit_options = {"batch_size": BATCH_SIZE, "epochs": epochs, "verbose": 0}
        self._fit_options |= {name: _several_times(value) for name, value in fit_options.items()}
        self.model, self.x, self.y = make()
        if not self._fresh:
            zoo.make_variables(self.model, self.x, self.y)
        self._start = {} if self._fresh else values_of(self.model)
        self.stock = self._fit([])
        assert not same(self.stock.state, self._start), "the stock training changed nothing"

    def ours(self, *callbacks: Any, **options: Any) -> Rewritten:
        """The same with our callback, PLAIN but for these options, and behind it others."""
        self._go_back()
        callback = tf_ooo.OOOBackprop(**{**PLAIN, **options})
        with recorded_rewrites() as rewrites:
            trained = self._fit([callback, *callbacks])
        return Rewritten(trained, callback.report, rewrites)

    @functools.cached_property
    def plain(self) -> Rewritten:
        return self.ours()

    def _go_back(self) -> None:
        if self._fresh:
            self.model, self.x, self.y = self._make()
        for name, value in self._start.items():
            variables_of(self.model)[name].assign(value)

    def _fit(self, callbacks: list[Any]) -> Trained:
        keras.utils.set_random_seed(11)  # fit shuffles
        data = _several_times(self.x), _several_times(self.y)
        history = self.model.fit(*data, callbacks=callbacks, **self._fit_options)
        return Trained(values_of(self.model), history.history)


def _several_times(data: Any) -> Any:
    """An epoch of a few steps takes longer to begin than to run."""
    return tf.nest.map_structure(lambda rows: None if rows is None else np.concatenate([rows] * TIMES), data)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def assert_same_bits(stock: Trained, ours: Trained) -> None:
    assert ours.history == stock.history
    assert ours.state.keys() == stock.state.keys()
    for name, value in stock.state.items():
        np.testing.assert_array_equal(ours.state[name], value, err_msg=name)


def assert_ordered(report: Report, name: str = "") -> None:
    """The graph was rewritten, and ops wait for edges that were added; for none where nothing can move."""
    assert not report.fell_back, report.fallback_reason
    assert report.rewritten_graph is not None
    if name in NOTHING_MOVES:
        assert (report.moved_ops, report.added_edges) == (0, 0), NOTHING_MOVES[name]
        return
    assert report.moved_ops > 0
    assert report.added_edges > 0


def assert_trains_alike(training: Training, ours: Rewritten) -> None:
    assert_same_bits(training.stock, ours.trained)
    assert_ordered(ours.report, training.name)
