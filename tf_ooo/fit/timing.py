"""Times one run of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tf_ooo.compat import nests


def timed_run(
    run: Callable[[], Any], traces: Callable[[], int], wait: bool = True
) -> tuple[Any, float, bool]:
    """Run once, and wait for the outputs unless told otherwise; ``traces`` counts what was traced so far.

    Returns the outputs, the seconds until they were there, and whether something was traced meanwhile.
    """
    before, started = traces(), time.perf_counter()
    outputs = run()
    if wait:
        nests.synchronize(outputs)
    return outputs, time.perf_counter() - started, traces() > before
