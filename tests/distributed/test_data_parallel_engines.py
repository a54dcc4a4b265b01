"""Some results depend on the engine, Horovod or TensorFlow's collectives, and on the number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.distributed import training as t
from tests.zoo import needs_keras_3
from tf_ooo.modes.data_parallel.ordering import sent_bytes
from tf_ooo.modes.data_parallel.planning import one_step
from tf_ooo.tracing.variables import checksum

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = pytest.mark.takes(75)

TOGETHER = 2


def _together_with(launched: Any, names: Iterable[str]) -> list[Any]:
    """Parameters ("engine", name)."""
    return [
        pytest.param(*p.values, name, marks=p.marks, id=f"{p.id}-{name}") for p in launched for name in names
    ]


def _newer(*launched: Any) -> list[Any]:
    """Ranks started in these ways only where Keras is Keras 3."""
    return [pytest.param(*p.values, marks=[*p.marks, needs_keras_3], id=p.id) for p in launched]


with_two = pytest.mark.parametrize("engine", [t.BY_HAND, *_newer(t.COLLECTIVES)], indirect=True)
with_all = pytest.mark.parametrize("engine", [t.BY_HAND, *_newer(t.COLLECTIVES, t.FOUR)], indirect=True)


@pytest.mark.parametrize("engine", _newer(t.FOUR), indirect=True)
def test_horovodrun_has_started_four(engine):
    assert (engine.name, engine.size) == ("horovod", 4)
    assert engine.local_rank == engine.rank


@with_all
def test_compression(engine):
    """Values that 16 bits hold come back exact; others rounded, but the same on all ranks."""
    for compression in ("none", "fp16", "bf16"):
        exact = tf.reshape(tf.range(15, dtype=tf.float32), [3, 5]) * float(engine.rank + 1)
        random = tf.constant(np.random.default_rng(engine.rank).normal(size=1001).astype("float32"))

        @tf.function
        def both(exact: Any, random: Any, compression: str = compression) -> Any:
            named = [("exact", exact), ("random", random), ("int", tf.constant([3, 4]))]
            total = engine.allreduce(named, "Sum", compression)
            return total, engine.allreduce(named[:2], "Average", compression)

        total, mean = both(exact, random)
        scale = engine.size * (engine.size + 1) / 2
        np.testing.assert_array_equal(total[0], np.arange(15).reshape(3, 5) * scale)
        np.testing.assert_array_equal(mean[0], np.arange(15).reshape(3, 5) * scale / engine.size)
        np.testing.assert_array_equal(total[2], np.array([3, 4]) * engine.size)
        true = sum(np.random.default_rng(rank).normal(size=1001) for rank in range(engine.size))
        allowed = {"none": 1e-5, "fp16": 0.01, "bf16": 0.08}[compression]
        np.testing.assert_allclose(total[1], true, atol=allowed)
        np.testing.assert_allclose(mean[1], true / engine.size, atol=allowed / engine.size + 1e-6)
        assert len({tuple(values) for values in engine.gather(mean[1].numpy().tolist())}) == 1


@with_all
def test_adasum(engine):
    """Equal gradients count once, orthogonal ones are added."""
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([engine.rank]), tf.constant([engine.size + 1, 2]))
    gradients = [("equal", tf.constant([1.0, 2.0])), ("orthogonal", slices), ("zero", tf.zeros([2]))]
    if engine.size == 2:
        gradients.append(("uneven", tf.constant([1.0, 0.0]) if engine.rank == 0 else tf.constant([1.0, 1.0])))
    out = engine.allreduce(gradients, "Adasum", "none")
    np.testing.assert_allclose(out[0], [1.0, 2.0])
    np.testing.assert_allclose(out[1], [[1, 1]] * engine.size + [[0, 0]])
    np.testing.assert_allclose(out[2], [0.0, 0.0])
    if engine.size == 2:  # (1 - 1 / 2) (1, 0) + (1 - 1 / 4) (1, 1)
        np.testing.assert_allclose(out[3], [1.25, 0.75])


@with_two
def test_adasum_in_fit(engine):
    model = t.compiled(t.with_embedding(), keras.optimizers.SGD(0.05))
    before = t.bits(model)
    callback = t.ours(model, t.words(engine.rank, 80), options={"op": "Adasum", "compression": "fp16"})
    assert t.communicates(callback, model)
    assert t.bits(model) != before
    assert t.equal_on_all_ranks(engine, model)


@with_two
@pytest.mark.parametrize("rows", [[3, 5], [4, 0], [0, 0]], ids=str)
def test_rows_of_other_numbers(engine, rows):
    mine = rows[engine.rank]
    slices = tf.IndexedSlices(tf.ones([mine, 2]) * (engine.rank + 1.0), tf.range(mine))
    gathered = engine.allreduce([("rows", slices)], "Sum", "none")[0]
    expected = [rank + 1.0 for rank in range(2) for _ in range(rows[rank])]
    np.testing.assert_array_equal(gathered.values, np.repeat(expected, 2).reshape(-1, 2))
    np.testing.assert_array_equal(gathered.indices, [i for count in rows for i in range(count)])


@with_two
@pytest.mark.parametrize("per_execution", [1, 3])
def test_embedding_and_batches_of_other_sizes(engine, quick_plans, per_execution):
    """Other numbers of rows on each rank, and from step to step."""
    model = t.compiled(t.with_embedding(), keras.optimizers.SGD(0.05), steps_per_execution=per_execution)
    t.ours(model, t.words(engine.rank, 80 if engine.rank == 0 else 59), epochs=2)
    assert int(model.optimizer.iterations.numpy()) == 16
    assert t.equal_on_all_ranks(engine, model)


@with_two
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_no_rank_has_a_constant_of_its_own(engine, op):
    """TensorFlow would merge it with an equal one on this rank only: another graph than on the others.

    The mean over a row has the numbers of two axes, 0 and 1, in its gradient: what tells rank 1 of two.
    The last batch is smaller, so that the graph knows no number of rows.
    """
    model = t.with_embedding()
    model.compile("sgd", "mse", steps_per_execution=TOGETHER, jit_compile=False)
    x, classes = t.words(engine.rank, 77)
    options = {"schedule": "fast_forward", "profile_steps": 0, "strict": True, "op": op}
    report = t.ours(model, (x, np.eye(4, dtype="float32")[classes]), options=options).report
    t.assert_reordered(report, TOGETHER)
    assert t.equal_on_all_ranks(engine, model)


@with_two
def test_half_precision_embedding(engine):
    """A table of bfloat16, which Horovod does not know."""
    layers = [
        keras.Input((6,), dtype="int32"),
        keras.layers.Embedding(20, 8, dtype="bfloat16"),
        keras.layers.Flatten(),
        keras.layers.Dense(4),
    ]
    model = t.compiled(keras.Sequential(layers), keras.optimizers.SGD(0.05))
    before = t.bits(model)
    callback = t.ours(model, t.words(engine.rank, 80))
    assert t.communicates(callback, model)
    assert t.bits(model)[0] != before[0]
    assert t.equal_on_all_ranks(engine, model)


# One process trains on all ranks' batches together, whose sums are in another order: with float64 the order
# is all that differs; with float32 and Adam it is not, as Adam's steps are as long for gradients near zero.
JOINT = {
    "sgd": (t.mlp, lambda: keras.optimizers.SGD(0.05), t.data, "float32", 1e-6),
    "adam": (t.mlp, lambda: keras.optimizers.Adam(0.003), t.data, "float64", 1e-12),
    # Keras squares each occurrence of a row by itself: all ranks' rows have to arrive one by one.
    "rows": (t.with_embedding, lambda: keras.optimizers.Adam(0.003), t.words, "float64", 1e-12),
}


def _all_close(a: Any, b: Any, allowed: float) -> None:
    pairs = list(zip(a.get_weights(), b.get_weights(), strict=True))
    assert pairs
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("engine", "name"),
    _together_with([t.BY_HAND, *_newer(t.COLLECTIVES)], JOINT) + _together_with(_newer(t.FOUR), ["adam"]),
    indirect=["engine"],
)
def test_as_one_process_with_the_joint_batch(engine, name):
    make, optimizer, per_rank, floats, allowed = JOINT[name]
    with t.precision(floats, floats):
        ranks, alone = (t.compiled(make(), optimizer()) for _ in range(2))
        before = t.bits(ranks)
        callback = t.ours(ranks, per_rank(engine.rank))
        t.fit(alone, t.joint(per_rank, engine.size), batch_size=engine.size * t.ROWS)
    assert t.communicates(callback, ranks)
    assert t.bits(ranks) != before
    _all_close(ranks, alone, allowed)


@with_two
@pytest.mark.parametrize("together", [1, pytest.param(TOGETHER, marks=needs_keras_3)], ids=["one", "several"])
def test_as_one_process_where_parts_of_the_batch_are_uneven(engine, together):
    """weighting="samples": ranks with batches of 5 and 11 rows are like one process with 16."""
    x, y = t.joint(t.data, engine.size)
    cuts, rows = [0, 5, 16], 16
    mine = slice(cuts[engine.rank], cuts[engine.rank + 1])
    x_mine, y_mine = (a.reshape(-1, rows, *a.shape[1:])[:, mine].reshape(-1, *a.shape[1:]) for a in (x, y))
    options = {"weighting": "samples"}
    if together > 1:
        options |= {"schedule": "fast_forward", "profile_steps": 0}
    with t.precision("float64", "float64"):
        ranks, alone = (t.compiled(t.mlp(), t.momentum(), steps_per_execution=k) for k in (together, 1))
        callback = t.ours(ranks, (x_mine, y_mine), options=options, batch_size=mine.stop - mine.start)
        t.fit(alone, (x, y), batch_size=rows)
    assert together == 1 or callback.report.added_edges >= together
    _all_close(ranks, alone, 1e-12)


@needs_keras_3
@with_two
def test_embedding_in_steps_together(engine):
    """Rows travel one by one, other numbers of them on each rank."""
    a, b = (
        t.compiled(t.with_embedding(), keras.optimizers.Adam(0.01), steps_per_execution=k)
        for k in (1, TOGETHER)
    )
    alone = t.ours(a, t.words(engine.rank))
    report = t.ours(b, t.words(engine.rank), options={"schedule": "fast_forward", "profile_steps": 1}).report
    assert t.communicates(alone, a)
    assert not report.fell_back, report.fallback_reason
    assert report.added_edges >= TOGETHER
    assert report.ops["comm"] >= 3
    table_bytes, dense_bytes = 20 * 8 * 4, (48 * 4 + 4) * 4
    rows, weights = sent_bytes(one_step(report.rewritten_graph)[2], engine.size)
    assert weights == dense_bytes
    # A batch's words send their rows of 8 numbers, and which they are; each rank's are half an allreduce.
    # Collectives send as many as the rank with most has, which no trace knows.
    gathered_bytes = t.ROWS * 6 * (8 * 4 + 4) * engine.size / 2
    assert rows == (gathered_bytes if engine.name == "horovod" else table_bytes)
    assert t.bits(a) == t.bits(b)
    assert t.equal_on_all_ranks(engine, b)


@with_two
def test_eager(engine):
    a, b = (t.compiled(t.mlp(), keras.optimizers.SGD(0.05), run_eagerly=eager) for eager in (False, True))
    for model in (a, b):
        t.ours(model, t.data(engine.rank, 5 * t.ROWS))
    assert t.equal_on_all_ranks(engine, b)
    for x, y in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


@with_all
def test_first_weights_and_optimizer_state_come_from_rank_0(engine):
    model = t.compiled(t.with_batch_norm(), keras.optimizers.Adam(0.01), rank=engine.rank)
    model.optimizer.build(model.trainable_weights)
    for variable in _state(model.optimizer)[2:]:
        variable.assign(variable + float(engine.rank))
    model.optimizer.learning_rate = 0.01 * (1 + engine.rank)
    t.ours(model, t.data(engine.rank, t.ROWS))
    assert t.equal_on_all_ranks(engine, model)
    assert len(set(engine.gather(checksum(_state(model.optimizer))))) == 1
    assert float(np.asarray(model.optimizer.learning_rate)) == pytest.approx(0.01)


def _state(optimizer: Any) -> list[Any]:
    return list(optimizer.variables)


class Adversaries(keras.Model):
    """Two networks, each with an optimizer of its own; nothing is built before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.layers.Dense(12)
        self.judge = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        self.optimizers = {"generator": keras.optimizers.Adam(0.01)}

    def compile(self, judge_optimizer: Any) -> None:
        super().compile(jit_compile=False)
        self.judge_optimizer = judge_optimizer

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0]
        with tf.GradientTape(persistent=True) as tape:
            forged = self.generator(x[:, :3])
            fooled = tf.reduce_mean(tf.nn.softplus(-self.judge(forged)))
            caught = tf.reduce_mean(tf.nn.softplus(self.judge(forged)) + tf.nn.softplus(-self.judge(x)))
        for optimizer, loss, part in (
            (self.optimizers["generator"], fooled, self.generator),
            (self.judge_optimizer, caught, self.judge),
        ):
            grads = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(grads, part.trainable_variables, strict=True))
        return {"fooled": fooled, "caught": caught}


