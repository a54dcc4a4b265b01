"""Runs cases in child processes, which may hang or die, and are renewed before they grow large."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests import forked, launches
from tests.answering import Answering
from tests.processes import make_devices

RENEWED_AFTER = 100
LIMIT_S = 300.0
PASSING = ("good", "said", "refused", "accepted", "stock refuses it", "went on", "not struck", "killed")


@dataclass(frozen=True)
class Outcome:
    """Says what came of a case: two outcomes of one kind that fail are taken for one fault."""

    kind: str
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.kind not in PASSING


@dataclass(frozen=True)
class Setting:
    """Says what process a case needs.

    Attributes:
        devices: its logical CPUs; 0: as TensorFlow has them.
        engine: two ranks run the case, launched for ``"horovod"`` or ``"collectives"``; else one process.
        variables: of the environment.
        name: tells apart what is the same otherwise.
    """

    devices: int = 0
    engine: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    name: str = ""


class Child:
    """Runs the cases of one setting, one after another."""

    def __init__(self, function: Callable[[Any], Outcome], setting: Setting) -> None:
        self.setting, self.runs, self.key = setting, 0, None
        stack = contextlib.ExitStack()
        environments: list[dict[str, str | None]] = [{}]
        if setting.engine:
            engines = "both" if setting.engine == "collectives" else "horovod"
            environments = stack.enter_context(launches.environments(engines, 2))
        environments = [{**own, **dict(setting.variables)} for own in environments]
        self.processes = Answering(
            lambda rank: _prepared(function, setting), environments, lambda answer: not answer.failed, stack
        )

    def begin(self, key: Any, case: Any, limit_s: float) -> None:
        self.key = key
        self.runs += 1
        self.processes.ask(case, limit_s)

    def outcome(self) -> Outcome | None:
        """The first that failed, or rank 0's; None while one runs."""
        outcomes = self.processes.answers()
        if outcomes is None:
            return None
        first = next((outcome for outcome in outcomes.values() if outcome.failed), outcomes[0])
        return Outcome(first.kind, first.text)


class Children:
    """Runs cases by a function, ``jobs`` of them at a time, each in a process that is as its setting says."""

    def __init__(
        self,
        function: Callable[[Any], Outcome],
        setting_of: Callable[[Any], Setting] = lambda case: Setting(),
        jobs: int = 1,
        limit_s: Callable[[Any], float] = lambda case: LIMIT_S,
        renewed_after: int | None = None,
        stack: contextlib.ExitStack | None = None,
    ) -> None:
        """``stack`` is closed with the children."""
        self._function, self._setting_of, self._limit_s = function, setting_of, limit_s
        self._jobs, self._renewed_after = jobs, renewed_after
        self._stack = stack or contextlib.ExitStack()
        self._free: list[Child] = []

    def run(self, case: Any) -> Outcome:
        ((_, outcome),) = self.outcomes([(None, case)])
        return outcome

    def outcomes(self, cases: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Outcome]]:
        """From pairs of a key and a case: each key with its outcome, in the order in which they end."""
        left, busy = iter(cases), list[Child]()
        try:
            while True:
                while len(busy) < self._jobs and (pair := next(left, None)):
                    busy.append(self._child(self._setting_of(pair[1])))
                    busy[-1].begin(*pair, self._limit_s(pair[1]))
                if not busy:
                    return
                for child in list(busy):
                    outcome = child.outcome()
                    if outcome is not None:
                        busy.remove(child)
                        self._give_back(child, outcome)
                        yield child.key, outcome
        except (KeyboardInterrupt, GeneratorExit):
            for child in busy:
                child.processes.interrupt()
            raise
        finally:
            for child in busy:
                child.processes.end()

    def _child(self, setting: Setting) -> Child:
        fitting = next((child for child in self._free if child.setting == setting), None)
        if fitting is None:
            return Child(self._function, setting)
        self._free.remove(fitting)
        return fitting

    def _give_back(self, child: Child, outcome: Outcome) -> None:
        """Keeps it for the next case of its setting, unless it is broken or has grown large."""
        broken = outcome.kind in ("dies", "hangs") or (outcome.failed and child.setting.engine)
        if broken or child.runs >= (self._renewed_after or RENEWED_AFTER):
            child.processes.end()
            return
        self._free.append(child)
        if len(self._free) > self._jobs + 1:
            self._free.pop(0).processes.end()

    def close(self) -> None:
        for child in self._free:
            child.processes.end()
        self._free = []
        self._stack.close()


def _prepared(function: Callable[[Any], Outcome], setting: Setting) -> Callable[[Any], Outcome]:
    """In the child, before the first op: TensorFlow's collectives must be set up first."""
    forked.end_with_parent()
    warnings.simplefilter("ignore")
    make_devices(setting.devices)
    if setting.engine:
        from tf_ooo import data_parallel

        data_parallel.connect(setting.engine)
    gc.collect()
    gc.freeze()  # or all that is imported is looked through whenever a session is cleared
    return function
