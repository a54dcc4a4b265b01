"""Ctrl-C while a process is forked."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests import forked


def interrupted_in_a_fork():
    """Python prints and forgets what is raised in the functions that it runs around a fork."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        forked.start(time.sleep, 60)
    with pytest.raises(ChildProcessError):  # what was forked is gone
        os.waitpid(-1, os.WNOHANG)
    return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_interrupt_while_forking_is_raised_and_nothing_is_left():
    assert signal.SIGINT not in forked.result_of(interrupted_in_a_fork)
