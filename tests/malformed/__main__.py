"""``python -m tests.malformed -n 300 --seed 1``: random malformed inputs, and what is said of them."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import logging
from collections import Counter, defaultdict

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.fuzz.__main__ import COLUMNS, numbers_of
from tests.fuzz.running import Outcome
from tests.fuzz.worker import Worker
from tests.malformed.drawing import AREAS, area_of, drawn
from tests.malformed.running import GOOD, run

DEVICES = 2


class Workers:
    """A process for what needs a cluster, which it starts before TensorFlow runs; one for all else."""

    def __init__(self) -> None:
        self._workers: defaultdict[bool, Worker] = defaultdict(lambda: Worker(DEVICES, run))

    def run(self, number: int) -> Outcome:
        return self._workers[area_of(number) == "ports"].run(number)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


@click.command()
@click.option("-n", "--count", default=100, show_default=True, help="How many inputs.")
@click.option("--seed", default=1, show_default=True, help="Which; the suite's are of seed 0.")
@click.option("--number", type=int, help="One input only, as named by what failed.")
@click.option("--area", type=click.Choice(list(AREAS)), help="Only these.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first that fails.")
@click.option("--show", is_flag=True, help="Print each input and what was said.")
def main(count: int, seed: int, number: int | None, area: str | None, keep_going: bool, show: bool) -> None:
    """Gives random malformed inputs: each must be refused in a clear line, or work, and nothing be lost."""
    import keras  # once, before any fork
    import tensorflow  # noqa: F401

    if not hasattr(keras, "ops"):
        raise click.UsageError(f"models are for Keras 3, this is Keras {keras.__version__}")
    logging.disable(logging.ERROR)
    console = Console(width=None if os.isatty(1) else 200, soft_wrap=True)
    numbers = [each for each in numbers_of(count, seed, number) if area in (None, area_of(each))]
    workers, counts = Workers(), Counter[tuple[str, str]]()
    with Progress(*COLUMNS, console=console) as progress:
        task = progress.add_task("inputs", total=len(numbers), counts="")
        for each in numbers:
            outcome = workers.run(each)
            failed = outcome.kind not in GOOD
            counts[area_of(each), "failed" if failed else outcome.kind] += 1
            if failed or show:
                _explain(console, each, outcome)
            progress.update(task, advance=1, counts=f"{_failed(counts)} failed")
            if failed and not keep_going:
                break
    workers.close()
    console.print(_table(counts))
    console.print(f"{counts.total()} inputs tried, {_failed(counts)} failed")
    raise SystemExit(1 if _failed(counts) else 0)


def _failed(counts: Counter[tuple[str, str]]) -> int:
    return sum(times for (_, kind), times in counts.items() if kind == "failed")


def _explain(console: Console, number: int, outcome: Outcome) -> None:
    text = f"\n{number}: {drawn(number).text}\n  {outcome.kind}: {outcome.text}"
    if outcome.kind not in GOOD:
        text += f"\nagain: python -m tests.malformed --number {number}"
    console.print(text, markup=False, highlight=False)


def _table(counts: Counter[tuple[str, str]]) -> Table:
    kinds = (*GOOD, "failed")
    table = Table("area", *kinds)
    for area in AREAS:
        table.add_row(area, *(str(counts[area, kind]) for kind in kinds))
    return table


if __name__ == "__main__":
    main()
