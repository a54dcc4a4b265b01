"""A process that is told what to do line by line, and answers each line."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, cast

# What begins an answer; a process may print other lines too.
ANSWER = "ANSWER "
_END_S = 20.0


def answer(text: str) -> None:
    """Answers; called by the process itself."""
    print(ANSWER + text, flush=True)


class LineProcess:
    """The other end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self._lines = cast("IO[str]", self._process.stdin)
        self._printed = cast("IO[str]", self._process.stdout)

    def tell(self, line: str) -> None:
        """Sends a line.  BrokenPipeError where the process has ended."""
        self._lines.write(line + "\n")
        self._lines.flush()

    def answered(self) -> str:
        """Waits for the next answer.  RuntimeError where the process has ended."""
        for line in self._printed:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
        raise RuntimeError(f"the process ended with {self._process.wait()}")

    def close(self) -> None:
        """Ends the process: no more lines come; one that goes on is killed."""
        with suppress(BrokenPipeError):  # what a process that has ended was told last
            self._lines.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()
