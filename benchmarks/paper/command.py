"""The commands ``python -m benchmarks paper``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.case import NOBODY, Case, Way
from benchmarks.cases import cases_of
from benchmarks.paper import networks
from benchmarks.paper.networks import NETWORKS, PUBLISHED, PaperNetwork, network_named
from benchmarks.paper.predicted import ASSUMPTIONS, Prediction, not_counted, predictions, why
from benchmarks.paper.scripts import ScriptNetwork, loaded
from benchmarks.processes import BenchmarkError
from tf_ooo.errors import OOOError

ARCHIVE = Path(__file__).parents[1] / "archive" / "rows" / "paper"
HEAD = ("Network", "Mode", "Published", "Predicted (authors' schedule, our auto)", "Measured here")
# A suite whose ways and runner measure a mode.
_SUITES = {
    networks.SINGLE: "one_cpu",
    networks.DATA_PARALLEL: "data_parallel",
    networks.PIPELINE: "pipelines",
}
# How suites name networks of their own.
_NAMED = ("model", "networks")
_AUTHORS = tuple(Way(name, NOBODY, {"schedule": name}) for name in ("fast_forward", "modulo"))
_TASKS = {"pretrain": "pre-training", "finetune": "fine-tuning"}
_STOCK = ("gpipe", "horovod", "horovod_k", "local")


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
        click.echo(f"{network.name:<20}{network.mode}, published {_range(PUBLISHED[network.mode])}")
        for run in network.runs:
            click.echo(f"    {run.text}")


@paper.command("run")
@click.argument("name", metavar="NETWORK")
@click.option("--layers", type=click.IntRange(1), help="Change the depth.")
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="Change any setting of the script."
)
@click.option("--only", type=click.Choice(("predicted", "measured")), help="Leave out the other half.")
@click.option(
    "--size", type=click.Choice(networks.SIZES), default="tiny", show_default=True, help="Measure this size."
)
@click.option("--turns", type=click.IntRange(1), help="Run each way so many times.")
@click.option("--rows", type=click.Path(path_type=Path), help="Keep rows here.  [default: benchmarks/rows]")
def run_(
    name: str, layers: int | None, options: tuple[str, ...], only: str | None, size: str, turns: int | None,
    rows: Path | None,
) -> None:  # fmt: skip
    """Predict one network for the paper's hardware, and measure it here, in turns with stock."""
    network, settings = network_named(name), _settings(options)
    if layers:
        settings["layers"] = layers
    ScriptNetwork(network.script, "full", network.settings_at("full", settings)).given()
    if only != "measured":
        click.echo(f"{network.title}, {network.mode}, published over {networks.OVER[network.mode]}: "
                   f"{_range(PUBLISHED[network.mode])}; {ASSUMPTIONS[network.mode]}")  # fmt: skip
        for name in not_counted(network, settings):
            click.echo(f"    {name} is not counted: predictions have the published one")
        for of in predictions(network, settings):
            click.echo(f"    {of.run.text}: {_range(of.authors)}, our auto {of.auto:.2f} ({of.chosen})")
    if only != "predicted":
        _measure(network, size, settings, turns, rows)


@paper.command("all")
@click.option("--measure", is_flag=True, help="Measure each network too.")
def all_(measure: bool) -> None:
    """Print the table of docs/paper.md: predictions made anew, and what archived rows measured."""
    for line in table():
        click.echo(line)
    for network in NETWORKS.values() if measure else ():
        _measure(network, "tiny", {}, None, None)


@paper.command("why")
@click.argument("names", metavar="[NETWORK]...", nargs=-1)
def why_(names: tuple[str, ...]) -> None:
    """Print each pipeline's gain over GPipe with the authors' settings, and without each of them."""
    for network in map(network_named, names or NETWORKS):
        for run in network.runs if network.mode == networks.PIPELINE else ():
            click.echo(f"{network.title}, {run.text}")
            for what, gain in why(network, run):
                click.echo(f"    {gain:5.2f}  {what}")


