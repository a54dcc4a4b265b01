"""Something to say if a block takes long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def if_it_takes(seconds: float, say: Callable[[], object]) -> Iterator[None]:
    """Calls ``say`` once, from another thread, if the block is not through by then; it is done at the end."""
    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
