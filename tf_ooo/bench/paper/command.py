"""The commands ``tf-ooo paper``."""

from __future__ import annotations

import ast
import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tf_ooo.bench.paper import measured, predicted, why
from tf_ooo.bench.paper.figures import PUBLISHED, TASKS, figures_of, gains_text, is_own
from tf_ooo.bench.paper.networks import MODES, NETWORKS, SIZES, PaperNetwork, modes_of, network_named
from tf_ooo.bench.paper.picture import save_picture
from tf_ooo.bench.paper.tables import HEAD, lines_of, settings_text, tables_of
from tf_ooo.bench.report.page import with_tables
from tf_ooo.bench.report.reading import runs_in
from tf_ooo.bench.shared.drivers import end_cleanly
from tf_ooo.bench.shared.kept import NAME, Run, machine
from tf_ooo.bench.shared.options import EXISTING_FILE, FILE, FOLDER, json_option
from tf_ooo.bench.shared.rows import Row, bits_text, reported, write_rows
from tf_ooo.bench.shared.scripts import SOURCES
from tf_ooo.errors import OptionsError

_ROOT = Path(__file__).parents[3]
_EXAMPLES, _ROWS = _ROOT / "examples" / "paper", _ROOT / "docs" / "benchmarks" / "rows"
_LAYERPIPE = _ROOT / "docs" / "benchmarks" / "planner" / "layerpipe.json"
_ONLY = ("predicted", "measured")
# Options of what is measured, and why they change no prediction.
_OF_MEASURED = {
    "size": "--size changes nothing with --only predicted: predictions are of the published sizes",
    "source": "--data changes nothing with --only predicted: nothing is trained",
}
# Of the columns of the table that `all` prints.
_WIDTHS = (22, 13, 6, 9, 27, 58, 37, 9, 15, 80, 0)


@click.group()
@click.pass_context
def paper(ctx: click.Context) -> None:
    """The twelve networks of out-of-order backprop: published, predicted, measured here."""
    ctx.meta[NAME] = "paper"


@paper.command("list")
def list_() -> None:
    """The networks: their modes, published settings, and data sets."""
    for network in NETWORKS.values():
        click.echo(f"{network.name:<20}{network.title}; data: {network.data}")
        for mode in network.modes:
            low, high = PUBLISHED[mode]
            click.echo(f"    {mode}, published {low:.2f}-{high:.2f} with all its networks")
            for run in network.runs:
                if run.mode == mode:
                    click.echo(f"        {settings_text(run)}")


def _common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of ``run`` and ``all``."""
    for option in (
        json_option,
        click.option("--examples", type=FOLDER, default=_EXAMPLES, show_default="the repository's",
                     help="Folder of the training scripts."),
        click.option("--only", type=click.Choice(_ONLY), help="Without the other half."),
        click.option("--data", "source", type=click.Choice(SOURCES), default="auto", show_default=True,
                     help="real: downloaded; shipped: real data that come with a package; generated; auto: "
                          "shipped where the package is installed."),
        click.option("--size", type=click.Choice(SIZES), default="tiny", show_default=True,
                     help="tiny: two CPU cores, under 3 minutes a network; full: the published settings (a "
                          "GPU is taken on one device only)."),
    ):  # fmt: skip
        function = option(function)
    return function


@paper.command()
@click.argument("name", metavar="NETWORK")
@click.option("--mode", type=click.Choice(MODES), help="Only this one.  [default: the paper's]")
@click.option("--any-mode", is_flag=True, help="Also a mode in which the paper does not use the network.")
@click.option("--growth", type=click.IntRange(1), help="Of DenseNet.")
@click.option("--alpha", type=click.FloatRange(0, min_open=True), help="Of MobileNet.")
@click.option("--layers", type=click.IntRange(1), help="Depth.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE",
              help="Any setting of the network's script, for example width=64 or task=finetune.")  # fmt: skip
@_common
@click.pass_context
def run(
    ctx: click.Context, name: str, mode: str | None, any_mode: bool, growth: int | None, alpha: float | None,
    layers: int | None, options: tuple[str, ...], size: str, source: str, only: str | None, examples: Path,
    json_file: Path | None,
) -> None:  # fmt: skip
    """One network: predicted for the paper's hardware, then measured here with stock in turns."""
    network = network_named(name)
    named = {"growth": growth, "alpha": alpha, "layers": layers}
    settings = _settings(options, {key: value for key, value in named.items() if value is not None})
    _refuse_unused(ctx, only)
    if any_mode and not mode:
        raise OptionsError("--any-mode changes nothing without --mode, such as --mode pipeline: name one")
    asked = measured.Asked(network, size, source, examples, settings)
    modes = modes_of(network, mode, any_mode)
    if only != "predicted":
        asked.workload()  # before anything is printed
        _leave_gpus()
    elif settings:
        replace(asked, size="full").workload()  # what is predicted
    end_cleanly()

    def parts() -> Iterator[list[Row]]:
        for of_mode in modes:
            if only != "measured":
                rows = list(predicted.rows(network, of_mode, settings))
                click.echo(_prediction_text(network, of_mode, settings, rows))
                yield rows
            if only != "predicted":
                yield measured.rows(asked, of_mode)

    reported(parts(), _text_of, json_file)


