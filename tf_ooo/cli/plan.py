"""``tf-ooo plan`` compares schedules on paper and writes the best one; ``tf-ooo simulate`` runs one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from grappler_passes.blocks import if_it_takes
from tf_ooo.cli.inputs import BYTES, LINK, NEAR, SPEEDS, STAGES, load_schedule, policy_options, with_devices
from tf_ooo.cli.outputs import EXISTING, FILE, Outputs, picture_options, timeline_table
from tf_ooo.cli.plan_table import CandidateRows, print_table, show_splits
from tf_ooo.costs.devices import PRECISIONS
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.sources import costs_for_model, is_name, rows_of_micro_batch, with_rows
from tf_ooo.costs.table import CostTable, GainTable
from tf_ooo.costs.torch_trace import load_costs
from tf_ooo.errors import OptionsError, ScheduleError
from tf_ooo.planning.building.stages import Stages
from tf_ooo.planning.choosing import on_paper
from tf_ooo.planning.choosing.figures import assumptions, one_device_s, over, over_one_device, reference
from tf_ooo.planning.choosing.plan import Candidate, Plan, Trial, as_asked, choose, policy_named
from tf_ooo.planning.choosing.recomputing import CHOICES
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.pictures.page import Listed, Page, Table, bars_of, chart_of, layer_table, title
from tf_ooo.planning.policies import POLICIES, Problem
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.rewriting.plan import plan as planned
from tf_ooo.units import time_text

# The defaults are those of the function, so that both have the same.
_DEFAULTS = {name: parameter.default for name, parameter in signature(planned).parameters.items()}
_MODES = tuple(dict.fromkeys(mode for policy in POLICIES.values() for mode in policy.modes))
_WITH_GAINS = " and ".join(policy.name for policy in POLICIES.values() if "gains" in policy.options)
_SEVERAL_STEPS = 3
# Each layer has one of each for each micro-batch.
_TASKS = ("F", "dO", "dW")
# Quicker plans are not talked of.
SAID_AFTER_S = 2.0


@click.command()
@click.argument("source", metavar="COSTS|MODEL", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--model", metavar="MODULE:NAME", default=_DEFAULTS["model"],
              help="Take a class or function that makes a model, instead of a file.")  # fmt: skip
@click.option("--import", "modules", multiple=True, metavar="MODULE",
              help="Import this first, which registers a model's own classes; can be repeated.")  # fmt: skip
@click.option("--input-shape", multiple=True, metavar="[NAME=]SIZES[:TYPE]",
              default=_DEFAULTS["input_shape"], callback=lambda _context, _option, given: list(given) or None,
              help="Give the sizes that a model leaves open, without the batch: 128,64, or "
                   "ids=128:int32; repeated for each input.")  # fmt: skip
@click.option("--devices", type=click.IntRange(1), default=_DEFAULTS["devices"], show_default=True,
              help="Plan for so many devices of a pipeline, or data parallel workers.")  # fmt: skip
@click.option("--microbatches", type=click.IntRange(1), default=_DEFAULTS["microbatches"],
              help="Cut a batch into so many.  [default: 8 in a pipeline, as in fit, else 1]")  # fmt: skip
@click.option("--link", type=LINK,
              help="Link devices by 25Gbit or 10Gbit,20us; default: as the table says.")  # fmt: skip
@click.option("--near", type=NEAR, metavar="COUNTxLINK",
              help="Link the devices of a host faster: 4x600GB/s,5us for four on each.")  # fmt: skip
@click.option("--speeds", type=SPEEDS, metavar="NUMBERS",
              help="Say how fast each device is, such as 1,1,0.5; 1 is what the costs are for.")  # fmt: skip
@click.option("--memory", type=BYTES,
              help="Limit each device to 16GiB, or each to its own, 16GiB,8GiB.")  # fmt: skip
@click.option("--schedule", default=_DEFAULTS["schedule"], show_default=True,
              help="Take auto, or one of: " + ", ".join(POLICIES) + ".")  # fmt: skip
@click.option("--mode", type=click.Choice(_MODES), help="Plan for it; default: pipeline on several devices.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE",
              help="Set an option of the schedule, such as group=2; can be repeated.")  # fmt: skip
@click.option("--gains", type=EXISTING,
              help=f"Read gains of dW beside the main stream (JSON), for {_WITH_GAINS}.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1), default=_DEFAULTS["batch"],
              help="Say how many rows the whole batch has, as in fit.  "
                   "[default: 32 a micro-batch of a model, else the table's]")  # fmt: skip
@click.option("--device", default=_DEFAULTS["device"],
              help="Plan a model for this device, such as h100 or rtx4090.  "
                   "[default: v100; cpu-core with --measure]")  # fmt: skip
@click.option("--precision", type=click.Choice(PRECISIONS), default=_DEFAULTS["precision"],
              help="Count with the device's published peak at this precision.  "
                   "[default: what TensorFlow multiplies the model's types in]")  # fmt: skip
@click.option("--measure", is_flag=True, default=_DEFAULTS["measure"],
              help="Measure the model's ops on this machine instead.")  # fmt: skip
@click.option("--stages", type=STAGES, default=_DEFAULTS["stages"],
              help="Begin a pipeline's stages at these layers, such as embedding,block_3, or give the "
                   "layers of each: 'embedding,block_1;block_2,head'.")  # fmt: skip
@click.option("--recompute", type=click.Choice(CHOICES), default=_DEFAULTS["recompute"], show_default=True,
              help="Run layers' forward again before their dO, so that less is kept: where the limit "
                   "needs it, none, or all.")  # fmt: skip
@click.option("--splits", is_flag=True, default=_DEFAULTS["splits"],
              help="Compare all divisions of the devices into replicas of a pipeline instead.")  # fmt: skip
@click.option("--out", type=FILE, help="Write the schedule, for tf-ooo simulate.")
@click.option("--torch-csv", type=FILE, help="Write the schedule as torch.distributed.pipelining loads it.")
@click.option("--costs-out", type=FILE, help="Write the costs that were used.")
@picture_options
def plan(
    source: Path | None, model: str | None, modules: tuple[str, ...],
    input_shape: list[str] | None, devices: int, microbatches: int | None, link: Link | None,
    near: tuple[int, Link] | None, speeds: tuple[float, ...] | None, memory: int | tuple[int, ...] | None,
    schedule: str, mode: str | None, options: tuple[str, ...], gains: Path | None, batch: int | None,
    device: str | None, precision: str | None, measure: bool,
    stages: Stages | None, recompute: str, splits: bool, out: Path | None,
    torch_csv: Path | None, costs_out: Path | None, **outputs: Any,
) -> None:  # fmt: skip
    """Compare schedules for the COSTS of layers (JSON), for a saved Keras MODEL, or for a --model.

    COSTS may be a folder with each rank's trace of torch.profiler, too.
    """
    what = _source(source, model)
    of_model = {"device": device, "precision": precision, "measure": measure}
    microbatches = on_paper.microbatches_of(microbatches, devices, schedule, mode, batch)
    batch = rows_of_micro_batch(batch, microbatches)
    table = _table(what, batch, modules, **of_model, input_shape=input_shape)
    table, given = with_devices(table, devices, link, near, speeds), policy_options(options)
    if gains is not None:
        given["gains"] = dict(GainTable.load(gains).saved_s)
    problem = on_paper.problem_of(
        table.layers, devices, microbatches, table.link, memory, given, stages, recompute
    )
    show = _show_splits if splits else _show_plan
    show(problem, table, schedule, mode, Outputs(**outputs), (out, torch_csv, costs_out))


Files = tuple[Path | None, Path | None, Path | None]


def _show_splits(
    problem: Problem, table: CostTable, schedule: str, mode: str | None, wanted: Outputs, files: Files
) -> None:
    on_paper.refuse_beside_splits(problem, schedule, mode)
    if any([*files, wanted.html, wanted.png, wanted.trace]):
        raise OptionsError("--splits prints one table: no files")
    with said_to_a_file(problem):
        divisions = on_paper.splits(problem)
    show_splits(divisions, assumptions(problem, table), table.rows, wanted.as_json)


def _show_plan(
    problem: Problem, table: CostTable, schedule: str, mode: str | None, wanted: Outputs, files: Files
) -> None:
    mode, chosen = on_paper.mode_with_stages(problem, schedule, mode), ""
    with said_to_a_file(problem):
        compared = _compare(problem, schedule, mode)
    planned_mode = _mode_of(problem, schedule, mode)
    assumed = assumptions(problem, table, planned_mode)
    rows = CandidateRows(compared, reference(compared, problem, planned_mode), table.rows)
    try:
        plan = choose(compared)
        chosen = plan.schedule.policy
    finally:
        # If no plan is possible the error says why; each candidate needs another amount of memory.
        if not wanted.as_json and (chosen or problem.memory_limit_bytes is not None):
            print_table(assumed, rows.table(chosen))
    notes = [*map(str, rows.squeezed.values()), *map(str, rows.recomputed.values()), *table.notes]
    csv = plan.schedule.to_torch_csv() if files[1] else ""
    notes += _stage_notes(plan.schedule, problem.layers) if files[1] else []
    timeline, comments = _timeline(plan), "".join(f"# assumed: {line}\n" for line in assumed)
    texts = (lambda: comments + plan.schedule.to_text(), lambda: csv, table.to_json)
    wanted.show(
        timeline,
        page=lambda: _page_of(plan, timeline, rows, problem.layers, assumed, notes),
        layers=_names_of(problem.layers),
        texts=list(zip(files, texts, strict=True)),
        notes=notes,
        assumptions=list(assumed),
        candidates=[rows.facts(candidate) for candidate in plan.candidates],
    )


def _mode_of(problem: Problem, schedule: str, mode: str | None) -> str:
    """Return the mode to plan: as asked, a named schedule's, or the usual one."""
    usual = on_paper.usual_mode(problem, mode)
    modes = (usual,) if mode is not None or schedule == "auto" else policy_named(schedule).modes
    return usual if usual in modes else modes[0]


