"""Scripts that launchers start and that need not import TensorFlow: ``python as_fork.py SCRIPT ...``.

That program asks a process that has TensorFlow imported for a fork, in which the script runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from tests import forked

AS_FORK = str(Path(__file__).with_name("as_fork.py"))
VARIABLE = "TF_OOO_TESTS_FORKS"


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Yield the name that programs find in ``VARIABLE``; none of their scripts is left at the end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # an abstract name that nobody has
        listener.listen()
        server = forked.start(_serve, listener)
        try:
            yield listener.getsockname()[1:].decode()
        finally:
            server.kill()
            server.communicate()


def _serve(listener: socket.socket) -> None:
    forked.end_with_parent()
    while True:
        program, _ = listener.accept()
        if not os.fork():
            listener.close()
            _run(program)
        program.close()


def _run(program: socket.socket) -> None:
    """Runs the script of one program, until one of the two has ended."""
    forked.end_with_parent()
    request, files, *_ = socket.recv_fds(program, 1 << 20, 3)
    while not request.endswith(b"\n"):
        request += program.recv(1 << 20)
    (script, *arguments), variables = json.loads(request)
    pid = os.fork()
    if not pid:
        forked.end_with_parent()
        program.close()
        forked.become(files[0], files[1], dict.fromkeys(os.environ) | variables)
        forked.as_script(forked.run_script, script, os.getcwd(), *arguments)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, program], [], [])[0]:  # the program was killed
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        program.send(str(status).encode())
    os._exit(0)