@with_two
def test_two_optimizers_unbuilt(engine):
    keras.utils.set_random_seed(engine.rank)
    model = Adversaries()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    callback = t.ours(model, t.data(engine.rank, 6 * t.ROWS))
    assert t.communicates(callback, model)
    optimizers = (model.judge_optimizer, model.optimizers["generator"])
    state = [*model.weights, *(variable for optimizer in optimizers for variable in _state(optimizer))]
    assert len(set(engine.gather(checksum(state)))) == 1
    assert int(model.judge_optimizer.iterations.numpy()) == 6


@with_two
def test_unknown_number_of_batches(engine):
    def rows() -> Iterator[Any]:
        yield from zip(*t.data(engine.rank, 80 if engine.rank == 0 else 59), strict=True)

    spec = (tf.TensorSpec((12,), tf.float32), tf.TensorSpec((), tf.int64))
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    dataset = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(t.ROWS)
    callback = tf_ooo.OOOBackprop(mode="data_parallel")
    model.fit(dataset, epochs=2, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations.numpy()) == 16
    assert t.equal_on_all_ranks(engine, model)


@with_two
def test_one_rank_stops_within_an_epoch(engine):
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    counter = t.CountSteps(stop_at=5 if engine.rank == 1 else None)
    t.ours(model, t.data(engine.rank, 80), [counter], epochs=3)
    assert int(model.optimizer.iterations.numpy()) == 5
    assert t.equal_on_all_ranks(engine, model)


