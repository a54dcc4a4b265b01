"""Joins workers on several hosts over TensorFlow's runtime, to train on their devices from this process.

>>> # on host2: tf-ooo worker --cluster host1:2222,host2:2222 --task 1 --insecure-network
>>> # on host1:
>>> callback = tf_ooo.OOOBackprop(mode="pipeline", devices="host1:2222,host2:2222")
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import tensorflow as tf

from grappler_passes.compat import runtime
from tf_ooo.compat import versions
from tf_ooo.costs.layer_costs import Link
from tf_ooo.errors import BackendError, CostError, OOOError
from tf_ooo.hosts.devices import (
    START_S,
    START_VARIABLE,
    answers,
    can_listen,
    cluster_of_environment,
    full_names,
    held_ports,
    home_device,
    host_port,
    is_cluster,
    is_loopback,
    only_at,
    outward_host,
    parse,
)
from tf_ooo.hosts.memory import limits_of_gpus
from tf_ooo.hosts.runtime_costs import measured_link
from tf_ooo.hosts.speeds import link_between, relative_speeds
from tf_ooo.hosts.system_memory import ReportedLimit
from tf_ooo.hosts.watch import SILENCE_S, Silence, Watch
from tf_ooo.hosts.worker import (
    LEAST_THREADS,
    Facts,
    Line,
    in_a_line,
    limits_of_workers,
    own_facts,
    say_used,
    user_of,
)

logger = logging.getLogger("tf_ooo")

# The job of this process: TensorFlow's own name for it, so that tensors made before stay valid.
_OWN_JOB = "localhost"
# Without a worker for so long, it is said who is waited for.
_PATIENCE_S = 3.0
_clusters: dict[tuple[str, ...], Cluster] = {}


class Cluster:
    """Holds the workers of a cluster, by task, and this process, which trains; made by :func:`connect`.

    ``devices`` has full names in the order of the tasks: GPUs of a task that has some, else its CPUs.
    ``own_task`` is this process, 0 or None (then workers serve all tasks); ``silence`` watches the workers.
    """

    def __init__(
        self, addresses: Sequence[str], workers: Mapping[int, Facts], own_task: int | None, silence: Silence
    ) -> None:
        self.addresses, self.workers, self.own_task = tuple(addresses), dict(workers), own_task
        self.devices = _devices(len(addresses), own_task)
        self._watch = Watch(self.workers, silence)
        self._watch.start()
        self._speeds: tuple[float, ...] | None = None

    @cached_property
    def link(self) -> Link | None:
        """Return the links between hosts, processes and devices, measured on demand; None: one device."""
        return measured_link(self.devices, self.hosts()) if len(self.devices) > 1 else None

    def link_between(self) -> Link:
        """Return :attr:`link`, or with one task the link between its devices."""
        return link_between(self.devices) if self.link is None else self.link

    def hosts(self) -> list[str]:
        """Return each device's host, by its task's address: CPUs of one host share its cores."""
        own = f"/job:{_OWN_JOB}/"
        tasks = [0 if n.startswith(own) else tf.DeviceSpec.from_string(n).task for n in self.devices]
        return [host_port(self.addresses[task])[0] for task in tasks]

    def memory_limits(self) -> dict[str, ReportedLimit]:
        """Return the limits of GPUs, and of workers in control groups that have one.

        This process' own CPU has none: it holds the whole model, whose memory is checked separately.
        """

        cpus = [name for name in self.devices if name.startswith("/job:worker/") and ":CPU:" in name]
        task_of = {name: tf.DeviceSpec.from_string(name).task for name in cpus}
        computing = dict.fromkeys(self.workers, 0) | Counter(task_of.values())
        of_tasks = limits_of_workers(computing, self.workers, own_facts(self.addresses, self.own_task or 0))
        of_cpus = {name: of_tasks[task] for name, task in task_of.items() if task in of_tasks}
        return limits_of_gpus(self.devices) | of_cpus

    def speeds(self) -> tuple[float, ...]:
        """Return each device's speed, see :attr:`tf_ooo.Link.speeds`; measured once."""
        if self._speeds is None:
            self._speeds = relative_speeds(self.devices, self.hosts(), home_device())
        return self._speeds

    def lost(self) -> dict[int, str]:
        """Ask all workers; return why each lost one is lost, by task."""
        return self._watch.look()

    def reachable(self, device: str) -> bool:
        """Return whether tensors can be read from there; once a worker is lost, only from this process."""
        return not self._watch.lost or device.startswith(f"/job:{_OWN_JOB}/")

    def refuse_if_lost(self) -> None:
        """Raise BackendError if a worker was lost: TensorFlow waits for what was left behind there."""
        if lost := self.lost():
            raise self._error(lost, "this process cannot join it again: start the worker")

    def _error(self, lost: Mapping[int, str], what_now: str) -> BackendError:
        who = "; ".join(f"worker {self.addresses[task]} (task {task}): {why}" for task, why in lost.items())
        commands = "; ".join(_command(self.addresses, task) for task in lost)
        return BackendError(
            f"lost {who}; {what_now} ({commands}) and train on from the last checkpoint in a new process"
        )

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise: a BackendError that names the lost workers, or ``error`` itself."""
        # A link that cannot be measured may be one to a worker that is lost.
        if isinstance(error, OOOError) and not isinstance(error, CostError):
            return error
        lost = self.lost()
        if not lost:
            return error
        explained = self._error(lost, "what it held, weights and optimizer state, is gone: start it again")
        explained.__cause__ = error
        return explained


def connect(
    cluster: str | Sequence[str], wait_s: float | None = None, silence_s: float = SILENCE_S
) -> Cluster:
    """Join the cluster; return the same :class:`Cluster` again while all of its workers live.

    Task 0 is this process, unless a worker serves that task already.

    Args:
        cluster: ``"host1:port,host2:port"``, the same text as the workers'.
        wait_s: how long to wait for workers that are still starting; None: TF_OOO_START_TIMEOUT_S, or 45 s.
        silence_s: a worker that does not answer for so long is lost.

    Raises:
        OptionsError: the text is no list of addresses.
        BackendError: names the worker that is missing, or has another TensorFlow, tf_ooo or cluster.
    """
    addresses = parse(cluster)
    if (known := _clusters.get(addresses)) is not None:
        known.refuse_if_lost()
        return known
    versions.check_versions()
    wait_s = float(os.environ.get(START_VARIABLE) or START_S) if wait_s is None else wait_s
    silence = Silence(silence_s)
    try:
        workers, own_task = _meet_all(addresses, time.monotonic() + wait_s, silence)
    except BaseException:
        silence.stop()
        raise
    _join(addresses, workers, own_task, silence)
    _clusters[addresses] = Cluster(addresses, workers, own_task, silence)
    return _clusters[addresses]


def _meet_all(
    addresses: Sequence[str], deadline: float, silence: Silence
) -> tuple[dict[int, Facts], int | None]:
    """Return the workers by task, and this process' own task."""
    workers = _meet(addresses, range(1, len(addresses)), deadline, silence)
    # Last: a worker for task 0 may still be starting.  Where nobody serves its address, this process does.
    if answers(addresses[0]) and not can_listen(addresses[0]):
        return workers, 0
    return _meet(addresses, [0], deadline, silence) | workers, None


