"""``python -m tests.fuzz -n 2000 --seed 7``: random set-ups, and a minimal program for one that fails."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections import Counter

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzz.changes import minimal
from tests.fuzz.drawing import MODES, drawn
from tests.fuzz.program import program
from tests.fuzz.running import REFUSED, Outcome
from tests.fuzz.setups import Setup
from tests.fuzz.several import MOST_DEVICES
from tests.fuzz.worker import Worker

# So many numbers belong to a seed.
NUMBERS = 10**6
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[counts]}"),
)


def numbers_of(count: int, seed: int, number: int | None) -> range:
    """Return the numbers to run: one, or the first so many of a seed."""
    if number is not None:
        return range(number, number + 1)
    return range(seed * NUMBERS, seed * NUMBERS + count)


@click.command()
@click.option("-n", "--count", default=100, show_default=True, help="How many set-ups.")
@click.option("--seed", default=1, show_default=True, help="Which; the suite's are the first 60 of seed 0.")
@click.option("--number", type=int, help="One set-up only, as named by what failed.")
@click.option("--mode", type=click.Choice(list(MODES)), default="single", show_default=True)
@click.option("--keep-going", is_flag=True, help="Do not stop at the first that fails.")
def main(count: int, seed: int, number: int | None, mode: str, keep_going: bool) -> None:
    """Trains random set-ups stock and rewritten, and compares the bits.

    Pipelines are compared by two schedules; in data parallel two ranks with stock Horovod.
    """
    import keras  # once, before any fork
    import tensorflow  # noqa: F401

    if not hasattr(keras, "ops"):
        raise click.UsageError(f"set-ups are programs for Keras 3, this is Keras {keras.__version__}")
    console = Console(width=None if os.isatty(1) else 200, soft_wrap=True)
    worker = Worker(MOST_DEVICES if mode == "pipeline" else 0)
    counts = Counter[str]()
    with Progress(*COLUMNS, console=console) as progress:
        numbers = numbers_of(count, seed, number)
        task = progress.add_task("set-ups", total=len(numbers), counts="")
        for each in numbers:
            setup = drawn(each, mode)
            outcome = worker.run(setup)
            counts[outcome.kind] += 1
            if outcome.kind == REFUSED:
                said = outcome.text.partition("\n")[0]
                console.print(f"set-up {each} is refused: {said}", markup=False, highlight=False)
            if outcome.failed:
                _explain(console, worker, setup, outcome)
            shown = ", ".join(f"{kind}: {times}" for kind, times in counts.items())
            progress.update(task, advance=1, counts=shown)
            if not console.is_terminal and counts.total() % 20 == 0:
                console.print(f"{counts.total()} run: {shown}")
            if outcome.failed and not keep_going:
                break
    worker.close()
    failed = sum(times for kind, times in counts.items() if Outcome(kind).failed)
    console.print(f"{counts.total()} set-ups run, {failed} failed ({dict(counts)})")
    raise SystemExit(1 if failed else 0)


def _explain(console: Console, worker: Worker, setup: Setup, outcome: Outcome) -> None:
    """Prints what failed, and the simplest program that fails in the same way."""
    mode = "" if setup.mode == "single" else f" --mode {setup.mode}"
    again = f"python -m tests.fuzz --number {setup.number}{mode}"
    console.print(f"\nset-up {setup.number}: {outcome.text}\nagain: {again}", markup=False, highlight=False)
    runs: list[Setup] = []

    def same_fault(candidate: Setup) -> bool:
        runs.append(candidate)
        return worker.run(candidate).kind == outcome.kind

    smallest = minimal(setup, same_fault)
    console.print(f"minimal after {len(runs)} trials:\n", markup=False, highlight=False)
    console.print(program(smallest), markup=False, highlight=False)


if __name__ == "__main__":
    main()
