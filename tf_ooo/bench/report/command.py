"""The command ``tf-ooo bench report``."""

from __future__ import annotations

from pathlib import Path

import click

from tf_ooo.bench.report.figures import KINDS, figures_of, looked_up
from tf_ooo.bench.report.page import with_tables
from tf_ooo.bench.report.pictures import save_gains
from tf_ooo.bench.report.reading import runs_in
from tf_ooo.bench.report.tables import ALL_OF, tables_of
from tf_ooo.bench.shared.options import EXISTING_FILE, FOLDER
from tf_ooo.errors import OptionsError

ROWS = Path("docs/benchmarks/rows")


@click.command("report")
@click.option("--rows", type=FOLDER, default=ROWS, show_default=True, help="Folder of runs that were kept.")
@click.option("--page", "pages", type=EXISTING_FILE, multiple=True,
              help="Markdown file in which tables are put where their names stand, several times for "
                   "several; without it the short ones are printed.")  # fmt: skip
@click.option("--pictures", type=FOLDER, help="Folder for a picture of each table.")
def report(rows: Path, pages: tuple[Path, ...], pictures: Path | None) -> None:
    """Tables of all runs that were kept: n runs, min / median / max."""
    try:
        runs = runs_in(rows)
        tables = tables_of(runs)
        for page in pages:
            page.write_text(with_tables(page.read_text(), tables))
    except OptionsError as error:
        raise click.ClickException(str(error)) from None
    if not pages:
        for name, table in tables.items():
            if not name.startswith(ALL_OF):
                click.echo(f"## {name}\n\n{table}\n")
    if pictures:
        pictures.mkdir(parents=True, exist_ok=True)
        for kind in KINDS:
            if lines := looked_up(kind, figures_of(kind, runs)):
                newest = [settings[-1] for settings in lines]
                save_gains(kind, newest, pictures / f"{kind.name.replace(' ', '_')}.png")
