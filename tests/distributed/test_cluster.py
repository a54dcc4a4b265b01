"""Workers in processes of their own: joining and refusing them, and how all of them end."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests import forked, launches
from tests.distributed.cluster_models import (
    BATCHES,
    MICROBATCHES,
    calls_within_step,
    devices_of,
    loss_that_calls,
    perceptron,
    pipeline,
    train,
)
from tests.distributed.clusters import (
    address_of,
    addresses,
    device_of,
    run_command,
    running,
    start_worker,
    start_worker_program,
    workers,
)
from tf_ooo.costs.communication import MEASURED_BYTES, fit_link
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts import speeds as runtime_link
from tf_ooo.hosts import worker
from tf_ooo.hosts.cluster import _check, connect
from tf_ooo.hosts.worker import Line, own_facts, serve

pytestmark = [pytest.mark.alone, pytest.mark.takes(40)]


def assert_link_is_that_of_its_messages(joined):
    """Measured between these devices, however busy the machine: hops fit into the time that passed."""
    samples, hop_seconds = [], runtime_link._hop_seconds

    def noted(sender, receiver, size, repeats):
        assert (sender, receiver) == joined.devices
        hops_s = hop_seconds(sender, receiver, size, repeats)
        samples.extend((size, hop_s) for hop_s in hops_s)
        return hops_s

    started = time.perf_counter()
    with mock.patch.object(runtime_link, "_hop_seconds", noted):
        link = joined.link
    passed_s = time.perf_counter() - started
    assert Counter(size for size, _ in samples) == dict.fromkeys(MEASURED_BYTES, 5)
    assert runtime_link._HOPS * sum(hop_s for _, hop_s in samples) <= passed_s
    idle = fit_link(samples, flat_ok=True)
    assert link.bytes_per_s == idle.bytes_per_s > 0
    assert link.of_idle_ends.latency_s >= idle.latency_s * (1 - 1e-9) >= 0
    assert link.overhead_s_per_byte >= 0


# -- joining ------------------------------------------------------------------------------------------


def test_join_and_measure_and_end_the_worker_cleanly():
    cluster = addresses(2)
    with workers(cluster, [1], start_worker_program) as started:
        before = tf.Variable(3.0)  # made before the cluster is joined, and good afterwards
        joined = connect(cluster)
        assert joined.devices == ("/job:localhost/replica:0/task:0/device:CPU:0", device_of(1))
        assert joined.own_task == 0
        assert connect(cluster) is joined
        assert float(before) == 3.0
        assert_link_is_that_of_its_messages(joined)
        started[1].terminate()
        out, _ = started[1].communicate(timeout=800)
        assert started[1].returncode == 0
        assert "ended by SIGTERM" in out


def test_workers_for_all_tasks():
    cluster = addresses(2)
    with workers(cluster, [0, 1]):
        joined = connect(cluster)
        assert joined.own_task is None
        assert joined.devices == (device_of(0), device_of(1))


def test_what_calls_python_stays_in_this_process():
    cluster, calls = addresses(2), []
    with workers(cluster, [1]):
        loss = loss_that_calls(lambda: calls.append(os.getpid()))
        stock, ours = (perceptron(loss, keras.optimizers.Adam(1e-2)) for _ in range(2))
        train(stock, [])
        assert len(calls) == 2 * BATCHES
        callback = pipeline(cluster, compare=False)  # undone steps would call it too
        train(ours, [callback])
    assert set(calls) == {os.getpid()}
    # Batches 1, 2, 4, 8, ... are compared before their steps.  Each of them has one pair of whole neighbours:
    # that is run in one, and each micro-batch by itself; in one in reverse only where a row differs.
    compared = [batch for batch in (1, 2, 4, 8, 16) if batch <= 2 * BATCHES]
    assert len(calls) == 2 * BATCHES * (1 + MICROBATCHES) + 3 * len(compared)
    assert len(set(devices_of(callback))) == 2
    assert callback.report.added_edges > 0
    assert int(ours.optimizer.iterations) == 2 * BATCHES
    for a, b in zip(ours.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


# -- refusing -----------------------------------------------------------------------------------------


def test_missing_worker_is_named():
    with pytest.raises(BackendError, match=r"127.0.0.1:\d+ \(task 1\) is not there: .*refused.*--task 1"):
        connect(addresses(2), wait_s=0.1)


def test_other_versions_are_refused():
    """A real worker's answer is changed in its own runtime."""
    cluster = addresses(2)
    where = cluster.split(",")
    with workers(cluster, [1]):
        target = f"grpc://{where[1]}"
        with Line(target, 1) as line:
            said = line.ask(120.0)
        assert (said.addresses, said.task, said.tf_ooo) == (tuple(where), 1, tf_ooo.__version__)
        assert said.taken_bytes > 100e6
        worker.publish(target, dataclasses.replace(said, tensorflow="2.20.0"))
        with pytest.raises(BackendError, match=rf"worker {where[1]} \(task 1\) runs TensorFlow 2.20.0"):
            connect(cluster)


