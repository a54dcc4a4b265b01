"""The command ``python -m benchmarks``."""

import datetime
import importlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.cases import SUITES, Case, Runner, cases_of
from benchmarks.kept import ROWS, Row, compared, read, rows_of, write
from benchmarks.paper.command import paper
from benchmarks.planner import planner
from benchmarks.processes import BenchmarkError, end_cleanly

ALL, _PATH = "all", click.Path(path_type=Path)


@click.group()
def main() -> None:
    """Run benchmarks in turns, keep every turn, and make the page of what they came to."""


@main.command()
@click.argument("what", metavar="SUITE", type=click.Choice((*SUITES, ALL)))
@click.option("--quick", is_flag=True, help="Run a few cases of each suite, in under five minutes.")
@click.option("--case", "only", multiple=True,
              help="Run only the case of this name, or else those whose names have this text.")  # fmt: skip
@click.option("--turns", type=click.IntRange(1), help="Run each way so many times.  [default: the case's]")
@click.option("--rows", "folder", type=_PATH, default=ROWS, show_default="benchmarks/rows",
              help="Keep the rows in this folder.")  # fmt: skip
def run(what: str, quick: bool, only: tuple[str, ...], turns: int | None, folder: Path) -> None:
    """Run the cases of a suite, or of all; a case that cannot run here says why and is skipped."""
    end_cleanly()
    suites, failed = SUITES if what == ALL else [what], []
    cases = [(suite, case) for suite in suites for case in cases_of(suite, quick)]
    chosen = [(suite, case) for suite, case in cases if not only or case.name in only]
    chosen = chosen or [(suite, case) for suite, case in cases if any(text in case.name for text in only)]
    if not chosen:
        asked, names = " or ".join(map(repr, only)), "; ".join(case.name for _, case in cases)
        raise click.ClickException(f"no case of {what} has {asked} in its name; there are: {names}")
    for number, (suite, case) in enumerate(chosen, 1):
        click.echo(f"{suite}, {number} of {len(chosen)}: {case.name}")
        try:
            run_case(suite, case, turns, folder)
        except BenchmarkError as error:
            click.echo(f"    failed: {error}")
            failed.append(case.name)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


def run_case(suite: str, case: Case, turns: int | None, folder: Path) -> None:
    """Run one case, keep its rows and print them."""
    runner: Runner = importlib.import_module(f"benchmarks.runners.{case.runner}")
    if reason := runner.why_not(case):
        click.echo(f"    skipped: {reason}")
        return
    case = replace(case, turns=turns or case.turns)
    began, since_s = datetime.datetime.now(datetime.UTC), time.monotonic()
    measured = runner.run(case)
    for name, why in measured.not_run.items():
        click.echo(f"    {name} did not run: {why}")
    rows = rows_of(suite, case, measured, began)
    path = write(rows, folder, began)
    for line in lines_of(rows):
        click.echo(f"    {line}")
    click.echo(f"    {time.monotonic() - since_s:.0f} s, kept in {path}")


@main.command()
@click.option("--rows", "folder", type=_PATH, default=ROWS, show_default="benchmarks/rows",
              help="Read the rows of this folder.")  # fmt: skip
@click.option("--page", "pages", multiple=True, type=click.Path(path_type=Path, exists=True),
              help="Make the tables of this Markdown file anew.")  # fmt: skip
@click.option("--pictures", type=_PATH, help="Draw the pictures into this folder.")
def report(folder: Path, pages: tuple[Path, ...], pictures: Path | None) -> None:
    """Say what kept rows come to: tables here or in pages, and pictures."""
    from benchmarks.report.tables import tables_of, with_tables  # pandas takes a second to import

    rows = read(folder)
    if not rows:
        raise click.ClickException(f"no rows are kept in {folder}: run a suite first")
    tables = tables_of(rows)
    for page in pages:
        page.write_text(with_tables(page.read_text(), tables))
    for name, table in {} if pages else tables.items():
        click.echo(f"## {name}\n\n{table}")
    if pictures:
        from benchmarks.report.pictures import draw

        draw(rows, pictures)


def lines_of(rows: list[Row]) -> Iterator[str]:
    """Say what each way came to, and ours beside the strongest baseline."""
    for row in sorted(rows, key=lambda row: row.median_s):
        middle, low, high = (1e3 * of for of in (row.median_s, min(row.turns_s), max(row.turns_s)))
        predicted = f", predicted {row.predicted_s * 1e3:.1f}" if row.predicted_s else ""
        bits = f", bits: {row.bits}" if row.bits else ""
        yield f"{row.way:<28} {middle:9.1f} ms ({low:.1f} to {high:.1f}){predicted}{bits}; {row.had_by}"
    for ours, baseline, gain in compared(rows):
        yield f"{ours.way} is {gain.text(3)} times as fast as {baseline.way}: {gain.verdict}"


main.add_command(paper)
main.add_command(planner)

if __name__ == "__main__":
    main()
