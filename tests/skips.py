"""Which reasons a test may be skipped for; any other one fails a strict run."""

from __future__ import annotations

import re

import pytest

ALLOWED = (
    r"needs a GPU",
    r"needs the XLA of TensorFlow 2\.21",
    r"needs what only Keras 3 has",
)


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
        if not any(re.search(allowed, reason) for allowed in ALLOWED):
            self.refused.append(f"{nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.refused:
            terminalreporter.write_line(f"SKIP NOT ALLOWED (tests/skips.py): {line}", red=True)
