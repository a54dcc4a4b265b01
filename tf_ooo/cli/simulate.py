"""``tf-ooo simulate``: how long a schedule takes and how much memory it needs."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from tf_ooo.cli.inputs import LINK, load_schedule, load_table
from tf_ooo.cli.outputs import (
    picture_options,
    print_files,
    print_grid,
    print_json,
    timeline_facts,
    timeline_table,
    write_pictures,
)
from tf_ooo.costs.layer_costs import Link

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("schedule", type=_EXISTING)
@click.argument("costs", type=_EXISTING)
@click.option("--steps", type=click.IntRange(1), default=1, show_default=True,
              help="Training steps, one after the other.")  # fmt: skip
@click.option(
    "--link", type=LINK, help="Between devices, such as 25Gbit or 10Gbit,20us; default: the table's."
)
@picture_options
def simulate(
    schedule: Path, costs: Path, steps: int, link: Link | None, html: Path | None, png: Path | None,
    trace: Path | None, grid: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run the SCHEDULE (text) on paper, with the COSTS (JSON) of its layers."""
    from tf_ooo.planning.simulation.simulator import simulate as run

    timeline = run(load_schedule(schedule), load_table(costs, link), steps=steps)
    files = write_pictures(timeline, html, png, trace)
    if as_json:
        print_json({**timeline_facts(timeline), "files": list(map(str, files))})
        return
    console = Console(soft_wrap=True)
    console.print(timeline_table(timeline))
    if grid:
        print_grid(console, timeline)
    print_files(console, files)
