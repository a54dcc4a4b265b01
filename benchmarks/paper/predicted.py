"""Predicts the published configurations on the paper's hardware, by formula; nothing is measured.

Costs are a roofline of a V100 in single precision at 80% of its published peaks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from benchmarks.paper.networks import PaperNetwork, PaperRun
from benchmarks.planner import simulated
from tf_ooo.costs.devices import DeviceModel, elementwise, gemm
from tf_ooo.costs.devices import device as known_device
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.layer_work import LayerWork, dense_layer
from tf_ooo.costs.models import costs_on, model_costs, transformer
from tf_ooo.errors import OptionsError
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import After, Schedule, Task, TaskList
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

GPIPE, FASTFORWARD, PUSH, MODULO = "gpipe", "fastforward", "fastforward_push", "modulo"
# How many NVLinks lead from a GPU of a p3.16xlarge (row) to another (`nvidia-smi topo -m`); a p3.8xlarge has
# the first four GPUs.  A link carries 25 GB/s in each direction (V100 datasheet); PCIe is used without one.
_NVLINKS = ("01122000", "10210200", "12020010", "21200001", "20000112", "02001021", "00101202", "00012120")
NVLINK_BYTES_PER_S, PCIE_BYTES_PER_S, LATENCY_S = 2.5e10, 1e10, 5e-5
NVLINK = Link(LATENCY_S, NVLINK_BYTES_PER_S)
# Amazon's p3.16xlarge has 25 Gbit/s, smaller ones have 10.
_NETWORK_BYTES_PER_S = {8: 3.125e9, 4: 1.25e9, 1: 1.25e9}
# DeviceAllocatorManager.gpu_seq: neighbours have two NVLinks each, and so have the last and the first.
IN_ORDER, RING = (0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 2, 1, 5, 6, 7, 4)
# Kernels are launched in 5 us; captured graphs, which the authors run on one GPU, launch one in 1 us.
V100 = replace(known_device("v100").derated(0.8, 0.8), launch_s=5e-6)
CAPTURED = replace(V100, launch_s=1e-6)
# BytePS adds up within a machine, by PCIe, and each machine sends each gradient once.  How much it reaches of
# a p3.8xlarge's 10 Gbit/s is not published; one TCP connection there reaches half.
RATES_BYTES_PER_S = [1.25e9, 6.25e8]
# The update of layer i waits for the next step's F of layer i - 3 (num_dependency=3 in arguments.py and the
# edge in dp_schedule.py, of expr/data_par/code/OOO_backprop).
NUM_DEPENDENCY = 3
# BERT's WordPieces (Devlin et al. 2019), GPT-2's and GPT-3's byte pairs.
WORDS = {"bert": 30522, "gpt3": 50257}
# Numbers have 4 bytes.  Of the authors' scripts: words of a text, and hidden ones (max_predictions_per_seq).
BYTES, _LENGTH, _HIDDEN = 4, 128, 20
# Settings of a script that change nothing that the formulas count.
_NOT_COUNTED = {"vocabulary", "hidden", "classes", "channels", "pixels", "blocks"}


# The authors' pipelines: where their layers run, and which task waits for which. Facts are from
# github.com/mlsys-seo/ooo-backprop, commit 0beb419d; its code is not used. File names below are those of
# expr/pipe_par/code/OOO_backprop/schedule.


@dataclass(frozen=True)
class Pipeline:
    """One run of the authors' pipeline; its GPUs are on machines that have as many each."""

    layers: tuple[LayerCosts, ...]  # for one micro-batch
    devices: int
    machines: int
    microbatches: int
    style: str  # FASTFORWARD, PUSH or MODULO
    ends: bool = False  # the first layer is the embedding, the last is the head
    table_bytes: float = 0.0  # of the table that both share; 0: they share none
    gpus: Sequence[int] = RING  # their order in a machine for the style; GPipe has IN_ORDER
    holds: bool = True  # the last stage computes all dW after its last dO
    forward_first: bool = False  # where F and dO are both ready; TensorFlow's queue has no rule

    def bytes_per_s(self, source: int, target: int, gpus: Sequence[int]) -> float:
        each = self.devices // self.machines
        if source // each != target // each:
            return _NETWORK_BYTES_PER_S[each]
        links = int(_NVLINKS[gpus[source % each]][gpus[target % each]])
        return links * NVLINK_BYTES_PER_S or PCIE_BYTES_PER_S

    def stages(self, style: str) -> list[tuple[int, int, int]]:
        """Return first layer, last layer and device of each stage (DeviceAllocatorManager.get_gpu_idx).

        With a shared table, all styles but GPipe have the embedding on the last GPU
        (get_embedding_table_device).
        """
        count, last_device = len(self.layers) - 2 * self.ends, self.devices - 1
        few, more = divmod(count, self.devices)
        sizes = [few] + [few + 1] * more + [few] * (last_device - more)
        edges = accumulate([1] * count if style == MODULO else sizes, initial=int(self.ends))
        stages = [(first, after - 1, n % self.devices) for n, (first, after) in enumerate(pairwise(edges))]
        if not self.ends:
            return stages
        stages[-1] = (stages[-1][0], len(self.layers) - 1, last_device)
        if self.table_bytes and style != GPIPE:
            return [(0, 0, last_device), *stages]
        return [(0, *stages[0][1:]), *stages[1:]]

    def costs(self, stages: Sequence[tuple[int, int, int]], gpus: Sequence[int]) -> tuple[LayerCosts, ...]:
        """Return the layers, with messages as long as they would be on one NVLink."""
        layers = list(self.layers)
        for (_, last, source), (_, _, target) in pairwise(stages):
            slower = NVLINK_BYTES_PER_S / self.bytes_per_s(source, target, gpus) if source != target else 1
            layers[last] = replace(layers[last], output_bytes=layers[last].output_bytes * slower)
        return tuple(layers)

    def step_s(self) -> float:
        layers = self.costs(self.stages(self.style), self.gpus)
        return simulate(self.schedule(), layers, NVLINK).makespan_s

    def gpipe_s(self, recompute: bool = False) -> float:
        """Return seconds of a step of GPipe, whose last GPU sends the table's gradient for each micro-batch.

        The table stands on GPU 0 there, and each micro-batch's gradient of it is a tensor of its own
        (optimization.py, compute_grads; run_pretraining.py adds them up).  These messages were not measured.
        """
        stages = self.stages(GPIPE)
        layers, cut = self.costs(stages, IN_ORDER), tuple((first, last) for first, last, _ in stages)
        problem = Problem(layers, self.devices, self.microbatches, NVLINK, cut=cut)
        again = tuple(range(len(layers))) if recompute else ()
        timeline = simulate(replace(POLICIES["gpipe"].make(problem), recompute=again), layers, NVLINK)
        table_s = self.table_bytes / self.bytes_per_s(self.devices - 1, 0, IN_ORDER)
        arrived_s, sent = 0.0, {Task("dW", len(stages) - 1, m) for m in range(self.microbatches)}
        for end_s in sorted(event.end_s for event in timeline.iter_events() if event.task in sent):
            arrived_s = max(arrived_s, end_s) + table_s
        return max(timeline.makespan_s, arrived_s)

    def schedule(self) -> Schedule:
        """Return a schedule in which each GPU runs whatever is ready; tasks wait for those of _after."""
        stages, many = self.stages(self.style), self.microbatches
        numbers = range(len(stages))
        # A queue would hold these first: gradients of later stages, outputs of earlier ones.
        backward = [(n, m) for m in range(many) for n in reversed(numbers)]
        forward = [(n, m) for n in numbers for m in range(many)]
        queues = {"dO": backward, "dW": backward, "F": forward, "U": [(n, 0) for n in numbers]}
        kinds = ("F", "dO", "dW", "U") if self.forward_first else ("dO", "dW", "F", "U")
        lanes = {}
        for device in range(self.devices):
            tasks = [Task(k, n, m) for k in kinds for n, m in queues[k] if stages[n][2] == device]
            lanes[device, 0] = TaskList(tasks)
        schedule = Schedule("pipeline", self.style, lanes, microbatches=many, priority_lanes=frozenset(lanes))
        return replace(schedule, stages=tuple(stage[:2] for stage in stages), after=self._after(stages))

    def _after(self, stages: Sequence[tuple[int, int, int]]) -> tuple[After, ...]:
        """(task, what it waits for beside data, 0), as in ModelScheduleHelper."""
        own = int(len(stages) > 1 and stages[0][2] == self.devices - 1)  # the embedding is a stage: -1
        count, devices, many = len(stages) - own, self.devices, self.microbatches
        cap, modulo = min(devices, many) if self.style == PUSH else many, self.style == MODULO
        # The stage whose dW runs behind each one's dO: on the last GPU that of a round later.
        behind = [v if (v + 1) % devices else v + devices for v in range(count - 1)]
        pairs = [(v, m) for v in range(count - 1) for m in range(many)]
        # _schedule_forward_first_virtual_layers, _schedule_forward_second_last_virtual_layers
        waits = [(("F", -1, m + 1), ("F", 0, m)) for m in range(many - 1) if own]
        waits.append((("dO", count - 2, 0), ("F", count - 2, cap - 1)))
        # _schedule_ooo_backpropagation
        waits += [(("dW", behind[v], m), ("dO", v, m)) for v, m in pairs if modulo]
        held = devices - 1 if modulo else count - 1
        waits += [(("dW", held, m), ("dO", held, many - 1)) for m in range(many) if self.holds]
        # _schedule_micro_batch_race_condition: dW(m) runs before dO(m + 1), but on the last stage.
        waits += [(("dO", v, m + 1), ("dW", behind[v], m)) for v, m in pairs if m + 1 < many]
        # _schedule_virtual_layers_race_condition
        if modulo and count > devices:
            last = count - devices - 1
            waits += [(("dO", v, 0), ("dW", behind[v + devices], many - 1)) for v in range(last)]
            waits.append((("dO", last, 0), ("dO", count - 1, many - 1)))
        # _schedule_microbatch_cap_fastforward: as many micro-batches are in flight as GPUs, and fewer behind.
        waits += [(("F", v or -own, cap + m), ("dW", v, v + m)) for v, m in pairs if cap + m < many]
        return tuple((Task(a, v + own, m), Task(b, w + own, n), 0) for (a, v, m), (b, w, n) in waits)


