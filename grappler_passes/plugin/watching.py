"""Says where a rewrite stands that takes longer than it should."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from grappler_passes.plugin.requests import logger

EXPECTED_S = 30.0
"""A rewrite may take so long before it is spoken of, and so much longer for each op of the graph: with
DenseNet121 (18,904 ops), the slowest step of the zoo, it takes 6 s."""
EXPECTED_S_PER_OP = 0.005


@contextmanager
def watched(request_id: str, ops: int) -> Iterator[None]:
    """Warns once, with the line of the block that this thread is at, if the block takes too long."""
    limit_s = EXPECTED_S + EXPECTED_S_PER_OP * ops
    timer = threading.Timer(limit_s, _say, [request_id, ops, limit_s, threading.get_ident()])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(request_id: str, ops: int, limit_s: float, thread: int) -> None:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return
    lines = traceback.extract_stack(frame)
    ours = [line for line in lines if "grappler_passes" in line.filename or "tf_ooo" in line.filename]
    at, last = (ours or lines)[-1], lines[-1]
    logger.warning(
        "%s: rewriting a graph of %d ops has taken %.0f s so far; it stands in %s (%s:%d), at %s. Training "
        "goes on when it is done; if that takes too long, end it, leave tf_ooo out and report this line",
        request_id, ops, limit_s, at.name, at.filename, at.lineno, last.name,
    )  # fmt: skip
