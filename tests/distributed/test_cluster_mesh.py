"""Replicas over worker processes, from one training process."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from tests.distributed.cluster_models import BATCHES, hosts_of, perceptron, pipeline, train
from tests.distributed.clusters import NthCall, addresses, lose, raises_lost, workers
from tests.same_bits import bits_of

pytestmark = [pytest.mark.alone, pytest.mark.takes(40)]


def test_two_replicas_of_two_stages_over_four_workers():
    """And four of one stage: the weights of stock but for rounding."""
    cluster = addresses(4)
    with workers(cluster, [1, 2, 3]):
        stock, mesh, parallel = perceptron(), perceptron(), perceptron()
        expected = train(stock, []).history  # before the cluster is joined
        callback = pipeline(cluster, microbatches=4, replicas=2)
        logs = train(mesh, [callback]).history
        train(parallel, [pipeline(cluster, microbatches=4, replicas=4, costs=None, profile_steps=0)])
    assert np.allclose(logs["loss"], expected["loss"], atol=1e-6)
    for model in (mesh, parallel):
        assert hosts_of(model) == ["localhost"]
        for ours, theirs in zip(model.get_weights(), stock.get_weights(), strict=True):
            assert np.abs(ours - theirs).max() < 1e-5
    section = callback.report.pipeline
    assert [len(names) for names in section.replica_devices] == [2, 2]
    tasks = {
        int(node.device.split("task:")[1].split("/")[0]) for node in callback.report.rewritten_graph.node
    }
    assert tasks == {0, 1, 2, 3}


def test_the_same_weights_twice():
    cluster = addresses(2)
    with workers(cluster, [1]):
        first, second = perceptron(), perceptron()
        for model in (first, second):
            train(model, [pipeline(cluster, microbatches=4, replicas=2)])
    assert bits_of(first) == bits_of(second)


def test_a_worker_of_another_replica_that_is_killed_is_named():
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        model = perceptron()
        kills = NthCall("on_train_batch_begin", BATCHES + 2, lambda: lose(started[1], signal.SIGKILL))
        with raises_lost(cluster):
            train(model, [pipeline(cluster, microbatches=4, replicas=2), kills])
        assert hosts_of(model) == ["localhost"]
