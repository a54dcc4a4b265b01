"""Two engines, workers started in three ways; what is checked is in checks_*.py."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")

sys.path.insert(0, str(Path(__file__).parent))
import launch  # noqa: E402

# The first test of each launch waits for all its checks; the launches have limits of their own.
pytestmark = pytest.mark.timeout(1800)

# Their checks are written for Keras 3, read without importing it.
_KERAS_2 = importlib.metadata.version("keras").startswith("2.")
needs_keras_3 = pytest.mark.skipif(_KERAS_2, reason="checks written for Keras 3")

WORKER, KILLED = launch.HERE / "worker.py", launch.HERE / "killed_worker.py"


def names_in(*modules: str) -> list[str]:
    """The checks of some modules, read without importing TensorFlow."""
    lines = [line for m in modules for line in (launch.HERE / f"{m}.py").read_text().splitlines()]
    return [line.split("(")[0].removeprefix("def ") for line in lines if line.startswith("def check_")]


def results_of(folder: Path, output: list[str]) -> dict[str, str]:
    """{check: traceback of the first rank where it failed, or nothing}."""
    files = sorted(folder.glob("rank*.json"))
    assert len(files) == len(output), "\n".join(output)
    everyone = [json.loads(file.read_text()) for file in files]
    return {name: next((r[name] for r in everyone if r[name]), "") for name in everyone[0]}


BY_HOROVOD = ("checks_stock", "checks_fit", "checks_data", "checks_horovod")
TOGETHER = ("checks_unrolled", "checks_schedules")
# Those that compare with stock Horovod need Horovod.
WITH_COLLECTIVES = names_in("checks_fit", "checks_data") + [
    "check_joint_batch",
    "check_joint_batch_of_an_embedding",
    "check_joint_batch_of_uneven_parts",
    "check_embedding_in_steps_together",
    "check_eager",
    "check_unrolled_logs_are_those_of_keras",
    "check_unrolled_in_parts",
    "check_every_schedule_gives_the_bits_of_the_stock_order",
]
# Keras 2's own optimizers average with Horovod's wrapper, and accumulate no gradients; loss scaling is
# another class there.
KERAS_2_ONLY = "check_horovods_optimizer_averages"
KERAS_3_ONLY = {
    "check_gradient_accumulation",
    "check_loss_scaling",
    "check_overflow_on_one_rank",
    "check_horovods_optimizer_is_detected",
    "check_a_step_without_averaging_is_refused",  # by a step of Keras 3
}
STARTED_BY_HAND = [
    name for name in names_in(*BY_HOROVOD) if name not in (KERAS_3_ONLY if _KERAS_2 else {KERAS_2_ONLY})
]
WITH_FOUR = [
    "check_joint_batch",
    "check_two_optimizers_unbuilt",
    "check_first_weights_and_optimizer_state_come_from_rank_0",
    "check_adasum",
    "check_compression",
    "check_all_ranks_are_equal",
]


@pytest.fixture(scope="module")
def started_by_hand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_hand")
    command = [WORKER, ",".join(BY_HOROVOD), folder, *STARTED_BY_HAND]
    return results_of(folder, launch.run_horovod(2, command, 600))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    return results_of(folder, launch.run_horovod(2, [WORKER, ",".join(TOGETHER), folder], 900))


@pytest.fixture(scope="module")
def collectives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    modules = "checks_stock,checks_fit,checks_data,checks_unrolled,checks_schedules"
    return results_of(folder, launch.run_collectives(2, [WORKER, modules, folder, *WITH_COLLECTIVES], 900))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    modules = "checks_stock,checks_fit,checks_schedules"
    status, output = launch.horovodrun(4, [WORKER, modules, folder, *WITH_FOUR])
    assert status == 0, output
    return results_of(folder, [output] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("check", STARTED_BY_HAND)
def test_two_workers_started_by_hand(started_by_hand, check):
    assert not started_by_hand[check], started_by_hand[check]


@pytest.mark.slow
@needs_keras_3
@pytest.mark.parametrize("check", names_in(*TOGETHER))
def test_two_workers_with_steps_together(together, check):
    assert not together[check], together[check]


@pytest.mark.slow
@needs_keras_3
@pytest.mark.parametrize("check", WITH_COLLECTIVES)
def test_two_workers_with_collectives(collectives, check):
    assert not collectives[check], collectives[check]


@pytest.mark.slow
@needs_keras_3
@pytest.mark.parametrize("check", WITH_FOUR)
def test_four_workers_of_horovodrun(four, check):
    assert not four[check], four[check]


def _kill_when_ready(processes: list[subprocess.Popen[str]], folder: Path) -> tuple[float, str]:
    """Kills rank 1 by its pid once it is in the third epoch; seconds until rank 0 ends, and what it says."""
    for _ in range(1200):
        if (folder / "pid").exists() or any(process.poll() is not None for process in processes):
            break
        time.sleep(0.1)
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    killed = time.monotonic()
    said = launch.finish(processes, 120)[0]
    return time.monotonic() - killed, said


@pytest.mark.slow
def test_killed_worker_ends_the_others_and_training_continues_from_the_backup(tmp_path):
    with launch.rendezvous(2) as port:
        environments = [launch.horovod_environment(rank, 2, port) for rank in range(2)]
        elapsed_s, said = _kill_when_ready(launch.start(environments, [KILLED, tmp_path, "wait"]), tmp_path)
    assert elapsed_s < 60
    assert "BackendError: rank 0 of 2 stopped in execution 24: another worker ended" in said, said
    again = launch.run_horovod(2, [KILLED, tmp_path, "go"])
    assert all("trained epochs [2, 3, 4]" in output for output in again), again
    never_killed = tmp_path / "never"
    never_killed.mkdir()
    launch.run_horovod(2, [KILLED, never_killed, "go"])
    assert (tmp_path / "weights").read_bytes() == (never_killed / "weights").read_bytes()


@pytest.mark.slow
def test_killed_worker_ends_the_others_with_collectives(tmp_path):
    processes = launch.start(launch.collective_environments(2), [KILLED, tmp_path, "wait"])
    elapsed_s, said = _kill_when_ready(processes, tmp_path)
    assert elapsed_s < 60
    assert "BackendError: rank 0 of 2 stopped in execution 24: another worker ended" in said, said


@pytest.mark.slow
def test_a_rank_whose_data_end_early_says_so_and_ends_the_others(tmp_path):
    """The others wait for its gradients."""
    with launch.rendezvous(2) as port:
        environments = [launch.horovod_environment(rank, 2, port) for rank in range(2)]
        said = launch.finish(launch.start(environments, [KILLED, tmp_path, "short"]), 120)
    assert "BackendError: rank 0 of 2 stopped in execution 6: another worker ended" in said[0], said[0]
    assert "rank 1's data ended 5 batches before the end of the epoch" in said[1], said[1]


@pytest.mark.slow
def test_a_rank_that_stops_alone_says_so_and_ends_the_others(tmp_path):
    with launch.rendezvous(2) as port:
        environments = [launch.horovod_environment(rank, 2, port) for rank in range(2)]
        said = launch.finish(launch.start(environments, [KILLED, tmp_path, "stop"]), 120)
    assert "BackendError: rank 0 of 2 stopped in execution 5: another worker ended" in said[0], said[0]
    told = "rank 1 stopped training 6 steps before the end of the epoch, and the others do not answer"
    assert f"BackendError: {told}" in said[1], said[1]


@pytest.mark.slow
def test_example():
    status, output = launch.horovodrun(2, [launch.HERE.parents[1] / "examples" / "03_horovod.py"])
    assert status == 0, output
    found = re.findall(r"worker (\d) of 2 \(horovod\): val_accuracy of all ([\d.]+)", output)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    assert len({accuracy for _, accuracy in found}) == 1
    assert float(found[0][1]) > 0.8


def test_horovod_is_not_needed_to_import():
    code = (
        "import sys, tf_ooo.data_parallel as d; assert 'horovod' not in sys.modules; print(d.connect().size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=launch.environment(), timeout=120
    )
    assert done.stdout.strip() == "1", done.stderr
    assert importlib.util.find_spec("horovod") is not None
