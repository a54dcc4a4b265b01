"""Processes whose libraries hang while Python frees them; and those that only take long before."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import time

import pytest

from tests import forked
from tf_ooo.hosts.native import end_in_time

# Without the bound the wait below fails after so long.
LIMIT_S = 60.0


class HangsInTheEnd:
    """Freed by the collector alone, and then waits for ever with Python's lock held."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        if sys.is_finalizing():
            print("hangs", flush=True)
            ctypes.PyDLL(None).pause()


def hang():
    HangsInTheEnd()
    atexit.register(end_in_time, 0.5)


def take_long_at_exit():
    """Register functions, which run in turn, the last first; nothing is freed here."""
    atexit.register(os._exit, 0)
    atexit.register(time.sleep, 1.5)
    atexit.register(end_in_time, 0.2)
    atexit.register(gc.collect)


@pytest.mark.parametrize(("function", "status"), [(hang, 1), (take_long_at_exit, 0)])
def test_only_what_hangs_is_cut_short(function, status):
    process = forked.start(forked.as_script, function)
    said = process.communicate(LIMIT_S)[0]
    assert process.returncode == status, said
    assert ("this process is ended" in said) is (status == 1), said
    assert ("hangs" in said) is (status == 1), said
