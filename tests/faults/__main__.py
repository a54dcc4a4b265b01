"""``python -m tests.faults -n 500 --seed 1``: random faults, counted by mode and kind."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contextlib
import gc
import importlib
import multiprocessing
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from tests import forked
from tests.faults.drawing import drawn
from tests.faults.running import Outcome, own_folder, run
from tests.faults.setups import MODES, Setup
from tests.fuzz.__main__ import COLUMNS, numbers_of

# In each process that runs set-ups.
_INTERRUPTED = threading.Event()
# The table has these headings, each with the outcomes that it counts.
FAILURES = {
    "hangs": ("hangs", "left behind"),
    "unreadable": ("unreadable",),
    "other bits": ("other bits",),
    "other failures": ("crashes", "does not go on", "no reference", "no small disk", "broken"),
}


@click.command()
@click.option("-n", "--count", default=100, show_default=True, help="How many set-ups.")
@click.option("--seed", default=1, show_default=True, help="Which.")
@click.option("--number", type=int, help="One set-up only, as named by what failed.")
@click.option("--mode", type=click.Choice([*MODES]), help="Of this mode only.")
@click.option("--jobs", default=2, show_default=True, help="How many run side by side.")
@click.option("--minutes", type=float, help="No other is started after so long.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first that fails.")
@click.option("--table", type=click.Path(), help="The table is written there, too.")
def main(
    count: int,
    seed: int,
    number: int | None,
    mode: str | None,
    jobs: int,
    minutes: float | None,
    keep_going: bool,
    table: str | None,
) -> None:
    """Strikes trainings: each ends in time, leaves whole checkpoints, and goes on to the same bits."""
    import keras  # once, before any fork

    if not hasattr(keras, "ops"):
        raise click.UsageError(f"backups are those of Keras 3, this is Keras {keras.__version__}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    console = Console(width=None if os.isatty(1) else 200, soft_wrap=True)
    setups = [drawn(each, mode) for each in numbers_of(count, seed, number)]
    _import_everything()
    outcomes: list[tuple[Setup, Outcome]] = []
    interrupted = False
    until = time.monotonic() + (minutes or 1e6) * 60
    with Progress(*COLUMNS, console=console) as progress, own_folder() as references:
        task = progress.add_task("faults", total=len(setups), counts="")
        try:
            for setup, outcome in _outcomes(setups, references, jobs, until):
                outcomes.append((setup, outcome))
                failed = sum(each.failed for _, each in outcomes)
                progress.update(task, advance=1, counts=f"{failed} failed")
                if outcome.failed or number is not None:
                    _explain(console, setup, outcome)
                if table is not None:
                    Path(table).write_text("\n".join(table_of(outcomes)) + "\n")
                if outcome.failed and not keep_going:
                    break
        except KeyboardInterrupt:
            interrupted = True
    console.print("\n".join(table_of(outcomes)), markup=False, highlight=False)
    raise SystemExit(130 if interrupted else int(any(outcome.failed for _, outcome in outcomes)))


def _import_everything() -> None:
    """Import what a training needs, without running an op; forks do not collect what is there now."""
    for name in ("single_device", "data_parallel", "pipeline", "layerpipe"):
        importlib.import_module(f"tf_ooo.modes.{name}.fit")
    for name in ("tf_ooo.cli.worker", "tf_ooo.modes.replicated", "tf_ooo.modes.compiled.session"):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("horovod.tensorflow")
    gc.collect()
    gc.freeze()


def _begin_apart() -> None:
    """Begin a process that runs set-ups: Ctrl-C does not reach it by itself, and so comes once."""
    forked.end_with_parent()
    os.setpgid(0, 0)


def _run(setup: Setup, references: Path) -> Outcome:
    """Nothing any more after a Ctrl-C: a pool cannot take back what it has given to a process to run next."""
    if _INTERRUPTED.is_set():
        raise KeyboardInterrupt
    try:
        return run(setup, references)
    except KeyboardInterrupt:
        _INTERRUPTED.set()
        raise


def _outcomes(
    setups: list[Setup], references: Path, jobs: int, until: float
) -> Iterator[tuple[Setup, Outcome]]:
    """In the order in which they end; those that have not begun by then are left out."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(jobs, len(setups)), context, _begin_apart) as pool:
        running = {pool.submit(_run, setup, references): setup for setup in setups}
        try:
            while running:
                for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                    setup = running.pop(future)
                    if not future.cancelled():
                        yield setup, future.result()
                if time.monotonic() > until:
                    for future in running:
                        future.cancel()
        except (KeyboardInterrupt, GeneratorExit):
            for process in multiprocessing.active_children():
                os.kill(process.pid or 0, signal.SIGINT)  # they remove what they have mounted and started
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _explain(console: Console, setup: Setup, outcome: Outcome) -> None:
    training, fault = setup.training, setup.fault
    again = f"python -m tests.faults --number {setup.number} --mode {training.mode}"
    text = f"\n{outcome.kind}: {fault}\nin {training}\nagain: {again}\n{outcome.text}"
    console.print(text, markup=False, highlight=False)


def table_of(outcomes: list[tuple[Setup, Outcome]]) -> list[str]:
    """Markdown: a row for each mode and kind of fault, and one of all."""
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for setup, outcome in outcomes:
        rows[setup.training.mode, setup.fault.kind].append(outcome)
    lines = [
        f"| Mode | Fault | Runs | Struck | Went on | Ended within (s) | {' | '.join(FAILURES)} |",
        f"|{'---|' * (6 + len(FAILURES))}",
    ]
    for (mode, kind), some in sorted(rows.items()):
        lines.append(_row(f"`{mode}`", kind, some))
    return [*lines, _row("all", "", [outcome for _, outcome in outcomes])]


def _row(mode: str, kind: str, outcomes: list[Outcome]) -> str:
    longest = max((outcome.ended_s for outcome in outcomes if not outcome.went_on), default=0.0)
    failures = [sum(outcome.kind in kinds for outcome in outcomes) for kinds in FAILURES.values()]
    struck, went_on = sum(o.struck for o in outcomes), sum(o.went_on for o in outcomes)
    cells = [mode, kind.replace("_", " "), len(outcomes), struck, went_on, f"{longest:.1f}", *failures]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
