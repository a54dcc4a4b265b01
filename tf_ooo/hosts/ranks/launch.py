"""Finds how this process was launched, and which communication library to use."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.devices import parse

ENGINES = ("auto", "horovod", "collectives", "single")
# Launchers say in these how many processes they have started; srun with PMIx has Slurm's variable only.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched() -> bool:
    """Return whether Horovod's launcher, or its environment variables, started this process."""
    return "HOROVOD_RANK" in os.environ and "HOROVOD_SIZE" in os.environ


def remember_names() -> None:
    """Have Horovod remember more tensors, as ``hvd.init()`` reads; keep what the user has set.

    Names of tensors differ by step if several steps run together: Horovod's own 1024 are too few for a
    ResNet-50 in 8 steps, and forgotten tensors are negotiated anew in every step.
    """
    os.environ.setdefault("HOROVOD_CACHE_CAPACITY", "16384")


def mpi_size() -> int:
    """Return how many processes MPI's or Slurm's launcher (mpirun, srun) says it started; else 1."""
    told = (os.environ.get(name, "") for name in _SIZES)
    return max((int(size) for size in told if size.isdecimal()), default=1)


def _size_of_horovod() -> int | None:
    """Return how many processes ``hvd.init()`` found; None if nobody has called it."""
    basics = sys.modules.get("horovod.tensorflow")
    return int(basics.size()) if basics is not None and basics.is_initialized() else None


def launched_by_horovod() -> bool:
    """Return whether horovodrun, or its environment, started this process, or ``hvd.init()`` was called."""
    return launched() or _size_of_horovod() is not None


def launched_for_collectives() -> bool:
    """Return whether TF_CONFIG describes a cluster of more than one worker."""
    cluster = tf_config().get("cluster") or {}
    return len(cluster.get("worker", [])) + len(cluster.get("chief", [])) > 1


def tf_config() -> dict[str, Any]:
    """Return the content of TF_CONFIG. BackendError: it is no JSON, or names no cluster, or no task of it."""
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    except ValueError as error:
        raise BackendError(f"TF_CONFIG is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BackendError(f"TF_CONFIG: expected an object with cluster and task, got {config!r:.80}")
    cluster = config.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise BackendError(
            f"TF_CONFIG: cluster: expected an object of lists of addresses, got {cluster!r:.80}"
        )
    for job, addresses in cluster.items():
        _check_addresses(job, addresses)
    task = config.get("task")
    job, index = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    numbers = range(len(cluster.get(job, ()) if isinstance(job, str) else ()))
    # An evaluator is in no cluster.
    if cluster and job != "evaluator" and (isinstance(index, bool) or str(index) not in map(str, numbers)):
        raise BackendError(
            "TF_CONFIG: task: expected one of the cluster's, such as "
            f"{{'type': {next(iter(cluster))!r}, 'index': 0}}, got {task!r:.80}"
        )
    return config


def _check_addresses(job: str, addresses: object) -> None:
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        raise BackendError(
            f'TF_CONFIG: cluster: {job}: expected a list of addresses, ["host1:2222", "host2:2222"], got '
            f"{addresses!r:.80}"
        )
    try:
        parse(addresses)
    except OptionsError as error:
        raise BackendError(f"TF_CONFIG: {job} of the {error}") from error


def place_in_tf_config() -> tuple[int, list[str]]:
    """Return this process' rank and all ranks' addresses, chiefs before workers.  BackendError: no rank."""
    config = tf_config()
    cluster, task = config.get("cluster") or {}, config.get("task") or {}
    if not cluster:
        raise BackendError(
            "engine='collectives' needs TF_CONFIG, which names the workers and which of them this is "
            "(docs/data_parallel.md), and here it names none: set it, or leave engine out"
        )
    places = [(kind, index) for kind in ("chief", "worker") for index in range(len(cluster.get(kind, [])))]
    mine = (task.get("type"), int(task.get("index", -1)))
    if mine not in places:
        raise BackendError(f"TF_CONFIG: task {task} is no chief or worker of its cluster {cluster}")
    return places.index(mine), [cluster[kind][index] for kind, index in places]


def launched_with_workers() -> bool:
    """Return whether ``mode="auto"`` means data parallel here: a launcher started more than one process."""
    return os.environ["HOROVOD_SIZE"] != "1" if launched() else (_size_of_horovod() or 1) > 1


def resolved_name(name: str) -> str:
    """Return the engine that ``"auto"`` means in this process."""
    if name != "auto":
        return name
    if launched_by_horovod():
        # ``hvd.init()`` may have been called in a process that no launcher of Horovod's started.
        alone = "HOROVOD_SIZE" not in os.environ and _size_of_horovod() == 1
        if not (alone and launched_for_collectives()):
            return "horovod"
    if launched_for_collectives():
        return "collectives"
    return "horovod" if mpi_size() > 1 else "single"
