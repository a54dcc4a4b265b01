"""Two ranks with a pipeline of two stages each, against one pipeline on the joint batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")

import tf_ooo
from tests import forked, launches
from tests.graph.gans import InTurns
from tests.same_bits import bits_of
from tf_ooo.compat import keras_variables
from tf_ooo.modes.data_parallel import connect
from tf_ooo.modes.pipeline.placed_step import StagedEvaluation

pytestmark = [pytest.mark.ranks(2, "horovod"), pytest.mark.devices(2), pytest.mark.takes(20)]
ROWS, BATCHES, LAST, RANKS = 8, 5, 5, 2


def classifier():
    keras.utils.set_random_seed(4)
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(20, 8)(tokens))
    for width in (33, 21, 17):
        x = keras.layers.Dense(width, activation="tanh")(x)
    model = keras.Model(tokens, keras.layers.Dense(4)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def batches_of(rank):
    """The last one is smaller, and no multiple of the number of micro-batches."""
    random = np.random.default_rng(50 + rank)
    for number in range(BATCHES):
        x = random.integers(0, 20, size=(LAST if number == BATCHES - 1 else ROWS, 6))
        yield x, x.sum(1) % 4


def joint_batches(ranks):
    """Yield the batches of these ranks together."""
    for parts in zip(*(batches_of(rank) for rank in ranks), strict=True):
        yield tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def train(model, ranks, epochs, callbacks, **options):
    """On the batches of these ranks; returns the last epoch's logs and the report."""
    ours = tf_ooo.OOOBackprop(mode="pipeline", devices=2, **options)
    dataset = tf.data.Dataset.from_generator(
        lambda: joint_batches(ranks),
        output_signature=(tf.TensorSpec((None, 6), tf.int64), tf.TensorSpec((None,), tf.int64)),
    )
    history = model.fit(dataset, epochs=epochs, verbose=0, callbacks=[ours, *callbacks])
    return {name: values[-1] for name, values in history.history.items()}, ours.report


def joint_training(epochs):
    """The weights and the last logs of one pipeline on the batches of all ranks; in a process alone."""
    model = classifier()
    logs, _ = train(model, range(RANKS), epochs, [], microbatches=6, schedule="gpipe")
    return model.get_weights(), logs


def places(model):
    return sorted(
        {keras_variables.value_of(v).device[-5:] for v in [*model.variables, *model.optimizer.variables]}
    )


def train_in_turns(ranks, **options):
    """Weights of a generator and its critic, on the rows of these ranks, and the report."""
    keras.utils.set_random_seed(3)
    model = InTurns()
    model.compile()
    rows = np.random.default_rng(7).normal(size=(RANKS, 24, 7)).astype("float32")
    model(rows[0])
    x = np.concatenate(
        [rows[list(ranks), begin : begin + ROWS].reshape(-1, 7) for begin in range(0, 24, ROWS)]
    )
    ours = tf_ooo.OOOBackprop(mode="pipeline", devices=2, schedule="zb_h1", **options)
    model.fit(x, x, batch_size=ROWS * len(ranks), shuffle=False, epochs=3, verbose=0, callbacks=[ours])
    return model.get_weights(), ours.report


def joint_turns():
    """Return the weights of one pipeline; in a process alone."""
    return train_in_turns(range(RANKS), microbatches=4)[0]


@pytest.fixture(scope="module")
def alone():
    """Return what processes alone leave; they run before this rank's first op."""
    own = launches.without_launcher()
    return {
        "once": forked.result_of(joint_training, 3, environment=own),
        "in turns": forked.result_of(joint_turns, environment=own),
    }


def test_replicas_are_one_pipeline_on_the_joint_batch(alone):
    engine, during, replica = connect(), [], classifier()
    if engine.rank == 1:  # rank 0's weights count
        replica.set_weights([weight + 1 for weight in replica.get_weights()])
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: during.append(places(replica)))
    options = {"microbatches": 3, "schedule": "zb_h1", "replicas": RANKS}
    logs, report = train(replica, [engine.rank], 3, [watch], **options)
    assert during == [["CPU:0", "CPU:1"]] * 3
    assert places(replica) == ["CPU:0"]
    assert report.added_edges > 0
    assert report.moved_ops > 0
    assert report.planned.workers == RANKS
    stages = [stage["layers"] for stage in report.pipeline["stages"]]
    assert len(stages) == 2
    said = engine.gather({"bits": bits_of(replica), "stages": stages})
    assert said == [said[0]] * RANKS
    joint_weights, joint_logs = alone["once"]
    for mine, together in zip(replica.get_weights(), joint_weights, strict=True):
        assert np.abs(mine - together).max() < 1e-5
    assert logs["loss"] == pytest.approx(joint_logs["loss"], abs=1e-6)
    assert logs["accuracy"] == pytest.approx(joint_logs["accuracy"], abs=1e-6)


def test_updates_in_turns_are_averaged_in_each(alone):
    engine = connect()
    weights, report = train_in_turns([engine.rank], microbatches=2, replicas=RANKS)
    assert any("in 2 turns" in note for note in report.notes)
    for mine, together in zip(weights, alone["in turns"], strict=True):
        assert np.abs(mine - together).max() < 1e-5
    said = engine.gather([weight.tolist() for weight in weights])
    assert said == [said[0]] * RANKS


def test_replicas_put_variables_back_when_a_callback_raises():
    model, during = classifier(), []

    def stop(epoch, logs):
        during.append(places(model))
        if epoch == 1:
            raise RuntimeError("stopped here")

    stops = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    with pytest.raises(RuntimeError, match="stopped here"):
        train(model, [connect().rank], 4, [stops], microbatches=3, schedule="1f1b", replicas=RANKS)
    assert during == [["CPU:0", "CPU:1"]] * 2
    assert places(model) == ["CPU:0"]


def test_replicas_predict_on_their_stages_devices(monkeypatch):
    """Each rank predicts for itself, as one pipeline does."""
    calls, staged = [], StagedEvaluation.__call__
    monkeypatch.setattr(
        StagedEvaluation, "__call__", lambda self, *given: calls.append(1) or staged(self, *given)
    )
    model, predicted = classifier(), []
    x = next(batches_of(0))[0]
    predicts = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: predicted.append(model.predict(x, verbose=0))
    )
    train(model, [connect().rank], 2, [predicts], microbatches=3, schedule="1f1b", replicas=RANKS)
    assert len(calls) == 2
    assert predicted[-1].tobytes() == model.predict(x, verbose=0).tobytes()


def test_a_schedule_of_their_own_and_layers_that_run_again(tmp_path):
    """The bits of the named schedule; two ranks with different files do not train together."""
    engine = connect()
    options = {"microbatches": 3, "replicas": RANKS}
    named = classifier()
    _, report = train(named, [engine.rank], 2, [], **options, schedule="zb_h1", recompute="all")
    path = tmp_path / f"rank_{engine.rank}.txt"
    path.write_text(report.planned.to_text())
    ours = classifier()
    _, again = train(ours, [engine.rank], 2, [], **options, schedule=path)
    assert again.planned.lanes == report.planned.lanes
    assert again.planned.recompute == report.planned.recompute
    said = engine.gather([bits_of(named), bits_of(ours)])
    assert said == [[said[0][0]] * 2] * RANKS
    order = report.planned.to_text()
    path.write_text(order.replace("policy zb_h1", "policy mine") if engine.rank else order)
    with pytest.raises(tf_ooo.OptionsError, match="do not train the same thing: rank 1 has options.schedule"):
        train(classifier(), [engine.rank], 2, [], **options, schedule=path)