def _source(source: Path | None, model: str | None) -> Path | str:
    """Return the one of both that is given."""
    if source is not None and model is None:
        return source
    if model is None or source is not None:
        raise OptionsError("give COSTS or MODEL, a file, or --model MODULE:NAME")
    if not is_name(model):
        raise OptionsError(f"--model {model!r:.80}: expected MODULE:NAME, such as my_models:Net")
    return model


def _table(source: Path | str, batch: int | None, modules: Sequence[str], **of_model: Any) -> CostTable:
    if isinstance(source, str) or source.suffix.lower() in (".keras", ".h5", ".hdf5"):
        return costs_for_model(source, modules, batch=batch, **of_model)
    for name, value in {**of_model, "import": modules}.items():
        if value:
            option = name.replace("_", "-")
            raise OptionsError(f"--{option} needs a saved Keras model, {source} is a cost table")
    return with_rows(load_costs(source), batch)


def _compare(problem: Problem, schedule: str, mode: str | None) -> list[Candidate]:
    auto = schedule == "auto"
    bar = Bar(len(on_paper.policies_of(on_paper.usual_mode(problem, mode))) if auto else 1)
    with bar.progress:
        if auto or "progress" in policy_named(schedule, mode).options:
            watched = {**problem.options, "progress": bar.search}
            problem = dataclasses.replace(problem, options=watched)
        if auto:
            return on_paper.candidates(problem, mode, bar.policy)
        bar.policy(schedule)
        plan = as_asked(policy_named(schedule, mode), dataclasses.replace(problem, mode=mode))
        trial = plan.trial.of(steps=1)
        return [Candidate(trial.schedule.policy, problem, trial, trial.step_s)]