class Prediction(NamedTuple):
    """Gains in a published configuration over the paper's baseline."""

    run: PaperRun
    authors: list[float]  # of the authors' schedule; two where two orders or rates are open
    auto: float  # of ours; in pipelines over a GPipe without a shared table, on one link
    chosen: str  # the schedule that ``auto`` chose


# Each setting is what ours is planned for, seconds of its baseline, and the authors' gains.
_Setting = tuple[tuple[LayerCosts, ...], dict[str, Any], float, list[float]]


def predictions(network: PaperNetwork, settings: Mapping[str, Any]) -> Iterator[Prediction]:
    """Yield one for each published configuration, with a user's settings in place of its own."""
    left_out = not_counted(network, settings)
    for run in network.runs_with({name: settings[name] for name in settings if name not in left_out}):
        count = run.settings.get("layers", 0)
        if run.style and count < run.devices:
            few = f"layers={count}: a published run has {run.devices} GPUs, each with a layer or more"
            raise OptionsError(few)
        # Modulo allocation takes a multiple of the GPUs as layers, or else it is fastforward.
        possible = replace(run, style=FASTFORWARD) if run.style == MODULO and count % run.devices else run
        layers, on, base_s, authors = _SETTINGS[network.mode.name](network, possible)
        auto = plan(layers=layers, schedule="auto", **on)
        yield Prediction(possible, authors, base_s / (auto.predicted_step_s or base_s), auto.policy)


