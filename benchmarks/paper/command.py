"""The commands ``python -m benchmarks paper``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from benchmarks.cases import NOBODY, Case, Way, cases_of
from benchmarks.kept import ROWS
from benchmarks.models import loaded
from benchmarks.paper.networks import NETWORKS, SIZES, PaperNetwork, network_named
from benchmarks.paper.predicted import Prediction, not_counted, predictions, why
from benchmarks.processes import BenchmarkError
from tf_ooo.errors import OOOError

HEAD = ("Network", "Mode", "Published", "Predicted (authors' schedule, our auto)", "Measured here")
_AUTHORS = tuple(Way(name, NOBODY, {"schedule": name}) for name in ("fast_forward", "modulo"))
_TASKS = {"pretrain": "pre-training", "finetune": "fine-tuning"}


class _OneLineErrors(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (OOOError, BenchmarkError) as error:
            raise click.UsageError(str(error)) from None


@click.group(cls=_OneLineErrors)
def paper() -> None:
    """Run the twelve networks of out-of-order backprop: published, predicted, measured here."""


@paper.command("list")
def list_() -> None:
    """Name the networks, and what was published of them."""
    for network in NETWORKS.values():
        click.echo(f"{network.name:<20}{network.mode.name}, published {_range(network.mode.published)}")
        for run in network.runs:
            click.echo(f"    {run.text}")


@paper.command("run")
@click.argument("name", metavar="NETWORK")
@click.option("--layers", type=click.IntRange(1), help="Change the depth.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE",
              help="Change any setting of the script.")  # fmt: skip
@click.option("--only", type=click.Choice(("predicted", "measured")), help="Leave out the other half.")
@click.option("--size", type=click.Choice(SIZES), default="tiny", help="Measure this size.  [default: tiny]")
@click.option("--turns", type=click.IntRange(1), help="Run each way so many times.")
@click.option("--rows", type=click.Path(path_type=Path), default=ROWS, help="Keep rows in this folder.")
def run_(
    name: str, layers: int, options: tuple[str, ...], only: str, size: str, turns: int, rows: Path
) -> None:
    """Predict one network for the paper's hardware, and measure it here, in turns with stock."""
    network, pairs = network_named(name), [text.partition("=") for text in options]
    mode, settings = network.mode, {key: loaded("paper_options").value(value) for key, _, value in pairs}
    settings |= {"layers": layers} if layers else {}
    network.at("full", settings).given()  # refuses what is wrong
    if only != "measured":
        published = f"published over {mode.over}: {_range(mode.published)}"
        click.echo(f"{network.title}, {mode.name}, {published}; {mode.assumes}")
        for key in not_counted(network, settings):
            click.echo(f"    {key} is not counted: predictions have the published one")
        for of in predictions(network, settings):
            click.echo(f"    {of.run.text}: {_range(of.authors)}, our auto {of.auto:.2f} ({of.chosen})")
    if only != "predicted":
        _measure(case_of(network, size, settings), turns, rows)


@paper.command("all")
@click.option("--measure", is_flag=True, help="Measure each network too.")
def all_(measure: bool) -> None:
    """Print the table of docs/paper.md: predictions made anew, and what was measured."""
    for line in table():
        click.echo(line)
    for network in NETWORKS.values() if measure else ():
        _measure(case_of(network, "tiny", {}))


@paper.command("why")
@click.argument("names", metavar="[NETWORK]...", nargs=-1)
def why_(names: tuple[str, ...]) -> None:
    """Print each pipeline's gain over GPipe with the authors' settings, and without each of them."""
    for network in map(network_named, names or NETWORKS):
        for run in network.runs if network.mode.name == "pipeline" else ():
            click.echo(f"{network.title}, {run.text}")
            for what, gain in why(network, run):
                click.echo(f"    {gain:5.2f}  {what}")


def case_of(network: PaperNetwork, size: str, settings: dict[str, Any]) -> Case:
    """Return the case that measures a network: the ways of its mode's suite, with the network's script."""
    like, script = cases_of(network.mode.suite, quick=True)[0], asdict(network.at(size, settings))
    parameters = {**like.parameters, "script": script}
    del parameters["networks"], parameters["model"]  # suites name networks of their own
    ways = like.ways + (_AUTHORS if network.mode.name == "pipeline" else ())
    return replace(like, name=f"{network.name}, {size}", parameters=parameters, ways=ways)


def _measure(case: Case, turns: int | None = None, rows: Path = ROWS) -> None:
    from benchmarks.__main__ import run_case

    run_case("paper", case, turns, rows)


def table(of: Iterable[PaperNetwork] = tuple(NETWORKS.values())) -> Iterator[str]:
    """Yield the lines of the page's table."""
    yield f"| {' | '.join(HEAD)} |"
    yield "|---" * len(HEAD) + "|"
    for network in of:
        mode, published = network.mode.name.replace("_", " "), _range(network.mode.published)
        predicted = "; ".join(_predicted(network))
        yield f"| {network.title} | {mode} | {published} | {predicted} | {network.measured} |"


def _predicted(network: PaperNetwork) -> Iterator[str]:
    """Yield the authors' range and ours, for each task and, of pipelines, each schedule."""

    def title(of: Prediction) -> str:
        task = _TASKS.get(of.run.settings.get("task", ""))
        return (f"{task}, " if task else "") + (f"{of.run.style}: " if of.run.style else "")

    for text, group in groupby(predictions(network, {}), title):
        runs, gains, autos = zip(*((of.run, of.authors, of.auto) for of in group), strict=True)
        assumed = " (assumed)" if all(run.assumed for run in runs) else ""
        yield f"{text}{_range(sum(gains, []))}, auto {_range(autos)}{assumed}"


def _range(gains: Sequence[float]) -> str:
    low, high = f"{min(gains):.2f}", f"{max(gains):.2f}"
    return low if low == high else f"{low} to {high}"
