"""Keeps why rewrites of a step failed, and what is raised for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tf_ooo.errors import BackendError, MemoryLimitError, OOOError


def in_one_line(error: BaseException) -> str:
    """Return its type, and its text if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(frozen=True)
class Failures:
    """The errors of a step's rewrites, in their order; ``errors`` grows while steps are traced.

    ``reason_of`` is an error as the report shows it; ``what`` begins the message of errors that are not our
    own; ``refused``: for which errors the step does not run.
    """

    errors: list[BaseException] = field(default_factory=list)
    reason_of: Callable[[BaseException], str] = in_one_line
    what: str = "the rewrite failed"
    refused: tuple[type[BaseException], ...] = (MemoryLimitError,)

    @property
    def first(self) -> BaseException | None:
        return self.errors[0] if self.errors else None

    @property
    def reason(self) -> str | None:
        return self.reason_of(self.errors[0]) if self.errors else None

    def raise_refused(self) -> None:
        """Raises the error for which the step did not run, such as a MemoryLimitError, if there is one."""
        for error in self.errors:
            if isinstance(error, self.refused):
                raise error

    def raise_first(self, strict: bool = True) -> None:
        """Raises an interrupt (once) or why a step was refused; the first other error if ``strict``.

        To be called after the step has run: TensorFlow would swallow what is raised while it traces.
        """
        for error in list(self.errors):
            if not isinstance(error, Exception):
                self.errors.remove(error)
                raise error
        self.raise_refused()
        if not strict or self.first is None:
            return
        if isinstance(self.first, OOOError):
            raise self.first
        raise BackendError(f"{self.what}: {self.reason}") from self.first
