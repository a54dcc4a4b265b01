"""One call under TensorFlow's profilers: of this process, or of the workers that it has work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tf_ooo.compat import nests, tf_profiler
from tf_ooo.compat.tf_profiler import TracedEvent
from tf_ooo.errors import BackendError

OWN = ""
_MARGIN_S = 0.4


@dataclass(frozen=True)
class Traced:
    """Holds what ran once.

    Attributes:
        outputs: what it returned.
        events: by address of the worker; of this process by :data:`OWN`.
        files: the profiler's own, by their paths below a folder of logs.
        seconds: of the call.
        failed: why there are no events; then nothing else but the outputs is there.
    """

    outputs: Any
    events: Mapping[str, Sequence[TracedEvent]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""


def run_traced(run: Callable[[], Any], addresses: Sequence[str], expected_s: float) -> Traced:
    """Calls ``run`` exactly once, whatever the profilers do.  Raises what it raises.

    Args:
        run: its outputs are waited for.
        addresses: of workers, which this process' profiler does not see; none: this process.
        expected_s: about what it takes; workers' profilers look on for twice as long.
    """
    events: dict[str, Sequence[TracedEvent]] = {}
    files: dict[str, bytes] = {}
    results: list[Any] = []
    seconds, under_way = 0.0, False
    tracing = _workers(addresses, expected_s, events, files) if addresses else _this_process(events, files)
    try:
        with tracing:
            under_way = True
            started = time.perf_counter()
            results.append(run())
            nests.synchronize(results[0])
            seconds = time.perf_counter() - started
    except BackendError as error:
        if under_way and not results:
            raise
        return Traced(results[0] if results else run(), failed=str(error))
    return Traced(results[0], events, files, seconds)


@contextlib.contextmanager
def _this_process(events: dict[str, Sequence[TracedEvent]], files: dict[str, bytes]) -> Iterator[None]:
    own: list[TracedEvent] = []
    with tf_profiler.traced_events(own, files):
        yield
    events[OWN] = own


@contextlib.contextmanager
def _workers(
    addresses: Sequence[str],
    expected_s: float,
    events: dict[str, Sequence[TracedEvent]],
    files: dict[str, bytes],
) -> Iterator[None]:
    seconds = 2 * expected_s + 2 * _MARGIN_S
    with ThreadPoolExecutor(1) as threads:
        traced = threads.submit(tf_profiler.trace_workers, addresses, seconds, files)
        time.sleep(_MARGIN_S)  # until they look on
        yield
        events.update(traced.result())
