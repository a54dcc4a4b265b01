"""The commands ``tf-ooo bench planner ...``."""

from __future__ import annotations

import click

from tf_ooo.bench.planner import layerpipe, ooo, quality, scale, zb_v, zero_bubble


@click.group("planner")
def planner() -> None:
    """What is planned on paper, beside published figures, exact optima and limits; nothing is trained."""


for _module in (zero_bubble, zb_v, ooo, layerpipe, quality, scale):
    planner.add_command(_module.main)
