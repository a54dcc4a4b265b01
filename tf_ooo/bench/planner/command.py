"""The commands ``tf-ooo bench planner ...``."""

from __future__ import annotations

import click

from tf_ooo.bench.planner import deep, layerpipe, ooo, quality, scale, zero_bubble


@click.group("planner")
def planner() -> None:
    """Predictions beside published figures and exact optima; nothing is trained."""


for _command in (
    zero_bubble.zero_bubble,
    zero_bubble.zb_v,
    ooo.main,
    layerpipe.main,
    quality.main,
    scale.main,
    deep.main,
):
    planner.add_command(_command)