def _meet(
    addresses: Sequence[str], tasks: Iterable[int], deadline: float, silence: Silence
) -> dict[int, Facts]:
    """Ask the workers of these tasks for their facts. BackendError: one does not fit this process."""
    workers: dict[int, Facts] = {}
    for task in tasks:
        workers[task] = _greet(addresses, task, deadline, silence.silence_s)
        silence.watch(task, addresses[task])
    for task, facts in workers.items():
        _check(addresses, task, facts)
    for task in workers:  # last: a worker with another list would answer for somebody else
        _refuse_if_used(addresses[task], task)
    return workers


def _greet(addresses: Sequence[str], task: int, deadline: float, silence_s: float) -> Facts:
    """Ask a worker for its facts once it is there; wait ``silence_s`` for a silent one."""
    told = time.monotonic() + _PATIENCE_S
    heard = time.monotonic()  # if only that nobody is there
    while True:
        reason = answers(addresses[task])
        silent = False
        if not reason:
            try:
                with Line(f"grpc://{addresses[task]}", task) as line:
                    return line.ask(min(10.0, max(1.0, deadline - time.monotonic())))
            except (tf.errors.OpError, ValueError, KeyError, TypeError) as error:
                silent = isinstance(error, tf.errors.DeadlineExceededError)
                reason = f"something listens there, but no tf-ooo worker: {in_a_line(error)}"
        heard = heard if silent else time.monotonic()
        if time.monotonic() > min(deadline, heard + silence_s):
            raise BackendError(
                f"worker {addresses[task]} (task {task}) is not there: {reason}; start it there with "
                f"{_command(addresses, task)}; if another program has the port, take another one, in the "
                "lists of all tasks"
            )
        if time.monotonic() > told:
            told = deadline
            logger.warning(
                "waiting for worker %s (task %d), which is not there yet: %s", addresses[task], task, reason
            )
        time.sleep(0.3)


