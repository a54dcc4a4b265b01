"""A link measured through TensorFlow's runtime: two server processes, tensors over the loopback interface."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from tests import forked
from tests.distributed.clusters import addresses, run_command
from tf_ooo.costs.layer_costs import Link
from tf_ooo.errors import CostError
from tf_ooo.hosts import link as runtime_link
from tf_ooo.hosts.link import measure_runtime_link

DEVICES = "/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0"
SLOW = Link(1.0, 1.0)


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


@pytest.fixture
def messages(monkeypatch):
    """Of each run of a session: how many tensors it received from another device."""
    received = []

    class Noting(tf.compat.v1.Session):
        def run(self, op):
            options, ran = config_pb2.RunOptions(output_partition_graphs=True), config_pb2.RunMetadata()
            result = super().run(op, options=options, run_metadata=ran)
            ops = [node.op for graph in ran.partition_graphs for node in graph.node]
            received.append(ops.count("_Recv"))
            return result

    monkeypatch.setattr(tf.compat.v1, "Session", Noting)
    return received


def test_link_between_two_servers(target, messages):
    """However busy the machine: hops go over the wire, and fit into the time that has passed."""
    samples, sizes, started = [], (1024, 4 * 1024**2), time.perf_counter()
    with mock.patch.object(runtime_link, "fit_link", lambda hops, flat_ok: samples.extend(hops) or SLOW):
        link = measure_runtime_link(target, *DEVICES, sizes=sizes, repeats=3)
    passed_s = time.perf_counter() - started
    assert link is SLOW
    # Of each size a run without hops and one with eight to warm up, and three of each.
    assert messages == [0, 8, 0, 0, 0, 8, 8, 8] * 2
    assert [size for size, _ in samples] == [float(size) for size in sizes for _ in range(3)]
    assert all(hop_s >= 0 for _, hop_s in samples)
    assert 8 * sum(hop_s for _, hop_s in samples) <= passed_s
    assert measure_runtime_link(target, *DEVICES, sizes=sizes, repeats=3).bytes_per_s > 0


def test_device_that_does_not_exist_is_said(target):
    with pytest.raises(CostError, match="cannot be measured"):
        measure_runtime_link(
            target, "/job:worker/task:0/cpu:0", "/job:worker/task:7/cpu:0", sizes=(1024, 4096)
        )
