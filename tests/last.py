"""Files that run last, and that a run which may take so many minutes only leaves out where it is late."""

from __future__ import annotations

import time

import pytest

# They check once more, on whole programs, what other files check in parts; memory by what allocators count.
LAST = (
    "tests/graph/test_pages.py",
    "tests/graph/test_examples.py",
    "tests/graph/test_notebooks.py",
    "tests/graph/test_applications.py",
    "tests/graph/test_random_models.py",
    "tests/graph/test_random_pipelines.py",
    "tests/distributed/test_cluster_memory.py",
    "tests/distributed/test_random_ranks.py",
    "tests/distributed/test_random_faults.py",
    "tests/distributed/test_benchmarks_workers.py",
    "tests/distributed/test_benchmarks_horovod.py",
    "tests/graph/test_paper_runs.py",
    "tests/graph/test_bit_equal_more.py",
    "tests/graph/test_keras_own.py",
)
BEGIN_S = time.monotonic()
_reasons: dict[str, str] = {}


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="begin no file of LAST in tests/last.py after so many")


def left_out(nodeid: str, minutes: float | None) -> str:
    """The reason why a test is not run, or ""; its file's first test decides for the others of that file."""
    file = nodeid.partition("::")[0]
    if minutes is None or file not in LAST:
        return ""
    late = time.monotonic() - BEGIN_S > minutes * 60
    return _reasons.setdefault(file, f"not begun after {minutes:g} minutes" if late else "")