def case_of(network: PaperNetwork, size: str, settings: dict[str, Any]) -> Case:
    """Return the case that measures a network: the ways of its mode's suite, with the network's script."""
    try:
        like = cases_of(_SUITES[network.mode], quick=True)[0]
    except ModuleNotFoundError as error:
        raise BenchmarkError(f"{network.name} is not measured: {error}") from None
    parameters = {name: value for name, value in like.parameters.items() if name not in _NAMED}
    of_script = {"script": network.script, "size": size, "settings": network.settings_at(size, settings)}
    parameters["script"] = of_script
    ways = like.ways + (_AUTHORS if network.mode == networks.PIPELINE else ())
    return replace(like, name=f"{network.name}, {size}", parameters=parameters, ways=ways)


def _measure(
    network: PaperNetwork, size: str, settings: dict[str, Any], turns: int | None, rows: Path | None
) -> None:
    from benchmarks.__main__ import run_case
    from benchmarks.kept import ROWS

    run_case("paper", case_of(network, size, settings), turns, rows or ROWS)


def table(of: Iterable[PaperNetwork] = tuple(NETWORKS.values())) -> Iterator[str]:
    """Yield the lines of the page's table."""
    kept = archived(json.loads(path.read_text())["rows"] for path in sorted(ARCHIVE.glob("*.json")))
    yield f"| {' | '.join(HEAD)} |"
    yield "|---" * len(HEAD) + "|"
    for network in of:
        found = list(predictions(network, {}))
        cells = (network.title, network.mode.replace("_", " "), _range(PUBLISHED[network.mode]),
                 "; ".join(_predicted(found)), kept.get(network.name, ""))  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _predicted(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the authors' range and ours, for each task and, of pipelines, each schedule."""
    groups: dict[str, list[Prediction]] = {}
    for of in found:
        task = _TASKS.get(of.run.settings.get("task", ""), "")
        groups.setdefault(f"{task}, {of.run.style}: ".lstrip(", ") if of.run.style else "", []).append(of)
    for title, of_group in groups.items():
        authors = [gain for of in of_group for gain in of.authors]
        assumed = " (assumed)" if all(of.run.assumed for of in of_group) else ""
        yield f"{title}{_range(authors)}, auto {_range([of.auto for of in of_group])}{assumed}"


def archived(files: Iterable[list[dict[str, Any]]]) -> dict[str, str]:
    """Return what the last run of each network and task at size tiny measured, over the best baseline."""
    last: dict[tuple[str, str], dict[str, float]] = {}
    for rows in files:
        runs: dict[tuple[str, str], dict[str, float]] = {}
        for row in rows:
            if row.get("size") == "tiny" and "speedup" in row:
                key = row["network"], row["settings"].get("task", "")
                runs.setdefault(key, {})[row["schedule"]] = row["speedup"]
        last |= runs
    texts: dict[str, list[str]] = {}
    for (name, task), gains in last.items():
        strongest = max((gain for way, gain in gains.items() if way in _STOCK), default=1.0)
        ours = [f"{way} {gain / strongest:.2f}" for way, gain in gains.items() if way not in _STOCK]
        texts.setdefault(name, []).append((f"{_TASKS[task]}: " if task else "") + ", ".join(ours))
    return {name: "; ".join(of) for name, of in texts.items()}


def _settings(options: Sequence[str]) -> dict[str, Any]:
    """Return ``("width=64",)`` as ``{"width": 64}``."""
    pairs = [text.partition("=") for text in options]
    return {name: loaded("paper_options").value(value) for name, _, value in pairs}


def _range(gains: Sequence[float]) -> str:
    """Return ``1.05 to 1.31``, or one number where they are alike."""
    low, high = f"{min(gains):.2f}", f"{max(gains):.2f}"
    return low if low == high else f"{low} to {high}"
