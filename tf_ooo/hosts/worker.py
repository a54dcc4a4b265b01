"""A worker process: TensorFlow's server of one task of a cluster, until it is told to end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from tf_ooo.compat import versions
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.hosts.devices import can_listen, is_loopback, only_at, parse
from tf_ooo.hosts.facts import own_facts, publish

# Fewer, and a worker that computes cannot serve the tensors that others wait for.
LEAST_THREADS = 4
# Whoever has to read what a worker says at its end may be gone, or not read.
_LAST_WORD_S = 3.0


def serve(
    cluster: str | Sequence[str],
    task: int,
    inter_op_threads: int | None = None,
    intra_op_threads: int = 0,
    insecure_network: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Serves task ``task`` of the cluster and does not return: SIGTERM or Ctrl-C ends the process.

    Args:
        cluster: ``"host1:port,host2:port"``, the same text for every task and for the client.
        task: this process' place in it.
        inter_op_threads: that run ops side by side, at least 4; None: one per core, or 4.
        intra_op_threads: within one op; 0: one per core.
        insecure_network: whoever reaches the address can run anything as this process' user, and that is
            accepted: it is in a network of its own.  Not needed for addresses of this machine alone.
        say: is told where the worker listens, once it does.

    Raises:
        OptionsError: the cluster, task or number of threads is not accepted.
        BackendError: this machine cannot listen at the task's address, or TensorFlow is too old or too new.
    """
    addresses = parse(cluster)
    _check(addresses, task, inter_op_threads, insecure_network)
    versions.check_versions()
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=inter_op_threads or max(LEAST_THREADS, os.cpu_count() or 1),
        intra_op_parallelism_threads=intra_op_threads,
    )
    try:
        with only_at(addresses[task]):
            server = tf.distribute.Server(
                tf.train.ClusterSpec({"worker": list(addresses)}),
                job_name="worker",
                task_index=task,
                config=config,
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
