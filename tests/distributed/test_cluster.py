"""Workers in processes of their own: joining, refusing, losing them."""

import json
import random
import signal
import subprocess
import sys
import threading
import time

import keras
import pytest

from tests.distributed.clusters import addresses, heard, kill, start_client, start_worker, workers
from tests.scripts import bits_of
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.pipeline import facts
from tf_ooo.pipeline.cluster import _check
from tf_ooo.pipeline.facts import Line, own_facts
from tf_ooo.pipeline.worker import serve


def test_join_and_measure_and_end_cleanly():
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        client = start_client(cluster, "link")
        joined, link = heard(client), heard(client)
        assert joined["devices"] == [
            "/job:localhost/replica:0/task:0/device:CPU:0",
            "/job:worker/replica:0/task:1/device:CPU:0",
        ]
        assert joined["own_task"] == 0
        assert joined["again"]
        assert joined["before"] == 3.0
        assert link["latency_s"] < 0.2
        assert 1e6 < link["bytes_per_s"] < 1e11
        assert 0 <= link["overhead_s_per_byte"] < 1e-6
        assert client.wait(60) == 0
        started[1].terminate()
        out, _ = started[1].communicate(timeout=30)
        assert started[1].returncode == 0
        assert "ended by SIGTERM" in out


def test_workers_for_all_tasks():
    cluster = addresses(2)
    with workers(cluster, [0, 1]):
        client = start_client(cluster, "link")
        joined = heard(client)
        assert joined["own_task"] is None
        assert joined["devices"] == [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2)]
        kill(client)


def _lose(how, when):
    """The client's error, its refusal to join again, and the seconds from the signal to the error."""
    cluster = addresses(3)
    with workers(cluster, [1, 2]) as started:
        client = start_client(cluster, when)
        try:
            heard(client), heard(client)
            send = threading.Timer(0.0 if when == "between" else 1.0, started[2].send_signal, [how])
            if when == "between":
                send.run()
            else:
                send.start()
            killed = time.monotonic()
            client.stdin.write("go\n")
            client.stdin.flush()
            error, refused = heard(client), heard(client)
            return cluster.split(",")[2], error, refused, time.monotonic() - killed
        finally:
            kill(client)


@pytest.mark.parametrize(
    ("how", "when"),
    [
        (signal.SIGKILL, "step"),
        (signal.SIGKILL, "between"),
        (signal.SIGKILL, "tracing"),
        pytest.param(signal.SIGSTOP, "step", marks=pytest.mark.slow),
    ],
)
def test_lost_worker_is_named(how, when):
    address, error, refused, seconds = _lose(how, when)
    assert error["kind"] == "BackendError"
    assert f"worker {address} (task 2)" in error["error"]
    assert "last checkpoint" in error["error"]
    assert "new process" in refused["refused"]
    assert seconds < 60


@pytest.mark.slow
def test_killed_worker_then_resume_to_the_same_bits(tmp_path):
    """Three epochs in one go; and with a worker killed in a step of the second, from a checkpoint."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    cluster = addresses(2)

    def fit(checkpoint, first_epoch):
        return start_client(cluster, checkpoint, first_epoch, 0, "step", script="cluster_fit.py")

    with workers(cluster, [1]) as started:
        client = fit(whole, 0)
        assert [heard(client), heard(client)] == [{"epoch": 1, "batch": 5}, {"ended": 5}]
        expected = heard(client)
        kill(client)
        client = fit(broken, 0)
        assert heard(client) == {"epoch": 1, "batch": 5}
        time.sleep(random.Random(7).uniform(0, 1))  # somewhere in a step
        started[1].kill()
        killed = time.monotonic()
        said = heard(client)
        said = heard(client) if said == {"ended": 5} else said
        assert time.monotonic() - killed < 60
        kill(client)
    assert f"worker {cluster.split(',')[1]} (task 1)" in said["error"]
    with workers(cluster, [1]):
        client = fit(broken, 1)
        assert [heard(client), heard(client)] == [{"epoch": 1, "batch": 5}, {"ended": 5}]
        assert heard(client) == expected
        kill(client)
    assert len(set(expected["devices"])) == 2
    assert expected["steps"] == 72


@pytest.mark.slow
def test_what_calls_python_stays_in_this_process(tmp_path):
    cluster = addresses(2)
    with workers(cluster, [1]):
        client = start_client(cluster, tmp_path / "model", 0, 0, "python", script="cluster_fit.py")
        said = heard(client)
        kill(client)
    assert len(set(said["devices"])) == 2, said
    assert said["steps"] == 72


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_worker_killed_at_any_time_is_named(seed, tmp_path):
    """While the model is profiled, planned, moved, traced, trained or saved: an error, within a minute."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        client = start_client(cluster, tmp_path / "model", 0, 0, "step", script="cluster_fit.py")
        killed = []

        def end():
            started[1].kill()
            killed.append(time.monotonic())

        timer = threading.Timer(random.Random(seed).uniform(5.0, 14.0), end)
        timer.start()
        said = heard(client)
        while "error" not in said and "bits" not in said:
            said = heard(client)
        timer.cancel()
        seconds = time.monotonic() - killed[0] if killed else 0.0
        kill(client)
    assert "bits" in said and not killed or f"worker {cluster.split(',')[1]} (task 1)" in said["error"]
    # A worker that has not been joined yet may be starting still: a minute is waited for it, from then on.
    assert seconds < (150 if "is not there" in said.get("error", "") else 60)