def not_counted(network: PaperNetwork, settings: Mapping[str, Any]) -> list[str]:
    """Return which settings of a user the formulas do not have."""
    return [n for n in settings if n in _NOT_COUNTED or (n == "width" and network.script == "resnet")]


def _single(network: PaperNetwork, run: PaperRun) -> _Setting:
    on, options = {"mode": "single_device"}, dict(run.settings)
    depth = options.pop("layers", 121)
    name = f"densenet{depth}" if network.script == "densenet" else network.name
    base_s = _step_s(model_costs(name, V100, **options), "in_order", on)
    captured = model_costs(name, CAPTURED, **options)
    return captured, on, base_s, [base_s / _step_s(captured, "multi_stream", on)]


def _data_parallel(network: PaperNetwork, run: PaperRun) -> _Setting:
    layers = model_costs(f"resnet{run.settings['layers']}", V100, batch=run.settings["batch"])
    workers, authors = run.machines if run.machines > 1 else run.devices, []
    for rate in RATES_BYTES_PER_S if run.machines > 1 else [PCIE_BYTES_PER_S]:
        link = Link(LATENCY_S / (workers - 1), rate)
        on: dict[str, Any] = {"mode": "data_parallel", "devices": workers, "link": link}
        base_s = _step_s(layers, "in_order", on)
        authors.append(base_s / first_k_s(layers, run.k, on))
    return layers, on, base_s, authors


def first_k_s(layers: tuple[LayerCosts, ...], k: int, on: Mapping[str, Any]) -> float:
    """Return a step of reverse first-k in which updates wait as in the authors' graph."""
    k = min(k, len(layers))
    schedule = POLICIES["reverse_first_k"].make(Problem(layers, options={"k": k}, **on))
    waits = [(Task("U", i), Task("F", i - NUM_DEPENDENCY), 1) for i in range(NUM_DEPENDENCY, k)]
    return simulate(replace(schedule, after=tuple(waits)), layers, on["link"], steps=4).steady_step_s


