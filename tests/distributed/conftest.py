"""For tests on several ranks, each of which runs the test."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def engine() -> Any:
    """The ranks, joined once in a process and before its first tensor."""
    from tf_ooo.modes import data_parallel

    return data_parallel.connect()


@pytest.fixture
def quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer messages measure the link, and searches are short."""
    from tf_ooo.modes.data_parallel import planning

    monkeypatch.setattr(planning, "_SIZES", (64 * 1024, 256 * 1024))
    monkeypatch.setattr(planning, "_SEARCH_S", 0.5)
    monkeypatch.setattr(planning, "_SLICED_SEARCH_S", 0.2)
