"""Predicts the published configurations on the paper's hardware, by formula; nothing is measured.

Costs are a roofline of a V100 in single precision at 80% of its published peaks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.paper.networks import PaperNetwork, PaperRun
from benchmarks.paper.schedules import FASTFORWARD, IN_ORDER, LATENCY_S, MODULO, NVLINK, PUSH, Pipeline
from benchmarks.planner import simulated
from tf_ooo.costs.devices import DeviceModel, device, elementwise, gemm
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.layer_work import LayerWork, dense_layer
from tf_ooo.costs.models import costs_on, model_costs, transformer
from tf_ooo.errors import OptionsError
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Task
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

# Kernels are launched in 5 us; captured graphs, which the authors run on one GPU, launch one in 1 us.
V100 = replace(device("v100").derated(0.8, 0.8), launch_s=5e-6)
CAPTURED = replace(V100, launch_s=1e-6)
# BytePS adds up within a machine, by PCIe, and each machine sends each gradient once.  How much it reaches of
# a p3.8xlarge's 10 Gbit/s is not published; one TCP connection there reaches half.
PCIE_BYTES_PER_S, RATES_BYTES_PER_S = [1e10], [1.25e9, 6.25e8]
# The update of layer i waits for the next step's F of layer i - 3 (num_dependency=3 in arguments.py and the
# edge in dp_schedule.py, of expr/data_par/code/OOO_backprop).
NUM_DEPENDENCY = 3
# BERT's WordPieces (Devlin et al. 2019), GPT-2's and GPT-3's byte pairs.
WORDS = {"bert": 30522, "gpt3": 50257}
# Numbers have 4 bytes.  Of the authors' scripts: words of a text, and hidden ones (max_predictions_per_seq).
BYTES, _LENGTH, _HIDDEN = 4, 128, 20
# Settings of a script that change nothing that the formulas count.
_NOT_COUNTED = {"vocabulary", "hidden", "classes", "channels", "pixels", "blocks"}


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
    for rate in RATES_BYTES_PER_S if run.machines > 1 else PCIE_BYTES_PER_S:
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
