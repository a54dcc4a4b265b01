"""``tf-ooo plan``: compares schedules on paper and writes the best one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tf_ooo.cli.inputs import BYTES, LINK, is_model, load_table, policy_options
from tf_ooo.cli.outputs import (
    candidate_facts,
    candidates_table,
    picture_options,
    print_files,
    print_grid,
    print_json,
    timeline_facts,
    write_pictures,
    write_text,
)
from tf_ooo.cli.progress import Bar
from tf_ooo.costs.gains import GainTable
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OptionsError
from tf_ooo.planning.choosing.candidates import Candidate, best, candidates, policy_named
from tf_ooo.planning.choosing.plan import check_problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import POLICIES, Problem
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan as plan_schedule

_FILE = click.Path(dir_okay=False, path_type=Path)
_MODES = ("single_device", "data_parallel", "pipeline", "layerpipe")
_SEVERAL_STEPS = 3


@click.command()
@click.argument("source", metavar="COSTS|MODEL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--devices",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Of a pipeline, or workers of data parallel training.",
)
@click.option("--microbatches", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--link", type=LINK, help="Between devices, such as 25Gbit or 10Gbit,20us; default: the table's."
)
@click.option("--memory", type=BYTES, help="Limit of each device, such as 16GiB.")
@click.option(
    "--schedule", default="auto", show_default=True, help="auto, or one of: " + ", ".join(POLICIES) + "."
)
@click.option("--mode", type=click.Choice(_MODES), help="Default: pipeline if there are several devices.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the schedule, such as group=2; can be repeated.",
)
@click.option(
    "--gains",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measured gains of dW beside the main stream (JSON), for multi_stream and search.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Rows of one micro-batch, for a model.",
)
@click.option(
    "--device",
    help="What a model is to run on, such as v100 or h100-bf16.  [default: v100; cpu-core with --measure]",
)
@click.option("--measure", is_flag=True, help="Measure the model's ops on this machine instead.")
@click.option("--out", type=_FILE, help="Write the schedule, for tf-ooo simulate.")
@click.option("--costs-out", type=_FILE, help="Write the costs that were used.")
@picture_options
def plan(
    source: Path, devices: int, microbatches: int, link: Link | None, memory: int | None, schedule: str,
    mode: str | None, options: tuple[str, ...], gains: Path | None, batch: int, device: str | None,
    measure: bool, **wanted: Any,
) -> None:  # fmt: skip
    """Compare schedules for the COSTS of layers (JSON), or for a saved Keras MODEL."""
    table = _table(source, link, batch, device, measure)
    given = policy_options(options)
    if gains is not None:
        given["gains"] = dict(GainTable.load(gains).saved_s)
    problem = Problem(table.layers, devices, microbatches, table.link, memory, given)
    check_problem(problem)
    found = _compare(problem, schedule, mode)
    console = Console(soft_wrap=True)
    chosen: Schedule | None = None
    try:
        chosen = best(found, problem)
    finally:
        if not wanted["as_json"]:
            console.print(candidates_table(found, chosen.policy if chosen else ""))
    _show(console, chosen, table, found, wanted)


def _table(source: Path, link: Link | None, batch: int, device: str | None, measure: bool) -> CostTable:
    if not is_model(source):
        if measure:
            raise OptionsError(f"--measure needs a saved Keras model, {source} is a cost table")
        return load_table(source, link)
    from tf_ooo.costs.keras_model import costs_of_file  # imports TensorFlow

    table = costs_of_file(source, batch, device or ("cpu-core" if measure else "v100"), measure)
    return table if link is None else dataclasses.replace(table, link=link)


def _compare(problem: Problem, schedule: str, mode: str | None) -> list[Candidate]:
    wanted = mode or ("pipeline" if problem.devices > 1 else "single_device")
    auto = schedule == "auto"
    total = sum(wanted in policy.modes for policy in POLICIES.values()) if auto else 1
    with Bar(total) as bar:
        if auto or "progress" in policy_named(schedule, mode).options:
            watched = {**problem.options, "progress": bar.search}
            problem = dataclasses.replace(problem, options=watched)
        if auto:
            return candidates(problem, mode, bar.policy)
        bar.policy(schedule)
        return [_named(problem, schedule, mode)]


def _named(problem: Problem, schedule: str, mode: str | None) -> Candidate:
    made = plan_schedule(
        layers=problem.layers, schedule=schedule, devices=problem.devices, microbatches=problem.microbatches,
        link=problem.link, memory_limit_bytes=problem.memory_limit_bytes, mode=mode, **problem.options,
    )  # fmt: skip
    return Candidate(made.policy, made, simulate(made, problem.layers, problem.link))


def _show(
    console: Console, chosen: Schedule, table: CostTable, found: list[Candidate], wanted: dict[str, Any]
) -> None:
    """Pictures and files of the schedule that was chosen."""
    # An asynchronous schedule's micro-batches are steps, and a pipeline's bubble is that of one step.
    steps = 1 if chosen.asynchronous or chosen.mode == "pipeline" else _SEVERAL_STEPS
    timeline = simulate(chosen, table.layers, table.link, steps)
    files = write_pictures(timeline, wanted["html"], wanted["png"], wanted["trace"])
    if wanted["out"] is not None:
        files.append(write_text(wanted["out"], chosen.to_text()))
    if wanted["costs_out"] is not None:
        files.append(write_text(wanted["costs_out"], table.to_json()))
    if wanted["as_json"]:
        compared = [candidate_facts(candidate) for candidate in found]
        print_json({**timeline_facts(timeline), "candidates": compared, "files": list(map(str, files))})
        return
    if wanted["grid"]:
        print_grid(console, timeline)
    for note in table.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    print_files(console, files)
