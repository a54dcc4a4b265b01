"""What runs say, setting by setting: each one's strongest baseline, ours, and what the plan predicted.

Where a run has several schedules of ours, the one with the shortest predicted step counts: ``auto`` would
take it, and no measured time has chosen it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tf_ooo.bench.data_parallel.rows import COLLECTIVES, PLAIN, SAME_STEPS, STOCK
from tf_ooo.bench.layerpipe.rows import BASELINES as BESIDE_LAYERPIPE
from tf_ooo.bench.pipeline.rows import BASELINES, TORCH
from tf_ooo.bench.shared.kept import Run
from tf_ooo.bench.shared.rows import Row
from tf_ooo.bench.shared.workloads import DATA_PARALLEL

ONE_CPU, MACHINE = "one cpu", "Machine"
# First columns that are left out where all settings of a table agree.
OPTIONAL = ("Micro-batches", "Cores", "Slow", "Rows", MACHINE)
# What older runs called the machine of those of today.
_OLDER_NAMES = {"two x86-64 cores": "AMD EPYC, 2 cores"}
_HOROVOD = "Horovod"
_NOT_REORDERED = ("in_order", PLAIN)
# First columns of what runs on workers; rows are those of one micro-batch.
_SHAPE = ("Workload", "Devices", "Micro-batches", "Cores", "Rows")
_SHORT = ("Workload", "Devices", "Micro-batches")
_ORDERS = ("Workload", "Batch", "Order")


@dataclass(frozen=True)
class Figure:
    """One setting in one run.

    Attributes:
        setting: a cell for each of the table's first columns.
        asked: which gain was to be reached; empty: none.
        baseline, ours: names; ``baseline_s``, ``ours_s`` seconds of a step.
        alone: how many times as fast reordering alone makes it; None: not measured.
        planned_s: what the plan said before the run; ``corrected_s``: given what the run's controls took.
        bound_s: no step can be shorter.
        efficiencies: ours and the baseline's, each against its own step on one device; (): not measured.
        date: of the run.
    """

    setting: tuple[str, ...]
    baseline: str
    baseline_s: float
    ours: str
    ours_s: float
    asked: str = ""
    alone: float | None = None
    planned_s: float | None = None
    corrected_s: float | None = None
    bound_s: float | None = None
    efficiencies: tuple[float, ...] = ()
    date: str = ""

    @property
    def gain(self) -> float:
        """How many times as fast as the baseline."""
        return self.baseline_s / self.ours_s


@dataclass(frozen=True)
class Kind:
    """A table: of which command's runs, its name on the page, its title and first columns, and how to read a
    run.

    ``looked_up``: of the columns those by which a reader looks for a line; settings that agree in them are
    one line of the short table.
    """

    bench: str
    name: str
    title: str
    columns: tuple[str, ...]
    looked_up: tuple[str, ...]
    read: Callable[[Run], Iterator[Figure]]

    @property
    def setting(self) -> tuple[str, ...]:
        """Names of what tells settings apart."""
        return (*self.columns, MACHINE)


def of_data_parallel(run: Run) -> Iterator[Figure]:
    """Runs in which stock Horovod has as many steps in one execution, in turns with ours.

    Through TensorFlow's collectives, ours has a figure of its own.
    """
    for rows in _groups(run.rows, "workload", "devices", "bandwidth_bit_s", "cores", "batch_rows"):
        stock = [row for row in rows if row["schedule"].startswith(STOCK)]
        if all(row["schedule"] != SAME_STEPS[0] for row in stock):
            continue
        through_collectives = [row for row in rows if row["schedule"].startswith(COLLECTIVES)]
        through_horovod = [row for row in rows if row not in stock and row not in through_collectives]
        yield from _through(_HOROVOD, through_horovod, stock)
        yield from _through(COLLECTIVES, through_collectives, stock)


def _through(engine: str, rows: Sequence[Row], stock: Sequence[Row]) -> Iterator[Figure]:
    ours = [row for row in rows if not row["schedule"].endswith(_NOT_REORDERED)]
    plain = [row["step_s"] for row in rows if row["schedule"].endswith(PLAIN)]
    if not ours:
        return
    best, times = by_plan(ours), ours[0].get("communication")
    link = f"{times:g} x computing" if times else f"{best.get('bandwidth_bit_s', 0) / 1e6:.0f} Mbit/s"
    given = "".join(f", {name}={value}" for name, value in best.get("knobs", {}).items())
    asked = "1.15 on three of five" if 0.7 <= (times or _measured_times(best)) <= 1.3 else "0.98"
    yield _figure(
        (
            best["workload"], str(best["devices"]), link, str(best.get("steps", "")), engine + given,
            best.get("messages", "wait for a core"), f"{best.get('cores', 0.5):g}", _rows_text(best),
        ),
        min(stock, key=step_s), best,
        asked=asked if engine == _HOROVOD else "",
        alone=plain[0] / best["step_s"] if plain else None, bound_s=best.get("bound_s"),
    )  # fmt: skip


def _measured_times(row: Row) -> float:
    """How many times as long as computing communication took in the run; 0: it does not say."""
    return float(row.get("communication_s", 0.0) / row.get("compute_s", math.inf))


def _rows_text(row: Row) -> str:
    """Of each worker's batch; runs that do not say it took the network's own."""
    network = DATA_PARALLEL.get(row["workload"])
    return str(row.get("batch_rows") or (network.batch if network else ""))


def of_pipelines(run: Run) -> Iterator[Figure]:
    """Against the fastest of GPipe, 1F1B and interleaved 1F1B, fused and not."""
    for rows in _pipelines(run):
        stock = [row for row in rows if row["schedule"] in BASELINES]
        ours = [row for row in rows if row["schedule"] not in BASELINES and row["mode"] == "pipeline"]
        if stock and ours:
            first = rows[0]
            is_resnet = (first["workload"], first["devices"], first["microbatches"]) == ("resnet", 2, 4)
            asked = "1.15 over 1f1b" if is_resnet else ""
            bound_s = first.get("bound_s")
            yield _figure(_shape(first), min(stock, key=step_s), by_plan(ours), asked=asked, bound_s=bound_s)


def beside_torch(run: Run) -> Iterator[Figure]:
    """torch's fastest schedule against ours."""
    for rows in _pipelines(run):
        torch = [row for row in rows if row["mode"] == TORCH]
        ours = [row for row in rows if row["mode"] == "pipeline"]
        if torch and ours:
            theirs, best = min(torch, key=step_s), by_plan(ours)
            figure = _figure(_shape(rows[0]), theirs, best, asked="1, efficiency too")
            efficiencies = best["efficiency"], theirs["efficiency"]
            yield dataclasses.replace(figure, efficiencies=efficiencies)


