"""Costs of layers from a profiled step, and of the link between devices."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from tf_ooo.costs.communication import fit_link
from tf_ooo.costs.devices import device
from tf_ooo.costs.from_graph import graph_costs
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.op_seconds import op_seconds
from tf_ooo.costs.profile import OpProfile
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError
from tf_ooo.pipeline.tasks import tasks_for_costs
from tf_ooo.pipeline.unrolled_tasks import Step, general

_HOPS = 8
_REPEATS = 3
_SIZES = (1024, 64 * 1024, 1024**2)
# Between devices of one process a tensor is handed over, not copied; seconds that the executors take.
_HAND_OVER_S = 30e-6


def measured_costs(step: Step, profile: OpProfile | None) -> CostTable:
    """Costs of the layers for one micro-batch: the mean over all micro-batches of the profiled step.

    Without a profile seconds are calculated from shapes.
    """
    known = step.known
    if profile is not None:
        profile = dataclasses.replace(profile, seconds=step.averaged(profile.seconds))
    seconds = op_seconds(known.alone, device("cpu-core"), profile)
    in_graph = {name: seconds.seconds.get(name, 0.0) for name in known.graph.ops}
    where = {name: known.where.get(general(name, step.count)) for name in known.graph.ops}
    tasks = tasks_for_costs({name: at for name, at in where.items() if at is not None})
    found = graph_costs(known.graph, in_graph, tasks)
    notes = (*seconds.notes, *found.notes)
    return CostTable(found.layers, source=seconds.source, op_seconds=in_graph, notes=notes)


def link_between(names: Sequence[str]) -> Link:
    """The link between neighbouring devices; the slowest where they differ.

    Within one process, CPUs hand tensors over.  Anything else is measured by sending tensors to and fro.

    Raises BackendError where a device does not answer.
    """
    pairs = [(a, b) for a, b in zip(names, names[1:], strict=False) if not _one_memory(a, b)]
    if not pairs:
        return Link(_HAND_OVER_S if len(names) > 1 else 0.0)
    links = [_measured(a, b) for a, b in pairs]
    return Link(max(x.latency_s for x in links), min(x.bytes_per_s for x in links))


def _one_memory(a: str, b: str) -> bool:
    """Whether both are CPUs of one process."""
    host = [name.rsplit("/device:", 1) for name in (a, b)]
    return host[0][0] == host[1][0] and all(part[1].startswith("CPU") for part in host)


def _measured(sender: str, receiver: str) -> Link:
    import tensorflow as tf

    samples = []
    try:
        for size in _SIZES:
            there = _hops(sender, receiver, size)
            home = _hops(sender, sender, size)
            for hop in (there, home):
                hop().numpy()
            base_s = min(_seconds(home) for _ in range(_REPEATS))
            samples += [(float(size), max(_seconds(there) - base_s, 0.0) / _HOPS) for _ in range(_REPEATS)]
    except tf.errors.OpError as error:
        raise BackendError(f"the link {sender} - {receiver} cannot be measured: {error.message}") from error
    return fit_link(samples, flat_ok=True)


def _hops(sender: str, receiver: str, size: int) -> Any:
    """A function that adds to a tensor on one device and the other in turns, 8 hops."""
    import tensorflow as tf

    def hops() -> Any:
        with tf.device(sender):
            tensor = tf.random.stateless_uniform((max(1, size // 4),), seed=(1, 2))
        for hop in range(_HOPS):
            with tf.device(sender if hop % 2 else receiver):
                tensor = tf.sin(tensor)
        with tf.device(sender):
            return tf.reduce_sum(tensor)

    return tf.function(hops)


def _seconds(function: Any) -> float:
    started = time.perf_counter()
    function().numpy()
    return time.perf_counter() - started
