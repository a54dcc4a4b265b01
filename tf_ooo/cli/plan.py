"""``tf-ooo plan``: compares schedules on paper and writes the best one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tf_ooo.cli.inputs import BYTES, LINK, is_model, load_table, policy_options
from tf_ooo.cli.outputs import (
    Outputs,
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
from tf_ooo.planning.choosing.on_paper import candidates, check_problem, policies_of, usual_mode
from tf_ooo.planning.choosing.plan import Candidate, Plan, as_asked, choose, policy_named
from tf_ooo.planning.policies import POLICIES, Problem

_FILE = click.Path(dir_okay=False, path_type=Path)
_MODES = tuple(dict.fromkeys(mode for policy in POLICIES.values() for mode in policy.modes))
_WITH_GAINS = " and ".join(policy.name for policy in POLICIES.values() if "gains" in policy.options)
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
    help=f"Measured gains of dW beside the main stream (JSON), for {_WITH_GAINS}.",
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
    measure: bool, **outputs: Any,
) -> None:  # fmt: skip
    """Compare schedules for the COSTS of layers (JSON), or for a saved Keras MODEL."""
    table = _table(source, link, batch, device, measure)
    given = policy_options(options)
    if gains is not None:
        given["gains"] = dict(GainTable.load(gains).saved_s)
    problem = Problem(table.layers, devices, microbatches, table.link, memory, given)
    check_problem(problem)
    compared = _compare(problem, schedule, mode)
    console, wanted = Console(soft_wrap=True), Outputs(**outputs)
    chosen = ""
    try:
        plan = choose(compared)
        chosen = plan.schedule.policy
    finally:
        if not wanted.as_json:
            console.print(candidates_table(compared, chosen))
    _show(console, plan, table, wanted)


def _table(source: Path, link: Link | None, batch: int, device: str | None, measure: bool) -> CostTable:
    if not is_model(source):
        if measure:
            raise OptionsError(f"--measure needs a saved Keras model, {source} is a cost table")
        return load_table(source, link)
    from tf_ooo.costs.keras_model import costs_of_file  # imports TensorFlow

    table = costs_of_file(source, batch, device or ("cpu-core" if measure else "v100"), measure)
    return table if link is None else dataclasses.replace(table, link=link)


def _compare(problem: Problem, schedule: str, mode: str | None) -> list[Candidate]:
    auto = schedule == "auto"
    with Bar(len(policies_of(usual_mode(problem, mode))) if auto else 1) as bar:
        if auto or "progress" in policy_named(schedule, mode).options:
            watched = {**problem.options, "progress": bar.search}
            problem = dataclasses.replace(problem, options=watched)
        if auto:
            return candidates(problem, mode, bar.policy)
        bar.policy(schedule)
        return [_named(problem, schedule, mode)]


def _named(problem: Problem, schedule: str, mode: str | None) -> Candidate:
    """One step of a policy that is asked for."""
    plan = as_asked(policy_named(schedule, mode), dataclasses.replace(problem, mode=mode))
    trial = plan.trial.of(steps=1)
    return Candidate(trial.schedule.policy, problem, trial, trial.step_s)


def _show(console: Console, plan: Plan, table: CostTable, wanted: Outputs) -> None:
    """Pictures and files of the schedule that was chosen."""
    schedule = plan.schedule
    # An asynchronous schedule's micro-batches are steps, and a pipeline's bubble is that of one step.
    steps = 1 if schedule.asynchronous or schedule.mode == "pipeline" else _SEVERAL_STEPS
    timeline = plan.trial.of(steps).timeline
    files = write_pictures(timeline, wanted.html, wanted.png, wanted.trace)
    if wanted.out is not None:
        files.append(write_text(wanted.out, schedule.to_text()))
    if wanted.costs_out is not None:
        files.append(write_text(wanted.costs_out, table.to_json()))
    if wanted.as_json:
        compared = [candidate_facts(candidate) for candidate in plan.candidates]
        print_json({**timeline_facts(timeline), "candidates": compared, "files": list(map(str, files))})
        return
    if wanted.grid:
        print_grid(console, timeline)
    for note in table.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    print_files(console, files)