def of_another_release():
    """The command, as a release would have it that says nothing of memory."""
    from tf_ooo.cli import main

    @dataclasses.dataclass(frozen=True)
    class Before:
        addresses: tuple[str, ...]
        task: int
        tensorflow: str
        tf_ooo: str
        started: str
        to_text = worker.Facts.to_text

    own = worker.own_facts
    worker.own_facts = lambda *given: Before(*dataclasses.astuple(own(*given))[:3], "0.0.9", "1@2.0")
    main()


def test_another_release_is_refused():
    cluster = addresses(2)
    started = forked.start(run_command, of_another_release, "worker", "--cluster", cluster, "--task", 1)
    with running([started]), pytest.raises(BackendError) as refused:
        connect(cluster)
    assert str(refused.value) == (
        f"worker {address_of(cluster, 1)} (task 1) runs tf_ooo 0.0.9, this process {tf_ooo.__version__}; "
        "install the same version on both"
    )


def test_other_cluster_is_refused():
    mine = own_facts(("a:1", "b:2"), 1)
    with pytest.raises(BackendError, match="was started as task 1 of a:1,b:2"):
        _check(("a:1", "b:3"), 1, mine)


def test_second_worker_at_an_address_is_refused():
    cluster = addresses(1)
    with workers(cluster, [0]):
        second = start_worker(cluster, 0)
        said, _ = second.communicate(timeout=800)
        assert second.returncode == 2
        assert "another process has that port" in said


def test_worker_checks_its_arguments():
    with pytest.raises(OptionsError, match="tasks 0 to 1"):
        serve("a:1,b:2", 2)
    with pytest.raises(OptionsError, match="at least 4"):
        serve("a:1,b:2", 1, inter_op_threads=1)
    with pytest.raises(OptionsError, match="given twice"):
        serve("a:1,a:1", 1)


# -- how the process that trains ends -----------------------------------------------------------------


def run_python(code, *arguments, **variables):
    """Code in a new Python, run to its end."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=launches.script_environment() | variables,
    )


def train_and_lose(cluster, worker, how):
    """A script that handles no error.  Its worker is killed or stopped in a step, or lives (``how`` 0)."""

    def lose_it():
        if how:
            os.kill(worker, how)

    loss, steps = calls_within_step(BATCHES + 2, 1, lose_it)
    train(perceptron(loss), [pipeline(cluster), steps])
    print("trained")


def test_a_script_ends():
    """No thread of TensorFlow's, or of the watch, keeps or breaks the process."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        script = forked.start(forked.as_script, train_and_lose, cluster, started[1].pid, 0)
        said, _ = script.communicate(timeout=800)
    assert script.returncode == 0, said
    assert said.splitlines()[-1] == "trained"


def test_a_script_ends_with_the_error_of_a_killed_worker():
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        script = forked.start(forked.as_script, train_and_lose, cluster, started[1].pid, int(signal.SIGKILL))
        said, _ = script.communicate(timeout=800)
    assert script.returncode == 1, said
    assert f"BackendError: lost worker {address_of(cluster, 1)} (task 1): " in said.splitlines()[-1]


def test_a_script_ends_with_the_error_of_a_silent_worker():
    """Programs as users start them, and the 30 s of silence that a worker really has."""
    cluster = addresses(2)
    with workers(cluster, [1], start_worker_program) as started:
        code = "import sys; from tests.distributed.test_cluster import train_and_lose as train; "
        code += "train(sys.argv[1], *map(int, sys.argv[2:]))"
        arguments = [cluster, str(started[1].pid), str(int(signal.SIGSTOP))]
        script = run_python(code, *arguments)
    assert script.returncode == 1, script.stderr
    end = script.stderr.splitlines()[-1]
    assert f"BackendError: lost worker {address_of(cluster, 1)} (task 1): " in end
    assert "it has not answered for 30 s" in end


def train_and_forget(cluster, worker):
    """Functions go that were there before the cluster was joined, and others when its worker has ended."""
    train(earlier := perceptron(), [])
    del earlier
    model = perceptron()
    train(model, [pipeline(cluster)])
    gc.collect()
    tf.ones(()).numpy()
    os.kill(worker, signal.SIGTERM)
    print("trained", end="")


def test_a_script_that_succeeds_prints_no_errors():
    """TensorFlow's own program, as users start it: its messages are printed only there."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        code = "import sys; from tests.distributed.test_cluster import train_and_forget; "
        code += "train_and_forget(sys.argv[1], int(sys.argv[2]))"
        script = run_python(code, cluster, str(started[1].pid), TF_CPP_MIN_LOG_LEVEL="2")
    assert (script.returncode, script.stdout) == (0, "trained"), script.stderr
    assert not [line for line in script.stderr.splitlines() if line.startswith("E0000")], script.stderr
