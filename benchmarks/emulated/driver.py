"""The process that trains all ways of a case on emulated devices, in turns: layers whose tasks are waits."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from os import environ
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.cases import Case, Measured, Way, take_turns
from benchmarks.models import SEED, Workload
from benchmarks.runners.steps import Fit, started, train_in_turns
from tf_ooo import Link, Pipeline
from tf_ooo.costs.devices import device as known_device
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.layer_work import dense_layer, transformer_layer
from tf_ooo.costs.table import CostTable
from tf_ooo.demo.emulated import Emulated
from tf_ooo.demo.training import gpt_shares
from tf_ooo.demo.waits import LOG, NAME_BYTES, Log, prefer
from tf_ooo.hosts.worker import serve
from tf_ooo.modes.pipeline import tasks_of
from tf_ooo.modes.pipeline.planning import PlanRequest, make_plan, step_s_of
from tf_ooo.planning.building.pipeline import StagedLayers, interleaved
from tf_ooo.planning.building.stages import merged
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.model.schedule_file import ScheduleFile
from tf_ooo.rewriting.step_graph import StepGraph

# Messages are small: what they take is the runtime's own time.
ROWS, WIDTH = 2, 1024
# Megatron-LM reached this share of the peaks in NVIDIA's data sheet (312 TFLOP/s in 16 bits, 2039 GB/s) with
# 1.7 B weights (arXiv 2104.04473, table 1).
_A100 = known_device("a100", "fp16").derated(0.44)
_HIDDEN, _HEADS, _SEQUENCE, _MICROBATCH = 1024, 16, 512, 16
# Words, and the share of the tokens that have a loss.
_TRANSFORMERS = {"bert_large": (30_522, 0.15), "gpt2": (50_257, 1.0)}


def _rows(model: str, layers: int) -> list[tuple[float, float, float]]:
    """Return F, dO and dW of layers: seconds of a transformer on an A100, from its FLOP and bytes, or shares.

    ``bert_large`` (arXiv 1810.04805) and ``gpt2`` medium (Radford et al. 2019): the last layer is the output
    matrix; the embedding's look-up is left out.  ``equal``: all alike.  ``gpt``: an embedding, which takes
    next to nothing, blocks, and a head of two and a half blocks.  ``unet``: they fall to a third towards the
    middle.
    """
    if model in _TRANSFORMERS:
        words, share = _TRANSFORMERS[model]
        blocks = [transformer_layer(_HIDDEN, _HEADS, _SEQUENCE, _MICROBATCH)] * (layers - 1)
        head = dense_layer(round(_SEQUENCE * _MICROBATCH * share), _HIDDEN, words, element_bytes=2)
        costs = [work.costs(_A100) for work in (*blocks, head)]
        return [(of.forward_s, of.output_grad_s, of.weight_grad_s) for of in costs]
    if model == "gpt":
        return gpt_shares(layers - 2)
    far = np.abs(np.linspace(-1, 1, layers)) if model == "unet" else np.full(layers, 0.5)
    return [(0.5 + x, 0.5 + x, 0.5 + x) for x in far.tolist()]


def costs_of(model: str, layers: int, devices: int, task_s: float | None, latency_s: float) -> CostTable:
    """Return the layers' seconds; ``task_s``: of all F of a device on average, None: the model says it.

    No step computes the first layer's dO.
    """
    rows, output_bytes = _rows(model, layers), 4.0 * ROWS * WIDTH
    unit_s = 1.0 if task_s is None else task_s * devices / sum(forward for forward, _, _ in rows)
    like = LayerCosts(
        0.0, 0.0, 0.0, activation_bytes=output_bytes, weight_bytes=4.0 * WIDTH, output_bytes=output_bytes
    )
    costs = [
        replace(like, forward_s=f * unit_s, output_grad_s=do * unit_s, weight_grad_s=dw * unit_s,
                name=f"layer_{number:03d}")
        for number, (f, do, dw) in enumerate(rows)
    ]  # fmt: skip
    costs[0] = replace(costs[0], output_grad_s=0.0)
    return CostTable(tuple(costs), Link(latency_s), rows=ROWS)


# A stage's F, dO or dW in one micro-batch; B is dO and dW, where a stage sends its dO only after its dW.
_Part = tuple[str, int, int]
# Clocks are read one after the other.
_LEAST_S = 1e-6


class Observed:
    """This was seen in all steps of a schedule so far; ``tasks``: of each op, by its name.

    ``gaps_s`` has seconds of a ``task``, from the end of one to the start of the next one on its device; of a
    ``message``, to the start of one on another device that waited for it; and of a ``step``, all of it but
    the time from its first task's start to its last one's end.  ``violations`` counts tasks that began before
    the one in front of them had ended, records of no task, and devices that ran another's tasks; ``pairs``
    the neighbours that were looked at.
    """

    def __init__(self, schedule: Schedule, tasks: Mapping[str, Task]) -> None:
        self._fused, self._device_of_stage = schedule.fused_backward, schedule.device_of_stage
        self._lanes = [dict.fromkeys(map(self._part, lane)) for lane in schedule.lanes.values()]
        self._lane_of = {part: number for number, lane in enumerate(self._lanes) for part in lane}
        self._tasks = {name.encode()[1 - NAME_BYTES :]: task for name, task in tasks.items()}
        self.gaps_s: dict[str, list[float]] = {"task": [], "message": [], "step": []}
        self.violations = self.pairs = 0
        self.turns: list[tuple[float, np.ndarray]] = []  # seconds and records of each step

    def _part(self, task: Task) -> _Part:
        fused = self._fused and task.kind in ("dO", "dW")
        return "B" if fused else task.kind, task.stage, task.microbatch

    def add(self, took_s: float, records: np.ndarray) -> None:
        """Look at the records of one step, which took so long."""
        self.turns.append((took_s, records))
        self.gaps_s["step"].append(took_s - float(records["end"].max() - records["start"].min()))
        spans: dict[_Part, tuple[float, float]] = {}
        places = set()
        for _, began, ended, device, name in records.tolist():
            if name not in self._tasks:
                self.violations += 1
                continue
            part = self._part(self._tasks[name])
            start, end = spans.get(part, (began, ended))
            spans[part] = min(start, began), max(end, ended)
            places.add((self._lane_of[part], device))
        self.violations += len(places) - len({lane for lane, _ in places})
        for lane in self._lanes:
            before_s = 0.0
            for part in lane:
                if part in spans:  # nothing waits in others
                    self._look_at(part, before_s, spans)
                    before_s = spans[part][1]

    def _look_at(self, part: _Part, before_s: float, spans: Mapping[_Part, tuple[float, float]]) -> None:
        (kind, stage, microbatch), start_s = part, spans[part][0]
        source = kind, stage + (-1 if kind == "F" else 1), microbatch
        far = kind != "dW" and source in spans and self._lane_of[source] != self._lane_of[part]
        sent_s = spans[source][1] if far else 0.0
        if before_s:
            self.pairs += 1
            self.violations += start_s < before_s - _LEAST_S
        if max(sent_s, before_s):
            self.gaps_s["message" if sent_s > before_s else "task"].append(start_s - max(sent_s, before_s))

    def median_turn(self) -> list[list[Any]]:
        """Return device, kind, stage, micro-batch, start and end of each task of the median step, as JSON."""
        _, records = sorted(self.turns, key=lambda turn: turn[0])[len(self.turns) // 2]
        began_s = records["start"].min()
        known = [
            (*times_s, self._tasks[name]) for _, *times_s, _, name in records.tolist() if name in self._tasks
        ]
        return [
            [self._device_of_stage[of.stage], of.kind, of.stage, of.microbatch]
            + [round(start - began_s, 6), round(end - began_s, 6)]
            for start, end, of in known
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return medians and 90th percentiles in microseconds, as JSON."""
        gaps = {
            f"per_{name}_us": [round(float(value) * 1e6, 1) for value in np.percentile(gaps_s, [50, 90])]
            for name, gaps_s in self.gaps_s.items()
            if gaps_s
        }
        return {**gaps, "violations": int(self.violations), "pairs": self.pairs}


