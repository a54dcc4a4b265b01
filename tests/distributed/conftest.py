"""For tests on several ranks, each of which runs the test."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def engine() -> Any:
    """The ranks, joined once in a process and before its first tensor."""
    from tf_ooo import data_parallel

    return data_parallel.connect()
