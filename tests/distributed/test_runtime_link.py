"""A link measured through TensorFlow's runtime: two server processes, tensors over the loopback interface."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests import forked
from tests.distributed.clusters import addresses, run_command
from tf_ooo.errors import CostError
from tf_ooo.hosts.link import measure_runtime_link


def serve(cluster, task):
    """TensorFlow's own server, without what a worker of ours adds."""
    spec = tf.train.ClusterSpec({"worker": cluster.split(",")})
    server = tf.distribute.Server(spec, job_name="worker", task_index=task)
    print("listening", flush=True)
    server.join()


@pytest.fixture(scope="module")
def target():
    cluster = addresses(2)
    servers = [forked.start(run_command, lambda task=task: serve(cluster, task)) for task in range(2)]
    try:
        for server in servers:
            assert server.stdout.readline() == "listening\n"
        yield f"grpc://{cluster.split(',')[0]}"
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def test_link_between_two_servers(target):
    link = measure_runtime_link(target, "/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0", repeats=3)
    # How fast a busy machine is nobody knows; a wrong unit is off by a thousand or more.
    assert 1e4 < link.bytes_per_s < 1e12
    assert 0 <= link.latency_s < link.seconds(1 << 30)


def test_device_that_does_not_exist_is_said(target):
    with pytest.raises(CostError, match="cannot be measured"):
        measure_runtime_link(
            target, "/job:worker/task:0/cpu:0", "/job:worker/task:7/cpu:0", sizes=(1024, 4096)
        )
