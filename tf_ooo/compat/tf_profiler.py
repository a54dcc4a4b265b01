"""Runs TensorFlow's profiler."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_ooo.errors import BackendError

STEP_MARK = "tf_ooo_step"
# A CPU's kernels divide their work among threads with this in their names.
_WITHIN_OPS = "_Eigen"
_BEGINS, _ENDS = "ThreadpoolListener::StartRegion", "ThreadpoolListener::StopRegion"


@dataclass(frozen=True)
class TracedEvent:
    """Holds one event of TensorFlow's profiler; times are in seconds since a common moment.

    ``line``: thread or GPU stream.  ``label``: its name, or the ``<node>:<op>`` that issued a GPU kernel.
    """

    plane: str
    line: str
    label: str
    begin_s: float
    duration_s: float


@contextlib.contextmanager
def traced_events(events: list[TracedEvent], files: dict[str, bytes] | None = None) -> Iterator[None]:
    """Fill ``events`` with what TensorFlow's profiler records inside the block.

    ``files`` gets the files it has written, by their path in a folder of logs, where TensorBoard looks for
    them. Raises BackendError if the profiler is in use (``TensorBoard(profile_batch=...)`` uses it too).
    """
    with tempfile.TemporaryDirectory(prefix="tf_ooo_profile_") as folder:
        try:
            tf.profiler.experimental.start(folder)
        except tf.errors.AlreadyExistsError as error:
            raise BackendError("TensorFlow's profiler is already running; stop it first") from error
        try:
            yield
        except BaseException:
            with contextlib.suppress(tf.errors.UnavailableError):
                tf.profiler.experimental.stop(save=False)
            raise
        try:
            tf.profiler.experimental.stop()
        except tf.errors.UnavailableError as error:
            raise BackendError("TensorFlow's profiler was stopped while it ran for the costs") from error
        written = _written(folder)
    for content in written.values():
        events += _read_xplane(content)
    if files is not None:
        files.update(written)


def pool_work(events: Sequence[TracedEvent]) -> list[TracedEvent]:
    """Return when threads of TensorFlow's pools within ops worked on a part of an op.

    The profiler has two events without duration for each part: its beginning and its end.
    """
    begun: dict[str, TracedEvent] = {}
    work: list[TracedEvent] = []
    for event in sorted(events, key=lambda event: event.begin_s):
        if _WITHIN_OPS not in event.line:
            continue
        if event.label == _BEGINS:
            begun[event.line] = event
        elif event.label == _ENDS and event.line in begun:
            began = begun.pop(event.line)
            work.append(replace(began, duration_s=event.begin_s - began.begin_s))
    return work


def mark_step(number: int) -> Any:
    """Return a context manager whose block is one step: the trace has an event STEP_MARK for it."""
    return tf.profiler.experimental.Trace(STEP_MARK, step_num=number)


def _read_xplane(content: bytes) -> Iterator[TracedEvent]:
    for plane in _planes(content):
        tf_op = {key for key, meta in plane.stat_metadata.items() if meta.name == "tf_op"}
        for line in plane.lines:
            for event in line.events:
                label = plane.event_metadata[event.metadata_id].name
                for stat in event.stats:
                    if stat.metadata_id in tf_op:
                        label = stat.str_value or plane.stat_metadata[stat.ref_value].name
                begin_s = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                yield TracedEvent(plane.name, line.name, label, begin_s, event.duration_ps * 1e-12)


def _planes(content: bytes) -> Any:
    """Parse the profiler's file ``*.xplane.pb``."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(content).planes


def trace_workers(
    addresses: Sequence[str], seconds: float, files: dict[str, bytes] | None = None
) -> dict[str, list[TracedEvent]]:
    """Record for ``seconds`` what TensorFlow servers run, by address; times are since the epoch.

    Returns when they are through; the servers' clocks are trusted.  ``files`` as in :func:`traced_events`.
    BackendError: a server does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="tf_ooo_profile_") as folder:
        where = ",".join(f"grpc://{address}" for address in addresses)
        try:
            tf.profiler.experimental.client.trace(where, folder, round(seconds * 1e3), num_tracing_attempts=1)
        except (tf.errors.OpError, RuntimeError) as error:
            raise BackendError(f"{where}: cannot be profiled: {getattr(error, 'message', error)}") from error
        written = _written(folder)
    if files is not None:
        files.update(written)
    names = {f"{address.replace(':', '_')}.xplane.pb": address for address in addresses}
    by_name = {path.rpartition("/")[2]: content for path, content in written.items()}
    return {names[name]: _since_epoch(content) for name, content in by_name.items() if name in names}


def _written(folder: str) -> dict[str, bytes]:
    """Return the files that the profiler has written, by their paths in its folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*.xplane.pb")}


def _since_epoch(content: bytes) -> list[TracedEvent]:
    began_s = 0.0
    for plane in _planes(content):
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                began_s = (stat.uint64_value or stat.int64_value) * 1e-9
    return [replace(event, begin_s=began_s + event.begin_s) for event in _read_xplane(content)]