@paper.command("all")
@_common
@click.pass_context
def all_(
    ctx: click.Context, size: str, source: str, only: str | None, examples: Path, json_file: Path | None
) -> None:
    """All networks in the paper's modes, BERT for both tasks; a table that grows by a line for each."""
    _refuse_unused(ctx, only)
    if only != "predicted":
        _leave_gpus()
    end_cleanly()
    began_s, failed = time.monotonic(), []
    todo = [
        (network, mode, task)
        for network in NETWORKS.values()
        for mode in network.modes
        for task in network.tasks
    ]
    rows: list[Row] = []
    click.echo(_aligned(HEAD))
    for number, (network, mode, task) in enumerate(todo, 1):
        what = ", ".join((network.name, mode, *task.values()))
        click.echo(f"{number} of {len(todo)}: {what}, since {time.monotonic() - began_s:.0f} s", err=True)
        of_pair: list[Row] = []
        try:
            if only != "measured":
                of_pair += predicted.rows(network, mode, task)
            if only != "predicted":
                of_pair += measured.rows(measured.Asked(network, size, source, examples, task), mode)
        except (click.ClickException, OptionsError) as error:
            failed.append(f"{what}: {error}")
        rows += of_pair
        write_rows(json_file, rows)
        for line in _lines(of_pair):
            click.echo(_aligned(line))
    if failed:
        raise click.ClickException("\n".join(failed))


@paper.command("why")
@json_option
def why_(json_file: Path | None) -> None:
    """Pipelines: which assumption makes up the difference between predicted and published gains."""

    def each() -> Iterator[list[Row]]:
        for network in NETWORKS.values():
            yield [*why.rows(network), *why.memory_rows(network)]

    reported(each(), _why_text, json_file)


@paper.command()
@click.option(
    "--rows",
    type=FOLDER,
    default=_ROWS,
    show_default="the repository's",
    help="Folder of runs that were kept.",
)
@click.option("--layerpipe", type=EXISTING_FILE, default=_LAYERPIPE, show_default="the repository's",
              help="Rows of tf-ooo bench planner layerpipe.")  # fmt: skip
@click.option("--page", type=EXISTING_FILE, help="Markdown file whose tables are made anew.")
@click.option("--picture", type=FILE, help="File for a picture of all networks.")
def report(rows: Path, layerpipe: Path, page: Path | None, picture: Path | None) -> None:
    """The tables of docs/paper.md from rows that were kept."""
    runs = runs_in(rows)
    tables = tables_of(runs, json.loads(layerpipe.read_text()))
    if page:
        page.write_text(with_tables(page.read_text(), tables))
    else:
        for name, table in tables.items():
            click.echo(f"## {name}\n\n{table}\n")
    if picture:
        save_picture(figures_of(runs), picture)


def _refuse_unused(ctx: click.Context, only: str | None) -> None:
    """OptionsError where an option was given that only changes what is measured, and nothing will be."""
    for name, reason in _OF_MEASURED.items() if only == "predicted" else ():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise OptionsError(f"{reason}; leave it out")


