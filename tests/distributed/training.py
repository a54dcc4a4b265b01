"""Small models, data that differ by rank, and training them: with tf_ooo, with stock Horovod, alone."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tf_ooo.compat import func_graphs, keras_compiled, tf_functions
from tf_ooo.modes.data_parallel import planning
from tf_ooo.modes.data_parallel.profiling import OrderedSteps
from tf_ooo.modes.data_parallel.scheduled import InTurns, KeptSteps, ScheduledSteps
from tf_ooo.planning.choosing.plan import as_asked, policy_named
from tf_ooo.planning.model.problem import Problem
from tf_ooo.tracing.variables import checksum

# An epoch has so many steps, and so many run together: five whole executions and a shorter one.
STEPS, TOGETHER, ROWS = 22, 4, 8
KERAS_3 = hasattr(keras, "ops")
# These start the ranks of a test, as parameters of the fixture "engine".
BY_HAND = pytest.param("horovod", marks=pytest.mark.ranks(2), id="horovod")
COLLECTIVES = pytest.param("collectives", marks=pytest.mark.ranks(2, "collectives"), id="collectives")
FOUR = pytest.param("horovodrun", marks=pytest.mark.ranks(4, "horovodrun"), id="four")


def data(rank: int, rows: int = STEPS * ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Features of length 12 and one of 4 classes; other numbers on every rank."""
    random = np.random.default_rng(100 + rank)
    x = random.normal(size=(rows, 12)).astype("float32")
    return x, (x @ np.arange(48).reshape(12, 4) % 7).argmax(-1)


