"""TensorFlow's profiler: what an upgrade breaks."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import tensorflow as tf

from tf_ooo.compat import tf_profiler
from tf_ooo.compat.tf_profiler import TracedEvent
from tf_ooo.errors import BackendError


def test_events_of_a_step():
    """The step's mark and its ops, in seconds since the same moment."""
    step, events = tf.function(tf.sinh), []
    step(tf.ones((64, 64)))
    with tf_profiler.traced_events(events), tf_profiler.mark_step(7):
        step(tf.ones((64, 64))).numpy()
    (mark,) = [e for e in events if e.label.partition("#")[0] == tf_profiler.STEP_MARK]
    ops = [event for event in events if event.label == "Sinh:Sinh"]
    assert ops, "labels are no longer <node>:<op>: nothing is measured"
    assert all(isinstance(event, TracedEvent) for event in events)
    ends = mark.begin_s + mark.duration_s
    assert any(mark.begin_s <= e.begin_s <= ends for e in ops), "clocks of threads differ"


def test_work_within_ops_is_seen():
    """A large product is divided among the threads of a pool."""
    step, events = tf.function(tf.linalg.matmul), []
    matrix = tf.ones((700, 700))
    step(matrix, matrix)
    with tf_profiler.traced_events(events), tf_profiler.mark_step(0):
        step(matrix, matrix).numpy()
    work = tf_profiler.pool_work(events)
    assert work, "the pool's regions have other names: devices that share cores are taken to need one each"
    assert all(part.duration_s >= 0 for part in work)
    op = next(event for event in events if "MatMul:" in event.label)
    assert any(op.begin_s <= part.begin_s <= op.begin_s + op.duration_s for part in work)


def test_a_second_profiler_is_refused():
    with tf_profiler.traced_events([]):
        refused = pytest.raises(BackendError, match="already running")
        with refused, tf_profiler.traced_events([]):
            pass


def test_a_worker_that_does_not_answer_is_named():
    with pytest.raises(BackendError, match="grpc://127.0.0.1:1: cannot be profiled"):
        tf_profiler.trace_workers(["127.0.0.1:1"], 0.1)


@pytest.mark.alone
def test_events_of_a_worker():
    """By its address, since the epoch: tests/distributed compares ranks by them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    tf.profiler.experimental.server.start(int(address.rpartition(":")[2]))
    ended, step = threading.Event(), tf.function(tf.sinh)

    def work():
        while not ended.is_set():
            step(tf.ones((64, 64)))

    worker = threading.Thread(target=work)
    before_s = time.time()
    worker.start()
    try:
        events = tf_profiler.trace_workers([address], 0.5)
    finally:
        ended.set()
        worker.join()
    begins = [event.begin_s for event in events[address] if event.label == "Sinh:Sinh"]
    assert begins, "the profiler's files of workers have other names, or events other labels"
    assert before_s - 1.0 < min(begins) < max(begins) < time.time() + 1.0, "profile_start_time is gone"