def of_layerpipe(run: Run) -> Iterator[Figure]:
    """LayerPipe against the fastest of PipeDream, PipeDream-2BW and a synchronous pipeline."""
    for rows in _groups(run.rows, "workload", "variant", "devices", "cores"):
        stock = [row for row in rows if row.get("schedule") in BESIDE_LAYERPIPE]
        ours = [row for row in rows if str(row.get("schedule")).startswith("layerpipe")]
        if stock and ours:
            first = rows[0]
            wide = first["workload"] in ("resnet18", "vgg16") and first["devices"] in (3, 4)
            workload, devices, _, *cores_and_rows = _shape(first)
            setting = (workload, devices, *cores_and_rows)
            yield _figure(setting, min(stock, key=step_s), by_plan(ours), asked="1.15" if wide else "")


def of_meshes(run: Run) -> Iterator[Figure]:
    """What was chosen, against one device."""
    for row in run.rows:
        if "over_one_device" in row:
            seconds = row["step_s"]
            yield Figure(
                _shape(row), "one device", seconds["one device"], row["chosen"],
                seconds[row["chosen"]], asked="1", planned_s=row["predicted_s"].get(row["chosen"]),
            )  # fmt: skip


def of_unequal(run: Run) -> Iterator[Figure]:
    """Stages cut for each worker's own speed, against stages for workers all alike."""
    for row in run.rows:
        if "medians_s" in row:
            medians = row["medians_s"]
            yield Figure(
                (*_shape(row), f"{row['slow']:g}"), "as if all were alike", medians["alike"],
                "own speeds", medians["own speeds"], planned_s=row["predicted_s"]["own speeds"],
            )  # fmt: skip


def of_one_cpu(run: Run) -> Iterator[Figure]:
    """Orders of the backward pass on one CPU device, against stock in turns; ``auto`` compares none there."""
    for row in run.rows:
        if "baseline_s" in row:
            ours_s = statistics.median(row["step_s"])
            setting = (row["workload"], str(row["batch"]), row["schedule"])
            yield Figure(setting, "stock", row["speedup"] * ours_s, row["schedule"], ours_s)


def of_one_stage(run: Run) -> Iterator[Figure]:
    """One stage and one micro-batch against stock fit, in pairs of steps: what a pipeline's steps cost."""
    for row in run.rows:
        if "overhead" in row:
            ours_s = row["step_s"]
            yield Figure((row["workload"],), "stock fit", row["speedup"] * ours_s, "one stage", ours_s)