def test_missing_worker_is_named(monkeypatch):
    from tf_ooo.pipeline import cluster

    with pytest.raises(BackendError, match=r"127.0.0.1:\d+ \(task 1\) is not there: .*refused.*--task 1"):
        cluster.connect(addresses(2), wait_s=0.1)


def test_other_versions_are_refused():
    """What a real worker says is changed in its own runtime."""
    cluster = addresses(2)
    where = cluster.split(",")
    with workers(cluster, [1]):
        target = f"grpc://{where[1]}"
        with Line(target, 1) as line:
            said = line.ask(20.0)
        assert said == facts.Facts(tuple(where), 1, said.tensorflow, said.tf_ooo, said.started)
        facts.publish(target, facts.dataclasses.replace(said, tensorflow="2.20.0"))
        client = start_client(cluster, "step")
        error = heard(client)
        kill(client)
    assert error["kind"] == "BackendError"
    assert f"worker {where[1]} (task 1) runs TensorFlow 2.20.0" in error["error"]
    with pytest.raises(BackendError, match=r"\(task 1\) runs tf_ooo 0.0.9, this process"):
        _check(where, 1, facts.dataclasses.replace(said, tf_ooo="0.0.9"))


def _lose_in_a_fit(tmp_path, how, where, pause_s, at, end=kill):
    """What the client says once its second worker is lost there, and the seconds until then."""
    cluster = addresses(2)
    with workers(cluster, [1]) as started:
        client = start_client(cluster, tmp_path / "model", 0, pause_s, where, script="cluster_fit.py")
        assert heard(client) == at
        started[1].send_signal(how)
        lost = time.monotonic()
        said = heard(client)
        seconds = time.monotonic() - lost
        end(client)
    assert f"worker {cluster.split(',')[1]} (task 1)" in said["error"]
    return said, seconds


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_lost_while_the_model_is_saved_is_named(how, tmp_path):
    said, _ = _lose_in_a_fit(tmp_path, how, "save", 1, {"epoch": 1, "batch": 24})
    # The checkpoint that was to be replaced is the one of the epoch before.
    last, before = (keras.models.load_model(tmp_path / name) for name in ("model.keras", "model_1.keras"))
    assert bits_of(last) == bits_of(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras", "model_1.keras"]
    assert all(place.startswith("/job:localhost/") for place in said["places"])


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_lost_before_the_weights_come_back_is_named(how, tmp_path):
    """Not a fit that ends as if nothing had happened, with some weights from before it."""
    said, _ = _lose_in_a_fit(tmp_path, how, "end", 1, {"epoch": 2, "batch": 24})
    assert "last checkpoint" in said["error"]


@pytest.mark.slow
def test_worker_lost_before_a_validation_with_late_gradients_is_named(tmp_path):
    said, seconds = _lose_in_a_fit(tmp_path, signal.SIGKILL, "late", 1, {"epoch": 1, "batch": 24})
    assert all(place.startswith("/job:localhost/") for place in said["places"])
    assert seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize(("how", "where"), [(signal.SIGKILL, "validated"), (signal.SIGSTOP, "logs")])
def test_worker_lost_before_an_epochs_metrics_are_read_is_named(how, where, tmp_path):
    said, seconds = _lose_in_a_fit(tmp_path, how, where, 1, {"epoch": 1, "batch": 24})
    assert all(place.startswith("/job:localhost/") for place in said["places"])
    assert seconds < 60


@pytest.mark.slow
def test_silent_worker_in_a_fit_is_named(tmp_path):
    """Stopped in mid-step, its connections open: 30 s of silence, then an error."""
    _, seconds = _lose_in_a_fit(tmp_path, signal.SIGSTOP, "step", 0, {"epoch": 1, "batch": 5})
    assert seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_script_ends_with_the_error(how, tmp_path):
    """Nobody catches it: no thread of TensorFlow's keeps the process."""
    codes = []
    _lose_in_a_fit(tmp_path, how, "raises", 0, {"epoch": 1, "batch": 5}, lambda c: codes.append(c.wait(60)))
    assert len(codes) == 1
    assert codes != [0]


def test_other_cluster_is_refused():
    mine = own_facts(("a:1", "b:2"), 1)
    with pytest.raises(BackendError, match="was started as task 1 of a:1,b:2"):
        _check(("a:1", "b:3"), 1, mine)


def test_second_worker_at_an_address_is_refused():
    cluster = addresses(1)
    with workers(cluster, [0]):
        second = start_worker(cluster, 0, wait=False)
        _, error = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "running there already" in error


def test_worker_checks_its_arguments():
    with pytest.raises(OptionsError, match="tasks 0 to 1"):
        serve("a:1,b:2", 2)
    with pytest.raises(OptionsError, match="at least 4"):
        serve("a:1,b:2", 1, inter_op_threads=1)
    with pytest.raises(OptionsError, match="given twice"):
        serve("a:1,a:1", 1)


def test_late_gradients_over_two_workers():
    """mode="layerpipe": the weights are those of training by hand with weights of 2 S(l) steps ago."""
    cluster = addresses(2)
    with workers(cluster, [0, 1]):
        command = [sys.executable, "-m", "tests.distributed.cluster_layerpipe", cluster]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["delays"] == [2, 2, 0, 0]
    assert found["steps"] == 1
    assert found["distance"] < 1e-6
    assert found["two_versions"] < 1e-6  # schedule="pipedream_2bw": nine batches, groups of two
    assert found["updates"] == 5
    for weights in ("stash", "ema", "latest"):
        assert found[weights]["distance"] < 1e-6, weights
    assert found["stash"]["divided"] == ["1"]
    assert found["devices"] == [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(2)]
