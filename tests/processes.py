"""A pytest plug-in: each test file runs in its own process, forked from one that has imported TensorFlow.

Marks say what the process is like:

``devices(n)``          so many logical CPU devices
``ranks(n, engine)``    so many processes that train together, launched as for Horovod by hand (``"horovod"``)
                        or by ``"horovodrun"``, or with TF_CONFIG (``"collectives"``); each runs the test, and
                        the test fails if it fails on one
``alone``               a new process for each test of the file: for what could end it, or is done once in one
``environment(**vars)`` variables of the process

Tests of a file with the same marks follow one another and share a process, module fixtures and all; failed
ranks are started anew.  ``--in-process`` runs everything in pytest's own process, for a debugger; tests that
need more are skipped then.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests import last, launches
from tests.answering import Answering, NoAnswer

MARKS = {
    "devices": "devices(n): runs in a process with so many logical CPU devices",
    "ranks": "ranks(n, engine): runs on so many ranks that train together",
    "alone": "alone: runs in a process of its own, not with the others of its file",
    "environment": "environment(**variables): environment variables of the process",
    "timeout": "timeout(seconds): how long the test may take",
}


@dataclass(frozen=True)
class Kind:
    """Says what a process must be like to run a test."""

    file: str
    devices: int = 0
    ranks: int = 0
    engine: str = ""
    alone: str = ""
    environment: tuple[tuple[str, str | None], ...] = ()


def kind_of(item: pytest.Item) -> Kind:
    """From the marks of a test."""

    def argument(name: str, place: int, default: Any) -> Any:
        mark = item.get_closest_marker(name)
        return mark.args[place] if mark and len(mark.args) > place else default

    variables = {k: v for mark in item.iter_markers("environment") for k, v in mark.kwargs.items()}
    return Kind(
        str(item.path),
        argument("devices", 0, 0),
        argument("ranks", 0, 0),
        argument("ranks", 1, "horovod"),
        item.nodeid if item.get_closest_marker("alone") else "",
        tuple(sorted(variables.items())),
    )


def timeout_of(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark else item.config.getini("timeout"))


def is_good(answer: Any) -> bool:
    return isinstance(answer, list) and all(report["outcome"] != "failed" for report in answer)


class Forking:
    """Runs tests in groups of processes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.group: Answering | None = None
        self.kind: Kind | None = None
        self.index: dict[str, int] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put tests of a file that share processes together: each change ends some and starts others."""
        files = {path: place for place, path in enumerate(dict.fromkeys(str(item.path) for item in items))}
        kinds = {kind: place for place, kind in enumerate(dict.fromkeys(map(kind_of, items)))}
        items.sort(key=lambda item: (files[str(item.path)], kinds[kind_of(item)]))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.index = {item.nodeid: place for place, item in enumerate(session.items)}
        # Its folder is made once, not by each process.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        gc.collect()
        gc.freeze()  # what is imported is not looked through again, nor copied for the forks
        gc.set_threshold(20_000, 20, 100)  # graphs are made of many objects that live: 6% of a trace

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reports(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        kind, started = kind_of(item), time.time()
        if reason := last.left_out(item.nodeid, item.config.option.minutes):
            place = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {reason}")
            return [pytest.TestReport(item.nodeid, item.location, {}, "skipped", place, "setup")]
        if self.group is None or self.kind != kind:
            self._end()
            try:
                self.kind, self.group = kind, self._start(kind, item.session)
            except Exception as error:
                return [self._broken(item, f"could not be started: {error}", 0, started)]
        goes_on = nextitem is not None and kind_of(nextitem) == kind
        next_index = self.index[nextitem.nodeid] if nextitem is not None and goes_on else None
        self.group.ask((self.index[item.nodeid], next_index), timeout_of(item))
        while (answers := self.group.answers(0.02 if kind.ranks else 1.0)) is None:
            pass
        failed = [rank for rank, answer in answers.items() if not is_good(answer)]
        if not goes_on or failed:
            self._end()
        return self._merged(item, answers, failed[0] if failed else 0, started)

    def _start(self, kind: Kind, session: pytest.Session) -> Answering:
        stack, own = contextlib.ExitStack(), dict(kind.environment)
        environments = [own]
        if kind.ranks:
            launched = stack.enter_context(launches.environments(kind.engine, kind.ranks))
            environments = [variables | own for variables in launched]
        return Answering(functools.partial(_prepare, session, kind), environments, is_good, stack)

    def pytest_unconfigure(self) -> None:
        """Also after Ctrl-C."""
        self._end()

    def _end(self) -> None:
        if self.group is not None:
            self.group.end()
            self.group = None

    def _merged(
        self, item: pytest.Item, answers: dict[int, Any], rank: int, started: float
    ) -> list[pytest.TestReport]:
        """Return what that rank reports."""
        if isinstance(answers[rank], NoAnswer):
            return [self._broken(item, answers[rank].text, rank, started)]
        load = self.config.hook.pytest_report_from_serializable
        lists = [answers[each] for each in sorted(answers) if isinstance(answers[each], list)]
        outcomes = [[report["outcome"] for report in reports] for reports in lists]
        if any(outcome != outcomes[0] for outcome in outcomes) and is_good(answers[rank]):
            return [self._broken(item, f"ranks end differently: {outcomes}", rank, started)]
        reports = [load(config=self.config, data=data) for data in answers[rank]]
        if len(answers) > 1:
            for report in reports:
                report.sections.append(("rank", f"this is rank {rank} of {len(answers)}"))
        return reports

    def _broken(self, item: pytest.Item, why: str, rank: int, started: float) -> pytest.TestReport:
        """The report of a test whose process ended or hung, with what it had printed."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        said = "".join(capture.read_global_capture()) if capture and capture.is_globally_capturing() else ""
        text = f"rank {rank}: {why}\n{said}"
        return pytest.TestReport(
            item.nodeid, item.location, {}, "failed", text, "call", [], time.time() - started,
            started, time.time(),
        )  # fmt: skip


def _prepare(session: pytest.Session, kind: Kind, rank: int) -> Callable[[Any], Any]:
    """In the child: what runs the tests that it is told to."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    if rank and capture is not None and capture.is_globally_capturing():
        capture.stop_global_capturing()  # the first rank writes there
        capture.start_global_capturing()
    make_devices(kind.devices)
    dump = session.config.hook.pytest_report_to_serializable

    def reports_of(places: tuple[int, int | None]) -> list[Any]:
        item, following = (None if place is None else session.items[place] for place in places)
        reports = runtestprotocol(item, log=False, nextitem=following)
        return [dump(config=session.config, report=report) for report in reports]

    return reports_of


def make_devices(count: int) -> None:
    """So many logical CPUs, before TensorFlow's runtime exists."""
    if count:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def devices_made() -> int:
    """Return how many logical CPUs :func:`make_devices` has made."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return 0
    cpu = tensorflow.config.list_physical_devices("CPU")[0]
    return len(tensorflow.config.get_logical_device_configuration(cpu) or ())


class InProcess:
    """``--in-process``: skips what needs other processes, or more devices than this one has."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            kind = kind_of(item)
            if kind.ranks or kind.devices > max(1, devices_made()) or kind.environment:
                item.add_marker(pytest.mark.skip(reason="needs a process of its own"))


def configure(config: pytest.Config) -> None:
    """Adds the marks and the plug-in."""
    for line in MARKS.values():
        config.addinivalue_line("markers", line)
    controller = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not controller and not config.option.collectonly:
        config.pluginmanager.register(InProcess() if config.option.in_process else Forking(config))