def _check(addresses: Sequence[str], task: int, facts: Facts) -> None:
    """Raise BackendError for a worker that this process cannot work with."""
    own = own_facts(tuple(addresses), task)
    who = f"worker {addresses[task]} (task {task})"
    for what, name in (("TensorFlow", "tensorflow"), ("tf_ooo", "tf_ooo")):
        theirs, ours = getattr(facts, name), getattr(own, name)
        if theirs != ours:
            raise BackendError(
                f"{who} runs {what} {theirs}, this process {ours}; install the same version on both"
            )
    if (facts.addresses, facts.task) != (own.addresses, own.task):
        # A worker with another list has asked whom that list calls by the number, which may be somebody else.
        its = facts.addresses
        started = its.index(addresses[task]) if addresses[task] in its else facts.task
        raise BackendError(
            f"{who} was started as task {started} of {','.join(its)}; "
            f"start it with {_command(addresses, task)}"
        )


def _refuse_if_used(address: str, task: int) -> None:
    """Raise BackendError if another training uses the worker: both would compete for memory and cores."""
    if (client := user_of(address, task, 10.0)) is not None:
        raise BackendError(
            f"worker {address} (task {task}) is in use by another training, process {client.process} at "
            f"{client.address}: wait for its end, or start workers of your own at other addresses"
        )


def _join(
    addresses: Sequence[str], workers: Mapping[int, Facts], own_task: int | None, silence: Silence
) -> None:
    """Connect this process' eager context to the workers.  BackendError names workers lost meanwhile."""
    with contextlib.suppress(RuntimeError):  # TensorFlow runs already, with the threads that it has
        # The workers' executors take the number from here.
        asked = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
        tf.config.threading.set_inter_op_parallelism_threads(max(LEAST_THREADS, asked))
    tasks = {task: addresses[task] for task in workers}
    runtime.keep_order_on_workers()
    with _own_address(addresses, list(tasks.values()), own_task) as own:
        jobs = {_OWN_JOB: {0: own}, **({"worker": tasks} if tasks else {})}
        try:
            with only_at(own), runtime.failing_where_cut_off():
                tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(jobs), job_name=_OWN_JOB)
                tf.config.list_logical_devices()  # connects now, if TensorFlow had not started yet
        except tf.errors.OpError as error:
            silent = silence.tasks()
            lost = "; ".join(f"lost worker {addresses[n]} (task {n}): {silence.text()}" for n in silent)
            why = lost or error.message
            raise BackendError(f"cannot join the cluster {','.join(addresses)}: {why}") from error
    runtime.keep_functions()  # the workers do not know them
    atexit.register(runtime.keep_functions)  # workers may end before this process has
    for task, address in tasks.items():
        try:
            say_used(address, task, own)
        except tf.errors.OpError as error:
            why = f"it does not answer: {in_a_line(error)}"
            raise BackendError(f"lost worker {address} (task {task}) while it was joined: {why}") from error
    logger.info("joined the cluster %s as %s", ",".join(addresses), own)
    if not is_loopback(own):
        logger.warning(
            "this process listens at %s for its workers, and whoever reaches that can run anything as this "
            "user: keep it in a network of its own (docs/security.md)",
            own,
        )


