"""Defines ``tf-ooo info`` and ``tf-ooo demo``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tf_ooo.planning.policies import BACKWARD_ORDERS
from tf_ooo.version import __version__


@click.command()
def info() -> None:
    """Show versions, devices and whether the plug-in loads."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for what, value in _facts():
        table.add_row(what, value)
    Console(soft_wrap=True).print(table)


def _facts() -> list[tuple[str, str]]:
    from grappler_passes import plugin
    from tf_ooo.compat import versions

    versions.check_versions()
    import tensorflow as tf

    keras = versions.user_keras()

    try:
        plugin.load()
        state = f"loaded for {', '.join(plugin.loaded())}"
    except plugin.PluginError as error:
        state = f"not loaded: {error}"
    return [
        ("tf_ooo", __version__),
        ("Python", sys.version.split()[0]),
        ("TensorFlow", tf.__version__),
        ("Keras", f"{keras.__name__} {keras.__version__} on {keras.backend.backend()}"),
        ("plug-in", state),
        ("devices", ", ".join(device.name for device in tf.config.list_physical_devices())),
    ]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/demo"), show_default=True,
              help="Write report.html and trace.json into this folder.")  # fmt: skip
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--schedule", type=click.Choice(["auto", *BACKWARD_ORDERS]), default="auto", show_default=True)
def demo(out: Path, epochs: int, schedule: str) -> None:
    """Compare schedules on emulated devices, then train a conv net on digits, stock and rewritten."""
    from tf_ooo.cli.demo_run import run_demo

    if out.exists() and not out.is_dir():
        raise click.ClickException(f"--out {out} is a file; give a folder")
    run_demo(out, epochs, schedule)