def _timeline(plan: Plan) -> Timeline:
    """Return the timeline of several steps, if one does not show all."""
    schedule = plan.schedule
    # An asynchronous schedule's micro-batches are steps, and a pipeline's bubble is that of one step.
    steps = 1 if schedule.asynchronous or schedule.mode == "pipeline" else _SEVERAL_STEPS
    return plan.trial.of(steps).timeline


@click.command()
@click.argument("schedule", type=EXISTING)
@click.argument("costs", type=EXISTING)
@click.option("--steps", type=click.IntRange(1), default=1, show_default=True,
              help="Run so many training steps, one after the other.")  # fmt: skip
@click.option("--link", type=LINK,
              help="Link devices by 25Gbit or 10Gbit,20us; default: as the table says.")  # fmt: skip
@click.option("--near", type=NEAR, metavar="COUNTxLINK",
              help="Link the devices of a host faster: 4x600GB/s,5us for four on each.")  # fmt: skip
@click.option("--speeds", type=SPEEDS, metavar="NUMBERS",
              help="Say how fast each device is, such as 1,1,0.5; default: as the table says.")  # fmt: skip
@picture_options
def simulate(
    schedule: Path, costs: Path, steps: int, link: Link | None, near: tuple[int, Link] | None,
    speeds: tuple[float, ...] | None, **outputs: Any,
) -> None:  # fmt: skip
    """Run the SCHEDULE (text) on paper, with the COSTS (JSON) of its layers."""
    from tf_ooo.planning.simulation.simulator import simulate as run

    loaded = load_schedule(schedule)
    devices = 1 + max((device for device, _ in loaded.lanes), default=0)
    table = with_devices(CostTable.load(costs), devices, link, near, speeds)
    try:
        timeline = run(loaded, table, steps=steps)
    except ScheduleError as error:
        raise ScheduleError(f"{schedule}: {error}") from error
    names = _names_of(table.layers)

    def page() -> Page:
        places = _places(timeline.schedule, len(table.layers))
        costs_table = layer_table(table.layers, places, "micro-batch")
        return Page(title(timeline), chart=chart_of(timeline, None, names), sections=[costs_table])

    Outputs(**outputs).show(timeline, table=timeline_table(timeline), page=page, layers=names)


