"""``tf-ooo run``: workers, ranks and scripts that are lost are started again, and go on to the same bits."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys

import pytest

from tests import forked, launches
from tests.distributed import forked_scripts
from tests.distributed.clusters import addresses, workers
from tf_ooo.errors import OptionsError
from tf_ooo.hosts.devices import CLUSTER_VARIABLE
from tf_ooo.hosts.supervising import Job, supervise

pytestmark = pytest.mark.takes(70)

TRAIN = """
import os, sys
import keras
import numpy as np
import tf_ooo

mode, folder = sys.argv[1:3]
keras.utils.set_random_seed(7)
hidden = [keras.layers.Dense(width, activation="tanh") for width in (33, 21, 17)]
model = keras.Sequential([keras.Input((7,)), *hidden, keras.layers.Dense(3)])
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
rank = int(os.environ.get("HOROVOD_RANK", 0))
rng = np.random.default_rng(rank)
x, y = rng.normal(size=(64, 7)).astype("float32"), rng.normal(size=(64, 3)).astype("float32")

def tell(epoch, logs):
    waits = epoch == 1 and not os.path.exists(os.path.join(folder, "told"))
    print(f"rank {rank} process {os.getpid()} ended epoch {epoch}", flush=True)
    if waits:
        sys.stdin.read(1)  # the test kills somebody now

backup = [keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"), delete_checkpoint=False)]
options = {"microbatches": 4, "schedule": "1f1b"} if mode == "pipeline" else {}
ours = tf_ooo.OOOBackprop(mode=mode, **options)
telling = keras.callbacks.LambdaCallback(on_epoch_end=tell)
callbacks = [*(backup if rank == 0 else []), ours, telling]
model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
if rank == 0:
    with open(os.path.join(folder, "weights"), "wb") as file:
        file.write(b"".join(weight.tobytes() for weight in model.get_weights()))
"""


@pytest.fixture
def forks(monkeypatch):
    """Scripts that are started with ``AS_FORK`` import nothing."""
    with forked_scripts.serving() as name:
        monkeypatch.setenv(forked_scripts.VARIABLE, name)
        yield


def running(tmp_path, *arguments, mode):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (tmp_path / "run").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tf_ooo", "run", *map(str, arguments)]
    command += [forked_scripts.AS_FORK, str(script), mode, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env=launches.script_environment(), **pipes)


def read_until(process, pattern, said):
    """The match in the line that has it; all lines come to ``said``."""
    for line in process.stdout:
        said.append(line)
        match = re.search(pattern, line)
        if match:
            return match
    raise AssertionError("".join(said))


def weights_of(tmp_path):
    return (tmp_path / "run" / "weights").read_bytes()


def undisturbed(tmp_path, mode, environments):
    """The weights of a training that loses nothing: a forked process for each rank, and no supervisor."""
    folder = tmp_path / "never"
    folder.mkdir()
    (folder / "told").touch()
    arguments = (tmp_path / "train.py", folder, mode, str(folder))
    scripts = [forked.start(forked.run_script, *arguments, environment=own) for own in environments]
    for script in scripts:
        said, _ = script.communicate(timeout=800)
        assert script.returncode == 0, said
    return (folder / "weights").read_bytes()


def test_a_lost_worker_is_started_again(tmp_path, forks):
    process, said = running(tmp_path, "--workers", 2, mode="pipeline"), []
    worker = int(read_until(process, r"is ready.*process (\d+)", said)[1])
    read_until(process, "ended epoch 1", said)
    (tmp_path / "run" / "told").touch()
    os.kill(worker, signal.SIGKILL)
    process.stdin.write("\n" * 9)
    process.stdin.flush()
    rest = process.communicate(timeout=800)[0]
    assert process.returncode == 0, rest
    assert re.search(
        r"tf-ooo run: the script ended with 1; worker .* ended with -9: starting again \(3 restarts left\)",
        rest,
    )
    assert "ended epoch 3" in rest
    assert rest.count("starting again") == 1
    cluster = addresses(2)
    with workers(cluster, [1]):
        assert weights_of(tmp_path) == undisturbed(tmp_path, "pipeline", [{CLUSTER_VARIABLE: cluster}])


@pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed; run: make horovod"
)
def test_a_lost_rank_is_started_again(tmp_path, forks):
    (tmp_path / "run").mkdir()
    process, said = running(tmp_path, "--ranks", 2, mode="data_parallel"), []
    rank_1 = int(read_until(process, r"rank 1 process (\d+) ended epoch 0", said)[1])
    os.kill(rank_1, signal.SIGKILL)
    (tmp_path / "run" / "told").touch()
    rest = process.communicate(timeout=800)[0]
    assert process.returncode == 0, rest
    assert rest.count("starting again") == 1
    with launches.environments("horovod", 2) as ranks:
        assert weights_of(tmp_path) == undisturbed(tmp_path, "data_parallel", ranks)


def test_a_script_that_always_fails_is_given_up(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys; print('begun'); sys.exit(3)")
    command = [
        sys.executable,
        "-m",
        "tf_ooo",
        "run",
        "--max-restarts",
        "2",
        str(script),
        "--its-own",
        "option",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout.count("begun") == 3
    assert done.stdout.count("starting again") == 2


def test_what_is_told_to_end_is_not_started_again(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import os, time; print('process', os.getpid(), flush=True); time.sleep(600)")
    command = [sys.executable, "-m", "tf_ooo", "run", str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    inner = int(read_until(process, r"process (\d+)", [])[1])
    process.terminate()
    rest = process.communicate(timeout=800)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in rest
    with pytest.raises(ProcessLookupError):
        os.kill(inner, 0)


def test_a_signal_while_the_script_is_being_started_leaves_nobody(tmp_path, monkeypatch):
    script = tmp_path / "waits.py"
    script.write_text("import time; time.sleep(600)")
    started, popen = [], subprocess.Popen

    def told_meanwhile(*arguments, **options):
        started.append(popen(*arguments, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", told_meanwhile)
    assert supervise(Job([str(script)]), 2, print) == 128 + signal.SIGTERM
    assert [process.returncode for process in started] == [-signal.SIGTERM]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (["no_such_script.py"], "SCRIPT 'no_such_script.py' is not there"),
        (["--rank", "2", "train.py"], "--rank is no option of tf-ooo run"),
        (["tests"], "SCRIPT 'tests' is not there"),
    ],
)
def test_a_script_that_is_not_there_is_not_started_again_and_again(script, said):
    with pytest.raises(OptionsError, match=said):
        supervise(Job(script), 2, print)
    assert supervise(Job(["-m", "this"]), 2, print) == 0


def test_options_that_do_not_go_together():
    command = [sys.executable, "-m", "tf_ooo", "run", "--ranks", "2", "--workers", "2", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--ranks and --workers do not go together" in done.stderr
