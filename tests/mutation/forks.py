"""Tests in forked processes: each begins where TensorFlow is imported and has not run anything yet."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The working tree itself has these; folders within the packages may have such names.
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".hypothesis", ".*_cache", "out", "build", "dist", "shared"
)
_LOOK_EVERY_S = 0.02
# Pytest says these: wrong arguments, no tests. Neither says anything of a mutant.
_NO_ANSWER = (4, 5)


def copy_tree(root: Path, to: Path) -> None:
    """A copy of the working tree to change; what is imported is compiled already."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        return _LEFT_OUT(folder, names) if Path(folder) == root else set()

    shutil.copytree(root, to, ignore=left_out, symlinks=True)
    for package in ("grappler_passes", "tf_ooo", "keras_callbacks"):
        compileall.compile_dir(to / package, quiet=2)


def forget_compiled(path: Path) -> None:
    """A module that will be changed is compiled each time: its size and time may stay the same."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


@dataclass
class Run:
    """One run of some tests in a copy of the tree."""

    tree: Path
    tests: list[str]
    limit_s: float
    keeps_compiled: bool = False
    pid: int = 0
    started: float = 0.0

    @property
    def log(self) -> Path:
        return self.tree.with_suffix(".log")

    def start(self) -> None:
        self.started, self.pid = time.monotonic(), os.fork()
        if self.pid == 0:
            _become_pytest(self)

    def outcome(self) -> str | None:
        """``passed``, ``failed`` or ``timeout``; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            if code in _NO_ANSWER:
                raise RuntimeError(f"pytest could not run {self.tests}: {self.log.read_text()}")
            return "passed" if code == 0 else "failed"
        if time.monotonic() - self.started < self.limit_s:
            return None
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return "timeout"


def _become_pytest(run: Run) -> None:
    status = 1
    try:
        os.setsid()
        out = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(run.tree)
        sys.path[0] = str(run.tree)
        sys.dont_write_bytecode = not run.keeps_compiled
        import pytest

        options = ["-x", "-q", "--in-process", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        status = int(pytest.main([*options, *run.tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def finished(runs: Iterator[Callable[[Path], Run]], trees: list[Path]) -> Iterator[tuple[Run, str]]:
    """Makes and starts a run for each tree that is free, and gives each with its outcome."""
    free, running = list(trees), list[Run]()
    while True:
        while free and (make := next(runs, None)) is not None:
            run = make(free.pop())
            run.start()
            running.append(run)
        if not running:
            return
        time.sleep(_LOOK_EVERY_S)
        for run in list(running):
            outcome = run.outcome()
            if outcome is not None:
                yield run, outcome
                running.remove(run)
                free.append(run.tree)