KINDS = (
    Kind(
        "data-parallel",
        "data parallel",
        "Data parallel",
        ("Workload", "Workers", "Communication", "Steps together", "Through", "Messages", "Cores", "Rows"),
        ("Workload", "Workers", "Communication", "Through"),
        of_data_parallel,
    ),
    Kind("pipeline", "pipelines", "Pipelines", _SHAPE, _SHORT, of_pipelines),
    Kind("pipeline", "torch", "Pipelines beside torch.distributed.pipelining", _SHAPE, _SHORT, beside_torch),
    Kind(
        "layerpipe",
        "layerpipe",
        "LayerPipe",
        ("Workload", "Devices", "Cores", "Rows"),
        ("Workload", "Devices", "Rows"),
        of_layerpipe,
    ),
    Kind("mesh", "meshes", "Meshes", _SHAPE, _SHORT, of_meshes),
    Kind("unequal", "unequal", "Devices of unequal speed", (*_SHAPE, "Slow"), (*_SHORT, "Slow"), of_unequal),
    Kind("pipeline", "one stage", "What a pipeline's steps cost", ("Workload",), ("Workload",), of_one_stage),
    Kind("single-cpu", ONE_CPU, "One CPU device", _ORDERS, _ORDERS, of_one_cpu),
)


def figures_of(kind: Kind, runs: Iterable[Run]) -> list[list[Figure]]:
    """Of each setting all figures, the oldest first; another processor, or more cores, is another setting."""
    settings: dict[tuple[str, ...], list[Figure]] = {}
    for run in runs:
        if run.bench == kind.bench:
            machine = machine_text(run.machine)
            for figure in kind.read(run):
                setting = (*figure.setting, machine)
                dated = dataclasses.replace(figure, setting=setting, date=run.date)
                settings.setdefault(setting, []).append(dated)
    return [settings[setting] for setting in sorted(settings, key=_in_order)]


def looked_up(kind: Kind, settings: Iterable[list[Figure]]) -> list[list[list[Figure]]]:
    """The settings of each line of the short table, the one that was run last at the end."""
    places = [kind.setting.index(column) for column in kind.looked_up]
    lines: dict[tuple[str, ...], list[list[Figure]]] = {}
    for figures in sorted(settings, key=lambda figures: figures[-1].date):
        lines.setdefault(tuple(figures[-1].setting[place] for place in places), []).append(figures)
    return [lines[line] for line in sorted(lines, key=_in_order)]


def _in_order(setting: tuple[str, ...]) -> list[tuple[float, str]]:
    """Numbers by size, words by letters."""
    return [(float(cell), "") if cell.replace(".", "", 1).isdigit() else (-1.0, cell) for cell in setting]


def machine_text(machine: str) -> str:
    """``Intel Xeon, 2 cores``: what tells a run's machine from others, without memory and versions."""
    named = re.sub(r", \d+ GB$|\((R|TM)\)| Processor(?=,)", "", machine.partition(";")[0])
    return _OLDER_NAMES.get(named, named)


def _figure(
    setting: tuple[str, ...], stock: Row, ours: Row, asked: str = "", alone: float | None = None,
    bound_s: float | None = None,
) -> Figure:  # fmt: skip
    planned_s, predicted_s = ours.get("planned_step_s"), ours.get("predicted_step_s")
    if ours["mode"] == "data_parallel":  # nothing of the run is given to the prediction
        planned_s, predicted_s = predicted_s, None
    return Figure(
        setting, stock["schedule"], stock["step_s"], ours["schedule"], ours["step_s"], asked, alone,
        planned_s, predicted_s, bound_s,
    )  # fmt: skip


def by_plan(rows: Sequence[Row]) -> Row:
    """``auto`` where it was run, else what the plan predicts to be fastest."""
    named = [row for row in rows if row["schedule"] == "auto"]
    return min(named or rows, key=planned_s)


def planned_s(row: Row) -> float:
    """The plan's own seconds; older rows have only those that were given what the run's controls took."""
    return float(row.get("planned_step_s") or row.get("predicted_step_s") or math.inf)


def step_s(row: Row) -> float:
    """Of the median turn."""
    return float(row["step_s"])


def _shape(row: Row) -> tuple[str, ...]:
    """Cells for :data:`_SHAPE`."""
    workload = " ".join(filter(None, (row["workload"], row.get("variant"))))
    microbatches, rows = row.get("microbatches", ""), row.get("batch_rows", "")
    return workload, str(row["devices"]), str(microbatches), f"{row.get('cores', 1):g}", str(rows)


def _pipelines(run: Run) -> Iterator[list[Row]]:
    rows = [row for row in run.rows if "predicted_step_s" in row or row.get("mode") == TORCH]
    yield from _groups(rows, "workload", "devices", "microbatches", "cores")


def _groups(rows: Iterable[Row], *keys: str) -> Iterator[list[Row]]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    yield from groups.values()
