"""Tests that need groups of processes with a limit of memory; whether there are any is tried once."""

from __future__ import annotations

import pytest

from benchmarks.machine import groups

_WHY_NOT = groups.why_no_limit()
needs_memory_groups = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "-")