def interleaved_zero_bubble(devices: int, microbatches: int, chunks: int) -> Schedule:
    """ScheduleInterleavedZeroBubble; ValueError where torch does not take so many micro-batches."""
    if microbatches % max(1, microbatches // devices):
        raise ValueError(f"torch does not divide {microbatches} micro-batches among {devices} devices")
    layers = (LayerCosts(1.0, 1.0, 1.0),) * (devices * chunks)
    stages = StagedLayers.of(Problem(layers, devices, microbatches, mode="pipeline"), chunks)
    lanes = interleaved(stages, chunks, microbatches, 1, delayed=True)
    return Schedule("pipeline", "torch_interleaved_zb", lanes, microbatches=microbatches)


def zbv(devices: int, microbatches: int) -> Schedule:
    """ScheduleZBVZeroBubble: two stages on each device, in a V; needless micro-batches are left out."""
    lanes = {}
    for device in range(devices):
        counts: Counter[tuple[str, int]] = Counter()
        tasks = []
        for kind, stage in _zbv(device, devices, max(2 * devices - 1, microbatches)):
            tasks.append(Task(kind, stage, counts[kind, stage]))
            counts[kind, stage] += 1
        kept = [task for task in tasks if task.microbatch < microbatches]
        lanes[device, 0] = TaskList([*kept, Task("U", 2 * devices - 1 - device), Task("U", device)])
    return Schedule("pipeline", "torch_zbv", lanes, microbatches=microbatches)


def _zbv(device: int, devices: int, count: int) -> Iterator[tuple[str, int]]:
    down, back, after = device, 2 * devices - 1 - device, devices - device
    backward, backward_back = [("dO", down), ("dW", down)], [("dO", back), ("dW", back)]
    yield from [("F", down)] * (2 * after - 1)
    yield from [("F", back), ("F", down)] * device
    yield from [("F", back), *backward_back] * after
    for forward in range(2 * devices - 1 - device, devices - 1 - device + count):
        yield from [("F", down)] * (forward < count)
        yield from (*backward, ("F", back), *backward_back)
    yield from [("dO", down), ("dO", back)] * device
    yield from backward * after
    yield from [("dW", back)] * device
    yield from [("dW", down)] * device


# Tasks of a step of which a picture can be drawn; of more the median turn is not kept.
_MOST_DRAWN = 100
_TORCH: Mapping[str, Callable[..., Schedule]] = {
    order.__name__: order for order in (interleaved_zero_bubble, zbv)
}


def workload_of(table: CostTable, microbatches: int = 1) -> Workload:
    """Compile a model of such layers, always with the same names: graphs of one kind are alike."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(SEED)
    layers = [
        Emulated((layer.forward_s, layer.output_grad_s, layer.weight_grad_s), name=layer.name)
        for layer in table.layers
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers], name="emulated")
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    x, y = np.random.default_rng(SEED).normal(size=(2, ROWS * microbatches, WIDTH)).astype("f4")
    return Workload(model, x, y)


def serve_worker(cluster: str, task: int) -> None:
    """Be a worker with an emulated device."""
    prefer()  # and with it all threads that are started from here
    serve(cluster, task, inter_op_threads=8, intra_op_threads=1)


def schedule_of(options: Mapping[str, Any], table: CostTable, devices: int, microbatches: int) -> Schedule:
    """Plan a way of others, with the number of chunks that is fastest on paper, where it takes the sizes."""
    if options.get("least_microbatches", 0) * devices > microbatches:
        raise ValueError(f"torch takes no fewer micro-batches than stages, got {microbatches}")
    units = tuple((layer, layer) for layer in range(len(table.layers)))
    basic = PlanRequest(options.get("schedule", "auto"), devices, microbatches, table.link)
    counts = range(2, len(units) // devices + 1)
    plans = []
    for chunks in [{"chunks": count} for count in counts] if "chunked" in options else [{}]:
        wanted = replace(basic, options=chunks)
        if "torch" in options:
            order = _TORCH[options["torch"]](devices, microbatches, **chunks)
            wanted = replace(basic, own=ScheduleFile(order.policy, order.to_text(), order))
        plans.append(make_plan(table.layers, units, wanted))
    if not plans:
        raise ValueError(f"{len(units)} layers are too few for two stages on each of {devices} devices")
    plan = min(plans, key=lambda plan: plan.trial.step_s)
    fused = plan.schedule.fused_backward and not options.get("unfused")
    return replace(plan.schedule, stages=plan.problem.bounds, fused_backward=fused)


class Run(Fit):
    """The steps of one way; the first of them makes the plan."""

    def __init__(
        self, options: Pipeline, table: CostTable, known: tuple[StepGraph, CostTable] | None
    ) -> None:
        super().__init__(workload_of(table, options.microbatches or 1), options, known)
        self.start()
        self._layers, self._is_ours = table.layers, options.schedule == "auto"
        self.observed = Observed(self.schedule, tasks_of(self.report.rewritten_graph))

    def observed_step_s(self, log: Log) -> float:
        """Run a step, look at its log, and return its seconds."""
        log.new()
        took_s = self.step_s()
        self.observed.add(took_s, log.new())
        return took_s

    def about(self) -> dict[str, Any]:
        schedule, turn = self.schedule, self.observed.median_turn()
        stages = merged(self._layers, schedule.stages, schedule.microbatches)
        return {
            "schedule": schedule.policy,
            "chunks": len(schedule.stages) // schedule.devices,
            "fused": schedule.fused_backward,
            "simulated_s": step_s_of(replace(schedule, stages=()), stages, Link()),  # with no time in between
            **self.observed.to_dict(),
            **({"order": schedule.to_text()} if self._is_ours else {}),
            **({"turn": turn} if len(turn) <= _MOST_DRAWN else {}),
        }


def measured(case: Case, cluster: str) -> Measured:
    """Run all ways in turns, and train with stock Keras as often; with workers nothing is computed here."""
    devices = case.parameters["devices"]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2 * devices + 4)
    if not cluster:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    parameters, log = {"task_s": None, **case.parameters}, Log(environ[LOG])
    names = ("model", "layers", "devices", "task_s", "latency_s")
    table = costs_of(*(parameters[name] for name in names))
    log.wait(0)
    microbatches = parameters["microbatches"]
    settings = {"costs": table, "devices": cluster or devices, "microbatches": microbatches,
                "profile_steps": 0, "compare": False, "check_loss": False}  # fmt: skip
    known: list[tuple[StepGraph, CostTable] | None] = []

    def start(way: Way) -> Run:
        # The first way's schedule is a file: costs of whole layers are then taken as they are, and no layer
        # is divided, in the ways behind it neither.
        schedule = "auto"
        if "auto" not in way.options:
            schedule = f"{folder}/{way.name}.txt"
            text = schedule_of(way.options, table, devices, microbatches).to_text()
            Path(schedule).write_text(text)
        run = Run(Pipeline(schedule=schedule, **settings), table, known[0] if known else None)
        known.append(run.measured)
        return run

    def stock() -> Workload:
        log.wait(0)
        return workload_of(table, microbatches)

    with tempfile.TemporaryDirectory() as folder:
        runs, not_run = started(case, start)
    preferred = prefer()
    log.wait(1)
    take_turns({name: run.step_s for name, run in runs.items()}, 1)
    count, ways, bits = train_in_turns(runs, case.turns, lambda run: run.observed_step_s(log), stock)
    about = {"weights": WIDTH * len(table.layers), "steps": count, "preferred": preferred}
    return Measured(ways, bits, about=about, not_run=not_run)
