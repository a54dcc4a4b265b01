"""Times one run of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tf_ooo.compat import nests


class TimedRun(NamedTuple):
    """One run: its outputs, the seconds until they were there, and whether something was traced meanwhile."""

    outputs: Any
    seconds: float
    traced: bool


def timed_run(run: Callable[[], Any], traces: Callable[[], int], wait: bool = True) -> TimedRun:
    """Run once, and wait for the outputs unless told otherwise; ``traces`` counts what was traced so far."""
    before, started = traces(), time.perf_counter()
    outputs = run()
    if wait:
        nests.synchronize(outputs)
    return TimedRun(outputs, time.perf_counter() - started, traces() > before)