def _leave_gpus() -> None:
    """GPUs are for the processes that measure: this one asks scripts for their data and optimizer only."""
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # TensorFlow has begun already
        tf.config.set_visible_devices([], "GPU")


def _settings(texts: Sequence[str], named: Mapping[str, Any]) -> dict[str, Any]:
    """``("width=64",)`` as ``{"width": 64}``, beside those that have an option of their own."""
    settings = dict(named)
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise OptionsError(f"--option {text!r}: expected NAME=VALUE, for example width=64")
        if name in settings:
            raise OptionsError(f"--option {text!r}: {name} is {settings[name]!r} already; set it once")
        try:
            settings[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            settings[name] = value
    return settings


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    """Lines of the table for rows of this machine."""
    now = datetime.datetime.now(datetime.UTC)
    figures = figures_of([Run("paper", f"{now:%Y-%m-%d %H:%M}", "", "", machine(), list(rows))])
    kept = [figure for figure in figures if figure.predicted or figure.measured]
    return [line for figure in kept for line in lines_of(figure)]


def _aligned(cells: Sequence[str]) -> str:
    """One line of a table that grows, whose widths cannot follow from lines to come."""
    padded = (cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return "  ".join(padded).rstrip()


def _prediction_text(
    network: PaperNetwork, mode: str, settings: Mapping[str, Any], rows: Sequence[Row]
) -> str:
    reason = predicted.why_none(network, mode, settings)
    if reason:
        return f"{network.name}, {mode}: {reason}; nothing is predicted"
    if any(row["changed"] for row in rows):
        published = "other settings than the published ones"
    else:
        low, high = PUBLISHED[mode]
        published = f"published {low:.2f}-{high:.2f}"
    gains = _gains_by_task([row for row in rows if is_own(row, mode)])
    lines = [f"{network.name}, {mode}: {published}, predicted {gains}; assumed:"]
    return "\n".join([*lines, *(f"- {line}" for line in predicted.assumptions(network, mode, rows))])


def _gains_by_task(rows: Sequence[Row]) -> str:
    """``1.10-1.40``, or ``1.10-1.40 (pre-training), 1.20-1.50 (fine-tuning)``."""
    gains: dict[str, list[float]] = {}
    for row in rows:
        words = row["configuration"].split()
        title = next((title for name, title in TASKS.items() if f"task={name}" in words), "")
        gains.setdefault(title, []).append(row["predicted_speedup"])
    return ", ".join(
        gains_text(of_task) + (f" ({title})" if title else "") for title, of_task in gains.items()
    )


def _text_of(row: Row) -> str:
    if row["kind"] == "predicted":
        gbit = f", {row['bandwidth_bit_s'] / 1e9:g} Gbit/s" if "bandwidth_bit_s" in row else ""
        what = f"{row['configuration']} x{row['devices']}{gbit}: {row['schedule']} / {row['baseline']}"
        return f"  predicted {what:<90} {row['predicted_speedup']:.3f}"
    if "speedup" not in row:
        return f"  measured {row['network']} {row['size']}: {row.get('text', '')}"
    first, last = row["losses"]
    return (
        f"  measured {row['network']} {row['size']}: {row['schedule']:<16} {row['speedup']:.2f}x "
        f"{row['baseline']}, {bits_text(row)}, loss {first:.3f} to {last:.3f}, data: {row['data']}"
    )


def _why_text(row: Row) -> str:
    if row["kind"] == "memory":
        needed_gb, of_gb = (row["peak_bytes"] + row["state_bytes"]) / 1e9, why.V100_BYTES / 1e9
        return (
            f"{row['network']} x{row['devices']}: GPipe's fullest GPU needs {needed_gb:.1f} of {of_gb:.0f} GB"
        )
    return (
        f"{row['network']} x{row['devices']}: {row['assumed']:<60} {row['schedule']:<13} "
        f"{row['predicted_speedup']:.2f} (no order passes {row['bound']:.2f})"
    )
