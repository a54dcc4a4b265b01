"""The commands ``tf-ooo bench planner ...``."""

from __future__ import annotations

import click

from tf_ooo.bench.planner import layerpipe, ooo, quality, scale, zb_v, zero_bubble


@click.group("planner")
def planner() -> None:
    """Predictions beside published figures and exact optima; nothing is trained."""


for _module in (zero_bubble, zb_v, ooo, layerpipe, quality, scale):
    planner.add_command(_module.main)
