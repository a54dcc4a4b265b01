"""A link measured through TensorFlow's runtime: two server processes, tensors over the loopback interface."""

import socket
import subprocess
import sys

import pytest

from tf_ooo.costs.runtime_link import measure_runtime_link
from tf_ooo.errors import CostError

SERVER = """
import sys
import tensorflow as tf
cluster = tf.train.ClusterSpec({"worker": sys.argv[2:]})
print("listening", flush=True)
tf.distribute.Server(cluster, job_name="worker", task_index=int(sys.argv[1])).join()
"""


@pytest.fixture(scope="module")
def target():
    with socket.socket() as one, socket.socket() as two:
        one.bind(("localhost", 0))
        two.bind(("localhost", 0))
        addresses = [f"localhost:{s.getsockname()[1]}" for s in (one, two)]
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", SERVER, str(index), *addresses],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for index in range(2)
    ]
    try:
        for server in servers:
            assert server.stdout.readline() == b"listening\n"
        yield f"grpc://{addresses[0]}"
    finally:
        for server in servers:
            server.kill()
            server.wait()
            server.stdout.close()


def test_link_between_two_servers(target):
    link = measure_runtime_link(target, "/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0", repeats=3)
    # Loopback through gRPC: somewhere between 50 MB/s on a busy core and 50 GB/s.
    assert 5e7 < link.bytes_per_s < 5e10
    assert link.latency_s < 0.1


def test_device_that_does_not_exist_is_said(target):
    with pytest.raises(CostError, match="cannot be measured"):
        measure_runtime_link(
            target, "/job:worker/task:0/cpu:0", "/job:worker/task:7/cpu:0", sizes=(1024, 4096)
        )
