"""``tf-ooo doctor``: what is installed here, how it is, and what to do about each thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from tf_ooo.cli.checks import Finding

_STYLES = {"ok": "green", "absent": "yellow", "broken": "bold red"}


@click.command()
@click.option("--cluster", metavar="HOST:PORT,...", help="Also ask these addresses, of a pipeline's tasks. "
              "[default: what TF_OOO_CLUSTER says]")  # fmt: skip
@click.pass_context
def doctor(context: click.Context, cluster: str | None) -> None:
    """Look at versions, plug-in, GPUs, XLA, Horovod and ports, and say what to do about each.

    Ends with 1 if something that training needs is broken.  What is only absent, such as a GPU, is not.
    """
    from rich.console import Console

    from tf_ooo.cli import checks

    findings = list(checks.findings(cluster))
    console = Console(soft_wrap=True)
    console.print(table(findings))
    broken = [what for what, finding in findings if finding.state == "broken"]
    if broken:
        console.print(f"To be mended: {', '.join(broken)}")
        context.exit(1)
    console.print("Ready to train.")


def table(findings: Sequence[tuple[str, Finding]]) -> Table:
    """Return one row for each finding."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = ("what", "state", "found here", "what to do")
    rows = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for what, finding in findings:
        state = Text(finding.state, style=_STYLES[finding.state])
        rows.add_row(Text(what), state, Text(finding.fact), Text(finding.advice))
    return rows