@contextlib.contextmanager
def _own_address(addresses: Sequence[str], others: Sequence[str], own_task: int | None) -> Iterator[str]:
    """Yield this process' address to listen on; a port that it chooses is reserved within the block."""
    if own_task is not None:
        yield addresses[own_task]
        return
    host = outward_host(others)
    with held_ports(1, host.strip("[]")) as (port,):
        yield f"{host}:{port}"


def _devices(tasks: int, own_task: int | None) -> tuple[str, ...]:
    """Return full device names, GPUs before CPUs, task by task."""
    own = f"/job:{_OWN_JOB}/replica:0/task:0"
    listed = [device.name for device in tf.config.list_logical_devices()]
    # TensorFlow leaves the job out of the names of this process' devices.
    names = [name if name.startswith("/job:") else f"{own}{name}" for name in listed]
    devices: list[str] = []
    for task in range(tasks):
        job = own if task == own_task else f"/job:worker/replica:0/task:{task}"
        of_job = [name for name in names if name.startswith(f"{job}/")]
        devices += [name for name in of_job if ":GPU:" in name] or [n for n in of_job if ":CPU:" in n]
    return tuple(devices)


def _command(addresses: Sequence[str], task: int) -> str:
    said = "" if is_loopback(addresses[task]) else " --insecure-network"
    return f"tf-ooo worker --cluster {','.join(addresses)} --task {task}{said}"


class Devices:
    """Holds devices of this process, none of which can be lost; methods are as in :class:`Cluster`."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)

    def lost(self) -> Mapping[int, str]:
        return {}

    def reachable(self, device: str) -> bool:
        return True

    def explain(self, error: Exception) -> Exception:
        return error

    def link_between(self) -> Link:
        return link_between(self.devices)

    def speeds(self) -> tuple[float, ...]:
        return relative_speeds(self.devices, self.hosts(), home_device())

    def hosts(self) -> Sequence[str]:
        """Return the process of each device."""
        return [name.rsplit("/device:", 1)[0] for name in self.devices]

    def memory_limits(self) -> Mapping[str, ReportedLimit]:
        return limits_of_gpus(self.devices)


Target: TypeAlias = Cluster | Devices
"""Devices, by full name in the order of the parts, and the object that manages them."""


def target_of(devices: Any, local_rank: int = 0) -> Target:
    """Return the devices that ``devices=`` names, see :func:`full_names`; joins the workers of a cluster.

    BackendError: a device that does not exist, a worker that cannot be joined.
    """
    devices = cluster_of_environment() if devices is None else devices
    given = connect(devices) if is_cluster(devices) else devices
    names = full_names(given, local_rank)
    return given if isinstance(given, Cluster) else Devices(names)


def lost_text(variables: Sequence[str]) -> str:
    """Say what has happened to variables whose worker is gone."""
    return (
        f"{len(variables)} variables, first {variables[0]}, were on a device that is gone; they have the "
        "values that they had before this fit: load the last checkpoint"
    )


def gone(lost: Sequence[str], explain: Callable[[Exception], Exception]) -> Exception:
    """Return the error to raise for variables whose device is gone; it names the worker, if any."""
    error = RuntimeError(lost_text(lost))
    explained = explain(error)
    return BackendError(str(error)) if explained is error else explained
