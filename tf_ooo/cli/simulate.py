"""``tf-ooo simulate``: how long a schedule takes and how much memory it needs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from tf_ooo.cli.inputs import LINK, SPEEDS, load_schedule, with_devices
from tf_ooo.cli.outputs import EXISTING, Outputs, picture_options, timeline_table
from tf_ooo.cli.plan_page import names_of, page_of_simulation
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import ScheduleError


@click.command()
@click.argument("schedule", type=EXISTING)
@click.argument("costs", type=EXISTING)
@click.option("--steps", type=click.IntRange(1), default=1, show_default=True,
              help="Training steps, one after the other.")  # fmt: skip
@click.option("--link", type=LINK,
              help="Between devices, such as 25Gbit or 10Gbit,20us; default: the table's.")  # fmt: skip
@click.option("--speeds", type=SPEEDS, metavar="NUMBERS",
              help="How fast each device is, such as 1,1,0.5; default: as the table says.")  # fmt: skip
@picture_options
def simulate(
    schedule: Path, costs: Path, steps: int, link: Link | None, speeds: tuple[float, ...] | None,
    **outputs: Any,
) -> None:  # fmt: skip
    """Run the SCHEDULE (text) on paper, with the COSTS (JSON) of its layers."""
    from tf_ooo.planning.simulation.simulator import simulate as run

    table, loaded = with_devices(CostTable.load(costs), link, speeds), load_schedule(schedule)
    try:
        timeline = run(loaded, table, steps=steps)
    except ScheduleError as error:
        raise ScheduleError(f"{schedule}: {error}") from error
    page = functools.partial(page_of_simulation, timeline, table.layers)
    names = names_of(table.layers)
    Outputs(**outputs).show(timeline, table=timeline_table(timeline), page=page, layers=names)
