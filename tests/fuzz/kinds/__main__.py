"""``python -m tests.fuzz.kinds -n 300 --mode pipeline``: what users write themselves, drawn by chance."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import json
import logging
from collections import Counter, defaultdict
from pathlib import Path

import click

from tests.fuzz.__main__ import numbers_of
from tests.fuzz.drawing import MODES
from tests.fuzz.kinds.drawing import KINDS, drawn
from tests.fuzz.running import GOOD, REFUSED, SAID, Outcome
from tests.fuzz.worker import Worker

GOOD_KINDS = (GOOD, SAID, REFUSED)


@click.command()
@click.option("-n", "--count", default=60, show_default=True, help="How many set-ups.")
@click.option("--seed", default=1, show_default=True)
@click.option("--number", type=int, help="One set-up only, as named by what failed.")
@click.option("--mode", type=click.Choice(list(MODES)), default="single", show_default=True)
@click.option("--kind", help="Of this kind only.")
@click.option("--rows", type=click.Path(path_type=Path), help="Append a line of JSON for each; go on behind.")
@click.option("--show", is_flag=True, help="Print what each set-up said.")
def main(
    count: int, seed: int, number: int | None, mode: str, kind: str | None, rows: Path | None, show: bool
) -> None:
    """Trains random set-ups of what users write themselves, stock and with the callback.

    One device and data parallel must have the bits of stock (Horovod), or a report that says rounding.  A
    pipeline must train as stock up to rounding, which 64 bits tell apart; or refuse before a weight changes,
    or warn before the first step, in words that name what is not the same.
    """
    from tests.fuzz.kinds.judging import described, run  # imports TensorFlow, and runs no op

    logging.getLogger("tf_ooo").propagate = show
    worker = Worker(2 if mode == "pipeline" else 0, run)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    done = _done(rows, mode)
    for each in numbers_of(count, seed, number):
        setup = drawn(each, mode)
        if each in done or (kind and setup.kind != kind):
            continue
        outcome = worker.run(setup)
        counts[setup.kind][_class(outcome)] += 1
        if rows:
            line = {**described(setup), "outcome": outcome.kind, "text": outcome.text, "cpu_s": outcome.cpu_s}
            with rows.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if outcome.failed or show:
            again = f"python -m tests.fuzz.kinds --number {each} --mode {mode}"
            click.echo(f"{each}, {setup.title}: {outcome.kind}: {outcome.text}\nagain: {again}\n")
    worker.close()
    click.echo(table(counts))
    raise SystemExit(any(counts[kind]["failed"] for kind in counts))


def _done(rows: Path | None, mode: str) -> set[int]:
    if not rows or not rows.exists():
        return set()
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    return {line["number"] for line in lines if line["mode"] == mode}


def _class(outcome: Outcome) -> str:
    return outcome.kind if outcome.kind in GOOD_KINDS else "failed"


def table(counts: dict[str, Counter[str]]) -> str:
    """A row for each kind, as Markdown."""
    columns = (*GOOD_KINDS, "failed")
    lines = [f"| Kind | Set-ups | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    all_kinds = Counter[str]()
    for kind in KINDS:
        if counts[kind]:
            all_kinds += counts[kind]
            lines.append(_row(kind, counts[kind], columns))
    return "\n".join([*lines, _row("all", all_kinds, columns)])


def _row(title: str, counts: Counter[str], columns: tuple[str, ...]) -> str:
    return f"| {title} | {counts.total()} | {' | '.join(str(counts[column]) for column in columns)} |"


if __name__ == "__main__":
    main()
