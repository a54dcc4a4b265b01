"""The command line that all random tests have, such as ``python -m tests.fuzz -n 100 --seed 1``."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tests.harness.children import PASSING, Children, Outcome
from tests.harness.drawing import Cases

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# So many numbers belong to a seed.
NUMBERS = 10**6
COUNTED_EVERY = 20


@dataclass(frozen=True)
class Harness:
    """One kind of random tests.

    Attributes:
        module: what ``python -m`` runs.
        about: what the cases are, and what must hold.
        cases: those of a mode, drawn from numbers.
        children: run the cases of a mode, as many at a time as it is told.
        group: the row of the table in which a case is counted.
        modes: the first is the usual one.
        shown: a case as text.
        by_number: children are told the number only, as a case cannot be sent to them.
        shrinks: a case that fails is made simpler, as it is run quickly.
        passing: kinds of outcomes that are none of a fault.
        goal: the share of the cases that must pass.
        jobs: how many run at a time unless the command says otherwise.
    """

    module: str
    about: str
    cases: Callable[[str], Cases[Any]]
    children: Callable[[str, int], Children]
    group: Callable[[Any], str]
    modes: tuple[str, ...] = ("",)
    shown: Callable[[Any], str] = str
    by_number: bool = False
    shrinks: bool = False
    passing: tuple[str, ...] = PASSING
    goal: float = 1.0
    jobs: int = 1

    def command(self) -> click.Command:
        """Click's command, for a ``main``."""

        @click.command(help=self.about)
        @click.option("-n", "--count", default=100, show_default=True, help="How many cases.")
        @click.option("--seed", default=1, show_default=True, help="Which.")
        @click.option("--number", type=int, help="One case only, as named by what failed.")
        @click.option("--mode", type=click.Choice(self.modes), default=self.modes[0], show_default=True)
        @click.option("--only", default="", help="Those in whose row of the table this stands.")
        @click.option("--jobs", default=self.jobs, show_default=True, help="How many run side by side.")
        @click.option("--keep-going", is_flag=True, help="Do not stop at the first that fails.")
        @click.option("--show", is_flag=True, help="Print each case and its outcome.")
        @click.option("--table", type=click.Path(path_type=Path), help="The table is written there, too.")
        def main(count: int, seed: int, number: int | None, **options: Any) -> None:
            numbers = range(seed * NUMBERS, seed * NUMBERS + count)
            run = _Run(self, **options)
            raise SystemExit(run.all(numbers if number is None else range(number, number + 1)))

        return main


class _Run:
    """One call of the command."""

    def __init__(
        self,
        harness: Harness,
        mode: str,
        only: str,
        jobs: int,
        keep_going: bool,
        show: bool,
        table: Path | None,
    ) -> None:
        self._harness, self._mode, self._only, self._file = harness, mode, only, table
        self._keep_going, self._show = keep_going, show
        self._cases, self._children = harness.cases(mode), harness.children(mode, jobs)
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    def all(self, numbers: range) -> int:
        """Runs the cases of these numbers, and prints the table; 0 where enough have passed."""
        _import_once()
        status = 130
        try:
            self._outcomes(numbers)
            status = int(self._failed > (1 - self._harness.goal) * self._total)
        except KeyboardInterrupt:
            click.echo("interrupted")
        finally:
            self._children.close()
        click.echo(f"{self._table()}\n{self._sum()}")
        return status

    @property
    def _total(self) -> int:
        return sum(count.total() for count in self._counts.values())

    @property
    def _failed(self) -> int:
        kinds = sum(self._counts.values(), Counter[str]())
        return sum(times for kind, times in kinds.items() if kind not in self._harness.passing)

    def _sum(self) -> str:
        return f"{self._total} cases run, {self._failed} failed"

    def _outcomes(self, numbers: range) -> None:
        with contextlib.closing(self._children.outcomes(self._tasks(numbers))) as outcomes:
            for number, outcome in outcomes:
                failed = outcome.kind not in self._harness.passing
                self._count(number, outcome, failed)
                if failed and not self._keep_going:
                    return

    def _tasks(self, numbers: range) -> Iterator[tuple[int, Any]]:
        """The chosen numbers, each with what a child is told."""
        for number in numbers:
            case = self._cases.drawn(number)
            if self._only in self._harness.group(case):
                yield number, number if self._harness.by_number else case

    def _count(self, number: int, outcome: Outcome, failed: bool) -> None:
        case = self._cases.drawn(number)
        self._counts[self._harness.group(case)][outcome.kind] += 1
        if failed or self._show:
            click.echo(f"{number}: {self._harness.shown(case)}\n  {outcome.kind}: {outcome.text}")
        if failed:
            mode = f" --mode {self._mode}" if self._mode != self._harness.modes[0] else ""
            click.echo(f"again: python -m {self._harness.module} --number {number}{mode}")
        if failed and self._harness.shrinks:
            self._explain(number, outcome)
        if self._file:
            self._file.write_text(self._table() + "\n")
        if not self._total % COUNTED_EVERY:
            click.echo(self._sum())

    def _explain(self, number: int, outcome: Outcome) -> None:
        """Prints the simplest case that fails in the same way."""
        smallest = self._cases.minimal(number, lambda case: self._children.run(case).kind == outcome.kind)
        click.echo(f"minimal:\n{self._harness.shown(smallest)}\n")

    def _table(self) -> str:
        """Markdown: a row for each group of cases and one for all, a column for each kind of outcome."""
        all_kinds = sum(self._counts.values(), Counter[str]())
        kinds = sorted(all_kinds, key=lambda kind: (kind not in self._harness.passing, kind))
        lines = [f"| Group | Cases | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
        for group, count in [*sorted(self._counts.items()), ("all", all_kinds)]:
            lines.append(f"| {group} | {count.total()} | {' | '.join(str(count[kind]) for kind in kinds)} |")
        return "\n".join(lines)


def _import_once() -> None:
    """Imports what all children need, which are forked from this process, without running an op."""
    import keras
    import tensorflow  # noqa: F401

    if not hasattr(keras, "ops"):
        raise click.UsageError(f"the cases are for Keras 3, this is Keras {keras.__version__}")
    log = logging.getLogger("tf_ooo")
    log.addHandler(logging.NullHandler())
    log.propagate = False  # or each refusal would be printed twice
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
