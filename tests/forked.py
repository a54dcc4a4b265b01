"""Processes that start with TensorFlow imported: forked from one that has run nothing.

To start Python with TensorFlow takes some five seconds of a core, a fork some milliseconds.  TensorFlow may
be forked as long as it has no runtime, which its first op makes, with threads that a fork would not have.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from grappler_passes.blocks import if_it_takes

_PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[1]
# For a new Python's PYTHONPATH: it finds this checkout, and imports Keras in less time.
NEW_PYTHONS_PATH = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'lean_start'}"


def runtime_started() -> bool:
    """Say whether TensorFlow has made its runtime in this process, which cannot be forked any more then."""
    context = sys.modules.get("tensorflow.python.eager.context")
    current = context and context._context
    return bool(current and current._context_handle is not None)


def refuse_with_runtime() -> None:
    """Raises where a fork would hang sooner or later."""
    if runtime_started():
        raise RuntimeError(
            "this process has run TensorFlow ops and cannot be forked: run them in a process of their own, "
            "tests.forked.result_of(function), or import tensorflow without running an op in a module's body"
        )


class Forked:
    """A running function, used like a subprocess.Popen with text pipes."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._polling = threading.Lock()  # of two threads that ask at once only one would learn of the end

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All further output, when the process has ended; kills it after ``timeout`` seconds."""
        watchdog = signal_after(self, timeout)
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        with watchdog:
            said = self.stdout.read()
            self.wait()
        return said, None


@contextlib.contextmanager
def signal_after(process: Forked, seconds: float | None) -> Iterator[None]:
    """Kills the process if the block takes longer than ``seconds``, and says so."""
    late: list[bool] = []
    with if_it_takes(seconds or 1e6, lambda: (late.append(True), process.kill())):
        yield
    if late:
        raise subprocess.TimeoutExpired(str(process.pid), seconds or 0.0)


def start(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str | None] = {}
) -> Forked:
    """Runs ``function(*arguments)`` in a fork of this process, whose output and errors are one pipe.

    ``environment`` is laid over that of this process; None takes a variable away.  An exception is printed,
    and the process ends with status 1.
    """
    refuse_with_runtime()
    stdin_read, stdin_write = os.pipe()
    stdout_read, stdout_write = os.pipe()
    sys.stdout.flush(), sys.stderr.flush()
    # A Ctrl-C comes later: what Python runs around a fork would print and forget it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if pid:
        os.close(stdin_read), os.close(stdout_write)
        process = Forked(pid, os.fdopen(stdin_write, "w"), os.fdopen(stdout_read))
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return process
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(stdin_write), os.close(stdout_read)
        become(stdin_read, stdout_write, environment)
        _run_and_exit(function, arguments)
    finally:
        os._exit(1)  # whatever happens, such as output that cannot be written: this is not the caller


def result_of(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str | None] = {}
) -> Any:
    """Run the function in a fork of this process and return its result; its exception is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        process = start(_answer, answer, function, arguments, environment=environment)
        said = process.communicate()[0]
        if not answer.exists():
            raise RuntimeError(f"the process of {function.__name__} ended with {process.returncode}:\n{said}")
        value, error = pickle.loads(answer.read_bytes())
    if error is not None:
        raise error from RuntimeError(said)
    return value


def _answer(file: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """In the child: writes what the function returns or raises."""
    try:
        answer = (function(*arguments), None)
    except BaseException as error:
        traceback.print_exc()
        answer = (None, _portable(error))
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(answer))
    unfinished.rename(file)


def _portable(error: BaseException) -> BaseException:
    """The error, or one with its text where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def become(stdin: int, stdout: int, environment: Mapping[str, str | None]) -> None:
    """In the child: these files are its standard ones, also for Python's print."""
    os.dup2(stdin, 0), os.dup2(stdout, 1), os.dup2(stdout, 2)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    apply_environment(environment)


def apply_environment(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _run_and_exit(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run it as a script: an exception is printed; what a script's end would wait for is not."""
    status = 0
    try:
        function(*arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def end_with_parent() -> None:
    """This process is killed when the thread that forked it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def as_script(function: Callable[..., Any], *arguments: Any) -> None:
    """Runs the function and ends this process as Python ends one that has run a script.

    For :func:`start`, whose processes just stop otherwise: here threads are joined, what was registered to
    run at the end runs, and the interpreter is taken down.
    """
    import ctypes

    status = 0
    try:
        function(*arguments)
    except (Exception, KeyboardInterrupt):
        traceback.print_exc()
        status = 1
    sys.stdout.flush(), sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(status)


def run_script(path: str | os.PathLike[str], folder: str | os.PathLike[str], *arguments: str) -> None:
    """Runs a Python script in a folder, as its own ``__main__``; for :func:`start`."""
    import runpy

    os.chdir(folder)
    sys.argv = [os.fspath(path), *arguments]
    runpy.run_path(os.fspath(path), run_name="__main__")


def in_a_new_python(function: Callable[[], Any], timeout_s: float = 300.0, **environment: str) -> None:
    """Runs a function of a test file where nothing is imported yet; fails with what it printed.

    For what is settled when TensorFlow or Keras is imported.  Takes five seconds of a core more than a fork.
    """
    module = ".".join(Path(function.__code__.co_filename).relative_to(ROOT).with_suffix("").parts)
    command = [sys.executable, "-c", f"import {module} as tests_of; tests_of.{function.__name__}()"]
    variables = os.environ | {"PYTHONPATH": f"{NEW_PYTHONS_PATH}{os.pathsep}{ROOT / 'tests' / 'graph'}"}
    variables |= environment
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=variables, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
