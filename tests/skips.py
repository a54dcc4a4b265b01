"""Lists the reasons for which a test may be skipped; any other one fails a strict run."""

from __future__ import annotations

import contextlib
import re
from importlib import metadata

import pytest

# This machine, or the TensorFlow that is supported first, cannot have these.
ALLOWED = (
    r"needs a GPU",
    r"TF_OOO_JAX_PYTHON is not set",
    r"needs TensorFlow 2\.15",
    r"of TensorFlow before 2\.21",
    r"Keras 3 has no legacy optimizers",
    r"not begun after \d+ minutes",
    r"needs (root for memory groups|memory groups|the right to make memory groups)",
)
# Older ones lack these, or have no locked package for them.
ALLOWED_ON_OLDER = (
    r"needs the XLA of TensorFlow 2\.21",
    r"needs what only Keras 3 has",
    r"(of|for) Keras 3",
    r"Keras 2 (compiles|traces)",
    r"(keras[-_]hub|tf_keras|tensorflow-datasets|horovod|Horovod|sybil|nbclient|ipykernel) is not installed",
    r"could not import '(tf_keras|mypy)'",
    r"the installed Keras comes without its tests",
)


def allowed() -> tuple[str, ...]:
    """The reasons that count with the installed TensorFlow, which is not imported for that."""
    return ALLOWED if _is_first_supported() else ALLOWED + ALLOWED_ON_OLDER


def _is_first_supported() -> bool:
    for name in ("tensorflow-cpu", "tensorflow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name).startswith("2.21.")
    return True


class StrictSkips:
    """Fails the run where a test was skipped for a reason that is not on the list."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._check(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._check(report.nodeid, report.longrepr)

    def _check(self, nodeid: str, longrepr: object) -> None:
        reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
        if not any(re.search(pattern, reason) for pattern in allowed()):
            self.refused.append(f"{nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.refused:
            terminalreporter.write_line(f"SKIP NOT ALLOWED (tests/skips.py): {line}", red=True)
