"""Two ranks of Horovod, each with a pipeline over workers of its own."""

from __future__ import annotations

import signal

import keras
import numpy as np
import pytest

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")

import tf_ooo
from tests.distributed.cluster_models import BATCHES, ROWS, data, hosts_of, perceptron, pipeline, train
from tests.distributed.clusters import NthCall, addresses, lose, raises_lost, workers
from tests.same_bits import bits_of
from tf_ooo.modes.data_parallel import connect

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ranks(2, "horovod"),
    pytest.mark.takes(60),
]


def fit(model, rank, callbacks, epochs=3):
    """On every second row: together the ranks have the rows of a batch of ``train``."""
    x, y = data()
    mine = slice(rank, None, 2)
    options = {"batch_size": ROWS // 2, "shuffle": False, "verbose": 0, "epochs": epochs}
    return model.fit(x[mine], y[mine], callbacks=callbacks, **options)


def test_the_ranks_are_one_pipeline_on_the_joint_batch():
    cluster, during = addresses(2), []
    with workers(cluster, [1]):
        engine, stock, model = connect(), perceptron(), perceptron()
        train(stock, [], epochs=3)
        if engine.rank == 1:  # rank 0's weights count
            model.set_weights([weight + 1 for weight in model.get_weights()])
        callback = pipeline(cluster, replicas=2)
        watch = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: during.append(hosts_of(model))
        )
        fit(model, engine.rank, [callback, watch])
        assert hosts_of(model) == ["localhost"]
    assert during[-1] == ["localhost", "worker"]
    said = engine.gather(bits_of(model))
    assert said == [said[0]] * 2
    for ours, theirs in zip(model.get_weights(), stock.get_weights(), strict=True):
        assert np.abs(ours - theirs).max() < 1e-5
    nodes = callback.report.rewritten_graph.node
    devices = {node.device for node in nodes if node.op.startswith("HorovodAllreduce")}
    assert all("job:localhost" in device for device in devices)
    assert any("job:worker" in node.device for node in nodes)


def test_a_worker_that_is_killed_is_named_and_the_other_rank_does_not_wait():
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        engine, model, callbacks = connect(), perceptron(), [pipeline(cluster, replicas=2)]
        if engine.rank == 1:
            kills = NthCall("on_train_batch_begin", BATCHES + 2, lambda: lose(started[1], signal.SIGKILL))
            with raises_lost(cluster):
                fit(model, engine.rank, [*callbacks, kills])
        else:
            with pytest.raises(tf_ooo.BackendError, match="1"):
                fit(model, engine.rank, callbacks)
        assert hosts_of(model) == ["localhost"]
