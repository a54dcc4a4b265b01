"""Runs a worker process: TensorFlow's server of one task of a cluster, with published facts.

Facts are read with a session rather than eagerly: it has a deadline, and asks one worker without joining its
cluster.  TensorFlow is not imported before: a worker checks its version first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tf_ooo.compat import versions
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.devices import answers, can_listen, is_loopback, only_at, parse
from tf_ooo.hosts.system_memory import ReportedLimit, memory_group, taken_bytes
from tf_ooo.version import __version__

# Fewer, and a worker that computes cannot serve the tensors that others wait for.
LEAST_THREADS = 4
# Whoever has to read what a worker says at its end may be gone, or not read.
_LAST_WORD_S = 3.0
_CONTAINER = "tf_ooo_worker"


def serve(
    cluster: str | Sequence[str],
    task: int,
    inter_op_threads: int | None = None,
    intra_op_threads: int = 0,
    insecure_network: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Serve task ``task`` of the cluster; it never returns: SIGTERM or Ctrl-C ends the process.

    Args:
        cluster: ``"host1:port,host2:port"``, the same text for every task and for the client.
        task: this process' place in it.
        inter_op_threads: threads that run ops side by side, at least 4; None: one per core, or 4.
        intra_op_threads: threads within one op; 0: one per core.
        insecure_network: accept that anyone who reaches the address can run anything as this process' user,
            because the network is isolated.  Not needed for addresses of this machine alone.
        say: called with a line once the worker listens.

    Raises:
        OptionsError: the cluster, task or number of threads is not accepted.
        BackendError: this machine cannot listen at the task's address, or TensorFlow is too old or too new.
    """
    addresses = parse(cluster)
    _check(addresses, task, inter_op_threads, insecure_network)
    versions.check_versions()
    import tensorflow as tf

    try:
        with only_at(addresses[task]):
            server = tf.distribute.Server(
                tf.train.ClusterSpec({"worker": list(addresses)}),
                job_name="worker",
                task_index=task,
                config=_config(inter_op_threads, intra_op_threads),
            )
    except tf.errors.OpError as error:
        reason = can_listen(addresses[task]) or error.message
        raise BackendError(f"cannot listen at {addresses[task]} (task {task}): {reason}") from error
    facts = own_facts(addresses, task)
    publish(server.target, facts)
    ended: list[int] = []

    def end(received: int, frame: object) -> None:
        ended.append(received)
        timer = threading.Timer(_LAST_WORD_S, os._exit, (0,))  # in case that nobody reads what is said
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):  # before anybody is told that this is ready
        signal.signal(number, end)
    say(
        f"worker {addresses[task]} (task {task} of {len(addresses)}) is ready: "
        f"TensorFlow {facts.tensorflow}, tf_ooo {facts.tf_ooo}, process {os.getpid()}"
    )
    _wait_for_the_end(ended, say)


def _config(inter_op_threads: int | None, intra_op_threads: int) -> Any:
    """Return the server's settings: as many CPU devices as this process was configured to have."""
    import tensorflow as tf

    cpus = map(tf.config.get_logical_device_configuration, tf.config.list_physical_devices("CPU"))
    return tf.compat.v1.ConfigProto(
        device_count={"CPU": sum(len(devices or [None]) for devices in cpus)},
        inter_op_parallelism_threads=inter_op_threads or max(LEAST_THREADS, os.cpu_count() or 1),
        intra_op_parallelism_threads=intra_op_threads,
    )


def _check(addresses: Sequence[str], task: int, inter_op_threads: int | None, insecure_network: bool) -> None:
    if not 0 <= task < len(addresses):
        raise OptionsError(f"task={task} is not accepted; the cluster has tasks 0 to {len(addresses) - 1}")
    if inter_op_threads is not None and inter_op_threads < LEAST_THREADS:
        raise OptionsError(
            f"inter_op_threads={inter_op_threads} is not accepted; accepted: at least {LEAST_THREADS}, or "
            "the worker cannot send while it computes"
        )
    if not insecure_network and not is_loopback(addresses[task]):
        raise OptionsError(
            f"{addresses[task]} can be reached by other machines, and whoever does can run anything as this "
            "user: TensorFlow's workers know no password. In a network of its own say --insecure-network; "
            "else keep to 127.0.0.1 and use a tunnel (docs/security.md)"
        )
    if reason := can_listen(addresses[task]):
        raise BackendError(f"cannot listen at {addresses[task]} (task {task}): {reason}")


def _wait_for_the_end(ended: Sequence[int], say: Callable[[str], None]) -> None:
    while not ended:
        # Not for longer: the signal may have woken another thread.
        time.sleep(0.2)
    try:
        say(f"ended by {signal.Signals(ended[0]).name}")
        sys.stdout.flush()
    finally:
        os._exit(0)  # TensorFlow's server has no way to stop


@dataclass(frozen=True)
class Facts:
    """Describes one worker process; ``started`` tells two processes at the same address apart.

    Attributes:
        memory_limit_bytes: the limit of its control group; None: the whole machine.
        memory_group: the group's unique name, also among other machines.
        taken_bytes: bytes in its process before the first training.
    """

    addresses: tuple[str, ...]
    task: int
    tensorflow: str
    tf_ooo: str
    started: str
    memory_limit_bytes: int | None = None
    memory_group: str = ""
    taken_bytes: int = 0

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Facts:
        """Read facts; fields added by later versions are left out; earlier versions have fewer."""
        told = json.loads(text)
        known = {field.name: told[field.name] for field in fields(cls) if field.name in told}
        return cls(**{**known, "addresses": tuple(told["addresses"])})