def _page_of(
    plan: Plan,
    timeline: Timeline,
    rows: CandidateRows,
    layers: Sequence[LayerCosts],
    assumed: Sequence[str],
    notes: Sequence[str],
) -> Page:
    """Build the page of a plan: the choice and its reason, its assumptions, and the picture."""
    trial, schedule, compared = plan.trial, plan.trial.schedule, rows.reference
    alone = over_one_device(trial)
    steps_s = {"one device, the same work": one_device_s(schedule, trial.problem.layers)}
    if compared is not None:
        steps_s[compared.name] = compared.step_s
    return Page(
        f"Plan: {title(timeline)}",
        _headline(trial, rows),
        "back" if alone is not None and alone < 1 else "plain",
        bars=bars_of({**steps_s, schedule.policy: trial.step_s}, schedule.policy),
        bars_title="Predicted time of a step",
        chart=chart_of(timeline, None, _names_of(layers), plan.problem.limits_bytes),
        drawn="As planned",
        sections=[
            Table("Schedules compared", *rows.cells(schedule.policy), wide=True),
            Listed("Assumed", assumed),
            Listed("Notes", notes),
            layer_table(layers, _places(schedule, len(layers)), "micro-batch"),
        ],
    )


def _headline(trial: Trial, rows: CandidateRows) -> str:
    text = f"predicted {time_text(trial.step_s)} a step with {trial.schedule.policy}"
    alone, compared = over_one_device(trial), rows.reference
    if alone is not None and trial.schedule.devices * trial.schedule.workers > 1:
        text += f"; {alone:.2f}x as fast as one device"
    if compared is not None and compared.trial is not None and compared.name != trial.schedule.policy:
        ratio = over(trial, compared.trial)
        text += "" if ratio is None else f", {ratio:.2f}x as fast as {compared.name}"
    return text


def _names_of(layers: Sequence[LayerCosts]) -> dict[int, str]:
    return {number: layer.name for number, layer in enumerate(layers) if layer.name}


def _stage_notes(schedule: Schedule, layers: Sequence[LayerCosts]) -> Iterator[str]:
    """Yield notes on the layers that the user's own stages have to hold."""
    for stage, rank in enumerate(schedule.device_of_stage):
        held = schedule.layers_of(stage)
        ends = [layers[number].name or f"layer {number}" for number in (held[0], held[-1])]
        yield f"stage {stage} on rank {rank}: {' to '.join(dict.fromkeys(ends))}"


def _places(schedule: Schedule, count: int) -> list[str]:
    """Return each layer's stage and device; empty where its tasks are on several devices, or all on one."""
    if schedule.mode != "pipeline" or schedule.devices == 1:
        return []
    stages, devices = len(schedule.stages) or count, schedule.device_of_stage
    places = {
        layer: f"{stage}, {devices[stage]}" for stage in range(stages) for layer in schedule.layers_of(stage)
    }
    return [places.get(layer, "") for layer in range(count)]


@contextlib.contextmanager
def said_to_a_file(problem: Problem) -> Iterator[None]:
    """Say in a line on stderr, if that is no terminal, that planning takes long: nothing hangs."""
    if Console(file=sys.stderr).is_terminal:
        yield
        return
    layers, devices, microbatches = len(problem.layers), problem.devices, problem.microbatches
    tasks = layers * (len(_TASKS) * microbatches + 1)
    text = f"planning {layers} layers on {devices} devices, {microbatches} micro-batches: {tasks} tasks ..."
    with if_it_takes(SAID_AFTER_S, functools.partial(click.echo, text, err=True)):
        yield


class Bar:
    """Shows, inside ``progress``, which of ``total`` schedules is made, and its search's progress.

    It is shown on the standard error if that is a terminal.
    """

    def __init__(self, total: int) -> None:
        console = Console(file=sys.stderr)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._policies = self.progress.add_task("schedules", total=total, completed=-1)
        self._search = self.progress.add_task("search", total=1, visible=False)

    def policy(self, name: str) -> None:
        """Show that the next schedule is begun."""
        self.progress.update(self._policies, advance=1, description=f"{name:<20}")
        self.progress.update(self._search, visible=False)

    def search(self, done: int, of: int, best_s: float) -> None:
        """Show that a search has tried ``done`` of ``of`` schedules."""
        text = f"  best {time_text(best_s):<13}"
        self.progress.update(self._search, completed=done, total=of, visible=True, description=text)