def pipeline_of(network: PaperNetwork, run: PaperRun, ends: bool = True) -> Pipeline:
    """Return the authors' pipeline; ``ends``: with embedding and head where there are words."""
    ends = ends and network.script in WORDS
    layers = layers_of(network.script, run.settings, V100, ends)
    shares_table = ends and run.settings.get("task") != "finetune"
    table_bytes = float(BYTES * WORDS[network.script] * run.settings["width"]) if shares_table else 0.0
    return Pipeline(layers, run.devices, run.machines, run.microbatches, run.style, ends, table_bytes)


def _pipeline(network: PaperNetwork, run: PaperRun) -> _Setting:
    authors, last = pipeline_of(network, run), run.devices - 1
    gpipe_s = authors.gpipe_s()
    gains = [gpipe_s / replace(authors, forward_first=first).step_s() for first in (False, True)]
    link = NVLINK if run.machines == 1 else Link(LATENCY_S, authors.bytes_per_s(0, last, authors.gpus))
    on = {"mode": "pipeline", "devices": run.devices, "microbatches": run.microbatches, "link": link}
    return authors.layers, on, _step_s(authors.layers, "gpipe", on), gains


_SETTINGS = {"single_device": _single, "data_parallel": _data_parallel, "pipeline": _pipeline}


def _step_s(layers: tuple[LayerCosts, ...], schedule: str, on: dict[str, Any]) -> float:
    return plan(layers=layers, schedule=schedule, **on).predicted_step_s or 0.0


def why(network: PaperNetwork, run: PaperRun) -> Iterator[tuple[str, float]]:
    """Yield what the gain over GPipe is with the authors' settings, and without each of them."""
    authors, bare = pipeline_of(network, run), pipeline_of(network, run, ends=False)
    base_s, step_s = authors.gpipe_s(), authors.step_s()
    yield "all of the authors' settings", base_s / step_s
    yield "F before dO where both are ready", base_s / replace(authors, forward_first=True).step_s()
    if run.style == PUSH:
        yield "all forwards first (fastforward)", base_s / replace(authors, style=FASTFORWARD).step_s()
    yield "the last stage holds back no dW", base_s / replace(authors, holds=False).step_s()
    yield "GPUs 0 to 7 in order", base_s / replace(authors, gpus=IN_ORDER).step_s()
    if authors.table_bytes:
        yield "GPipe sends no gradient of the table", replace(authors, table_bytes=0).gpipe_s() / step_s
    if authors.ends:
        yield "no embedding and no head", bare.gpipe_s() / bare.step_s()
    yield "GPipe recomputes", authors.gpipe_s(recompute=True) / step_s
    problem = Problem(authors.layers, run.devices, run.microbatches, NVLINK)
    gpipe_s = simulated("gpipe", problem).makespan_s
    for name in ("fast_forward", "modulo", "zb_h1", "zb_h2"):
        yield f"this project's {name}", gpipe_s / simulated(name, problem).makespan_s


def layers_of(script: str, settings: Any, on: DeviceModel, ends: bool) -> tuple[LayerCosts, ...]:
    """Return the layers of a pipeline's network for one micro-batch; ``ends``: with embedding and head."""
    count, width, rows = settings["layers"], settings["width"], settings["batch"]
    if script == "rnn":
        return costs_on([_rnn(width, settings["length"], rows)] * count, on)
    if script == "feed_forward":
        dense = [dense_layer(rows, width, width, first=not n, name=f"dense{n}") for n in range(count)]
        return costs_on(dense, on)
    length = settings.get("length", _LENGTH)
    works = transformer(count, width, settings["heads"], length, rows, BYTES)
    if ends:
        answers = rows * (length if script == "gpt3" else _HIDDEN)
        words = WORDS[script] if settings.get("task") != "finetune" else 2
        head = dense_layer(answers, width, words, name="head")
        works = (_embedding(rows * length, width, WORDS[script]), *works, head)
    return costs_on(works, on)


def _embedding(words: int, width: int, vocabulary: int) -> LayerWork:
    """Words are looked up and normalized; the gradient is as large as the table."""
    forward, backward = elementwise(words * width, 6, BYTES), elementwise(vocabulary * width, 2, BYTES)
    out_bytes = float(words * width * BYTES)
    return LayerWork("embedding", (forward,), (), (backward,), vocabulary * width, out_bytes, out_bytes)


def _rnn(width: int, length: int, rows: int) -> LayerWork:
    """Plain cells: a product of all inputs at once, then one product a step."""
    inputs, weights = gemm(rows * length, width, width, BYTES), gemm(width, width, rows * length, BYTES)
    steps = (gemm(rows, width, width, BYTES), elementwise(rows * width, 3, BYTES)) * length
    out_bytes, parameters = float(rows * length * width * BYTES), 2 * width * width + width
    kernels = (inputs, *steps), (*steps, inputs), (weights, weights)
    return LayerWork("rnn", *kernels, parameters, 2 * out_bytes, out_bytes)