SCHEDULES = {
    "reverse_first_k": {"schedule": "reverse_first_k", "k": 4, "profile_steps": 0},
    "search": {"schedule": "search", "profile_steps": 0},
}


@functools.cache
def _in_the_stock_order(engine: Any) -> list[str]:
    model = t.compiled(t.deep(), t.momentum())
    assert t.communicates(t.ours(model, t.data(engine.rank)), model)
    return t.bits(model)


@pytest.mark.parametrize(
    ("engine", "name"),
    _together_with(_newer(t.COLLECTIVES), SCHEDULES) + _together_with(_newer(t.FOUR), ["search"]),
    indirect=["engine"],
)
def test_every_schedule_gives_the_bits_of_the_stock_order(engine, quick_plans, name):
    """Two ranks of Horovod: test_data_parallel_schedules.py."""
    model = t.compiled(t.deep(), t.momentum(), steps_per_execution=TOGETHER)
    report = t.ours(model, t.data(engine.rank), options=SCHEDULES[name]).report
    assert not report.fell_back, report.fallback_reason
    assert report.added_edges >= TOGETHER
    assert report.moved_ops > 0
    assert report.ops["comm"] == len(model.trainable_weights)
    assert t.equal_on_all_ranks(engine, model)
    if engine.size == 2:  # four ranks' numbers are added in an order that depends on what travels together
        assert t.bits(model) == _in_the_stock_order(engine)