def own_facts(addresses: tuple[str, ...], task: int) -> Facts:
    """Return the facts of this process."""
    import tensorflow as tf

    started, group = f"{os.getpid()}@{time.time():.6f}", memory_group()
    facts = Facts(addresses, task, tf.__version__, __version__, started, taken_bytes=taken_bytes())
    if group is None:
        return facts
    return replace(facts, memory_limit_bytes=group.limit_bytes, memory_group=group.name)


def publish(target: str, facts: Facts) -> None:
    """Put facts into the runtime of the server at ``target``, which is in this process."""
    import tensorflow as tf

    with Line(target, facts.task, write=facts.to_text()) as line:
        try:
            line.run(30.0)
        except tf.errors.OpError as error:
            raise BackendError(f"the worker's own server does not answer: {error.message}") from error


@dataclass(frozen=True)
class Client:
    """Represents a training that uses a worker: the address at which its process listens."""

    address: str
    process: int


def user_of(address: str, task: int, timeout_s: float) -> Client | None:
    """Return the last client that said it uses the worker, if its process still listens there."""
    import tensorflow as tf

    try:
        with Line(f"grpc://{address}", task, name="client") as line:
            client = Client(**json.loads(line.run(timeout_s).decode()))
    except (tf.errors.OpError, ValueError, TypeError):
        return None  # nobody ever has
    return None if answers(client.address) else client


def say_used(address: str, task: int, own: str) -> None:
    """Tell the worker that this process, which listens at ``own``, uses it from now on."""
    client = asdict(Client(own, os.getpid()))
    with Line(f"grpc://{address}", task, json.dumps(client), "client") as line:
        line.run(10.0)


def in_a_line(error: Exception) -> str:
    """Return TensorFlow's message for a call that failed, shortened."""
    text = getattr(error, "message", None) or str(error)
    return " ".join(text.replace("Graph execution error:", "").split())[:200] or type(error).__name__


class Line:
    """Keeps a connection to one worker open; with ``write`` it tells the worker, otherwise it asks.

    ``name``: the name of the string that is read or written.
    """

    def __init__(self, target: str, task: int, write: str | None = None, name: str = "facts") -> None:
        self._target, self._task, self._write, self._name = target, task, write, name
        self._session: Any = None

    def ask(self, timeout_s: float) -> Facts:
        """Ask the worker for its facts. OpError: no answer in ``timeout_s``, or it never published any."""
        return Facts.from_text(self.run(timeout_s).decode())

    def run(self, timeout_s: float) -> Any:
        """Read or write the string."""
        import tensorflow as tf

        milliseconds = round(timeout_s * 1e3)
        if self._session is None:
            self._open(tf, milliseconds)
        options = tf.compat.v1.RunOptions(timeout_in_ms=milliseconds)
        try:
            return self._session.run(self._op, options=options)
        except tf.errors.OpError:
            self.abandon()
            raise

    def _open(self, tf: Any, milliseconds: int) -> None:
        where = f"/job:worker/task:{self._task}"
        # The filter: or the session waits until all workers of the cluster have come.
        config = tf.compat.v1.ConfigProto(device_filters=[where], operation_timeout_in_ms=milliseconds)
        with tf.Graph().as_default() as graph, tf.device(f"{where}/device:CPU:0"):
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.string, shape=[], shared_name=self._name, container=_CONTAINER
            )
            if self._write is None:
                self._op = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string)
            else:
                self._op = tf.raw_ops.AssignVariableOp(resource=handle, value=self._write)

        self._session = tf.compat.v1.Session(self._target, graph=graph, config=config)

    def abandon(self) -> None:
        """Leave the connection open: closing it would wait for the worker, too."""
        from tf_ooo.compat import tf_functions

        if self._session is not None:
            tf_functions.abandon(self._session)
            self._session = None

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def limits_of_workers(
    computing: Mapping[int, int], workers: Mapping[int, Facts], own: Facts
) -> dict[int, ReportedLimit]:
    """Return by task the limit of each CPU on workers whose control groups limit their memory.

    Processes of one group share its limit, less the bytes that all took before; ``own``, this process, takes
    part if it is in such a group.  ``computing``: number of CPU devices by task; 0 if a task has GPUs.
    """
    groups: defaultdict[str, dict[int, Facts]] = defaultdict(dict)
    for task, facts in workers.items():
        if facts.memory_limit_bytes is not None:
            groups[facts.memory_group][task] = facts
    limits: dict[int, ReportedLimit] = {}
    for name, members in groups.items():
        beside = [own] if own.memory_group == name else []
        devices = sum(computing[task] for task in members)
        taken_bytes = sum(facts.taken_bytes for facts in (*members.values(), *beside))
        limits |= {
            task: ReportedLimit(
                max(1, (facts.memory_limit_bytes - taken_bytes) // devices),
                _said(facts, len(members) + len(beside), taken_bytes),
            )
            for task, facts in members.items()
            if computing[task] and facts.memory_limit_bytes is not None
        }
    return limits


def _said(facts: Facts, processes: int, taken_bytes: int) -> str:
    shared = f", which {processes} processes share," if processes > 1 else ""
    return (
        f"worker {facts.addresses[facts.task]} (task {facts.task}) has a control group of "
        f"{facts.memory_limit_bytes} bytes{shared} of which {taken_bytes} were taken before"
    )