def words(rank: int, rows: int = STEPS * ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of 6 words of 20, and a class."""
    x = np.random.default_rng(200 + rank).integers(0, 20, size=(rows, 6))
    return x, x.sum(1) % 4


def mlp() -> keras.Model:
    return keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)]
    )


def deep() -> keras.Model:
    layers = [keras.layers.Dense(16, activation="tanh") for _ in range(4)]
    return keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(4)])


def with_batch_norm() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((12,)), layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dense(4)]
    )


def with_embedding() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(20, 8), layers.Flatten(), layers.Dense(4)]
    )


def tied() -> keras.Model:
    """One layer used twice."""
    x = keras.Input((12,))
    shared = keras.layers.Dense(12, activation="tanh")
    return keras.Model(x, keras.layers.Dense(4)(shared(shared(x))))


def momentum() -> Any:
    """A slot for each weight and few ops: such a step is traced in half the time that one of Adam takes."""
    return keras.optimizers.SGD(0.05, momentum=0.9)


def compiled(model: keras.Model, optimizer: Any, rank: int = 0, **more: Any) -> keras.Model:
    """Compiled; the same first weights on all ranks unless ``rank`` is given."""
    random = np.random.default_rng(7 + rank)
    model.set_weights([random.normal(size=w.shape, scale=0.3).astype(w.dtype) for w in model.get_weights()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False, **more)
    return model


def fit(model: keras.Model, xy: tuple[Any, Any], callbacks: Any = (), **more: Any) -> Any:
    settings: dict[str, Any] = {"batch_size": ROWS, "epochs": 1, "shuffle": False, "verbose": 0} | more
    return model.fit(*xy, callbacks=list(callbacks), **settings)


def ours(
    model: keras.Model, xy: tuple[Any, Any], callbacks: Any = (), options: Any = None, **more: Any
) -> tf_ooo.OOOBackprop:
    """Trains with the callback, which is returned; its ``model.history`` is the history."""
    callback = tf_ooo.OOOBackprop(mode="data_parallel", **(options or {}))
    fit(model, xy, [callback, *callbacks], **more)
    return callback


def stock_in_apply(model: keras.Model, xy: tuple[Any, Any], **more: Any) -> None:
    """Stock Horovod, averaging where the optimizer applies."""
    import horovod.tensorflow as hvd

    def mean(grads: Any) -> list[Any]:
        return [hvd.allreduce(grad, op=hvd.Average) for grad in grads]

    optimizer = model.optimizer
    keras_compiled.build_optimizer(optimizer, model.trainable_variables)  # traced once instead of twice
    if KERAS_3:
        apply = optimizer.apply
        object.__setattr__(optimizer, "apply", lambda grads, variables=None: apply(mean(grads), variables))
    else:
        apply_gradients = optimizer.apply_gradients

        def averaging(pairs: Any, *args: Any, **kwargs: Any) -> Any:
            grads, variables = zip(*pairs, strict=True)
            return apply_gradients(zip(mean(grads), variables, strict=True), *args, **kwargs)

        object.__setattr__(optimizer, "apply_gradients", averaging)
    fit(model, xy, **more)


def tape_model(of: keras.Model) -> keras.Model:
    """The same model with a train step that averages in Horovod's tape."""
    import horovod.tensorflow as hvd

    class WithTape(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            tape = hvd.DistributedGradientTape(tape)
            variables = [v.value if KERAS_3 else v for v in self.trainable_variables]
            grads = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"loss": loss}

    return WithTape(of.inputs, of.outputs)


def joint(per_rank: Callable[[int], tuple[np.ndarray, np.ndarray]], size: int, rows: int = ROWS) -> Any:
    """The batches of all ranks joined: what one process trains on with batches of ``size * rows``."""
    parts = [per_rank(rank) for rank in range(size)]
    count = len(parts[0][0])
    cuts = range(0, count, rows)
    return tuple(
        np.concatenate([part[i][cut : cut + rows] for cut in cuts for part in parts]) for i in (0, 1)
    )


def bits(model: keras.Model) -> list[str]:
    """Return a short digest of each weight, which can be read where one differs."""
    digests = [hashlib.sha1(value.tobytes()).hexdigest()[:16] for value in model.get_weights()]
    assert digests
    return digests


def equal_on_all_ranks(engine: Any, model: keras.Model) -> bool:
    return len(set(engine.gather(checksum(model.trainable_variables)))) == 1


def communications(step: Any) -> int:
    """Return how many ops of the step's largest trace communicate, functions that it calls included."""
    counts = [0]
    for function in tf_functions.functions_of(step):
        for concrete in tf_functions.concrete_functions_of(function):
            types = [op_type for _, op_type in func_graphs.ops_reached_from(concrete.graph)]
            counts.append(sum(name.startswith(("Horovod", "Collective")) for name in types))
    return max(counts)


def ordered_steps(scheduled: ScheduledSteps) -> OrderedSteps | None:
    """Return the steps in a planned order that run, or are compared; None: there are none."""
    phase = scheduled.experiment.phase
    return phase.ordered if isinstance(phase, InTurns | KeptSteps) else None


def communicates(callback: tf_ooo.OOOBackprop, model: keras.Model) -> bool:
    """Return whether the step that Keras calls has a communication for each weight."""
    return communications(callback._life.mode.ranks.step.function) >= len(model.trainable_weights)


def assert_not_reordered(report: tf_ooo.Report) -> None:
    """Functions of one step each: nothing overlaps, so gradients are averaged and nothing else is changed."""
    assert "each execution is one step, so that steps cannot overlap" in report.fallback_reason
    assert report.rewritten_graph is None
    assert (report.moved_ops, report.added_edges) == (0, 0)


def assert_reordered(report: tf_ooo.Report, together: int) -> None:
    """Functions of so many steps were rewritten, and in each step something moved."""
    assert report.rewritten_graph is not None
    assert report.added_edges >= together
    assert report.moved_ops >= together


def gaining(policy: str, layers: Any, link: Any, workers: int, **options: Any) -> planning.PlannedGain:
    """A plan whose gain is beyond doubt, so that it is compared: in the place of ``planned.make_plan``."""
    problem = Problem(tuple(layers), workers, link=link, options=options, mode=planning.MODE)
    asked = as_asked(policy_named(policy, planning.MODE), problem)
    return planning.PlannedGain(asked, 1.1 * asked.step_s)


def certain_plan(layers: Any, link: Any, workers: int, *arguments: Any) -> planning.PlannedGain:
    """Reverse first-2, whatever is asked for."""
    return gaining("reverse_first_k", layers, link, workers, k=2)


@contextlib.contextmanager
def warnings_of_tf_ooo() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tf_ooo").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("tf_ooo").removeHandler(handler)


@contextlib.contextmanager
def precision(policy: str, floats: str = "float32") -> Iterator[None]:
    """Models made inside compute so; ``floats`` is also what losses are made of."""
    keras.mixed_precision.set_global_policy(policy)
    keras.backend.set_floatx(floats)
    try:
        yield
    finally:
        keras.backend.set_floatx("float32")
        keras.mixed_precision.set_global_policy("float32")


class CountSteps(keras.callbacks.Callback):
    """Counts executions; asks to stop where told."""

    def __init__(self, stop_at: int | None = None, stop_after_epoch: int | None = None) -> None:
        super().__init__()
        self.count, self.stop_at, self.stop_after_epoch = 0, stop_at, stop_after_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        if self.count == self.stop_at:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.stop_after_epoch:
            self.model.stop_training = True
