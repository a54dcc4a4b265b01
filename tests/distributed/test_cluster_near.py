"""Processes with several devices each: messages within one take less, and plans count with that."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests import forked
from tests.distributed.cluster_models import hosts_of, perceptron, pipeline, train
from tests.distributed.clusters import addresses, workers
from tests.same_bits import bits_of
from tf_ooo.hosts.cluster import connect

pytestmark = [pytest.mark.alone, pytest.mark.devices(2), pytest.mark.takes(40)]


def serve(cluster, task):
    """Serve with two devices of the CPU."""
    from tf_ooo.hosts import worker

    forked.end_with_parent()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    worker.serve(cluster, task, say=lambda text: print(text, flush=True))


def test_devices_of_one_process_are_near_to_each_other():
    cluster = addresses(2)
    with workers(cluster, [1], lambda *where: forked.start(serve, *where)):
        model, again = perceptron(), perceptron()
        callback = pipeline(cluster, schedule="zb_search", microbatches=4, costs=None, profile_steps=1)
        train(model, [callback])
        joined = connect(cluster)
        here, there = "/job:localhost/replica:0/task:0", "/job:worker/replica:0/task:1"
        assert joined.devices == tuple(f"{job}/device:CPU:{n}" for job in (here, there) for n in range(2))
        assert joined.link.groups == (0, 0, 2, 2)
        assert joined.link.between(2, 3).latency_s == 30e-6
        planned = callback.report.costs.link
        assert planned.near == joined.link.near
        assert planned.machines == (0, 0, 0, 0)
        assert "within a group of near devices" in callback.report.summary()
        train(again, [pipeline(cluster, schedule="zb_search", microbatches=4, costs=callback.report.costs)])
    assert hosts_of(model) == ["localhost"]
    assert bits_of(model) == bits_of(again)
    tasks = {node.device.split("/job:")[-1] for node in callback.report.rewritten_graph.node if node.device}
    assert {"localhost/replica:0/task:0/device:CPU:1", "worker/replica:0/task:1/device:CPU:1"} <= tasks
