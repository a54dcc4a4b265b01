"""Predicts the published configurations on the paper's hardware, by formula; nothing is measured.

Costs are a roofline of a V100 in single precision at 80% of its published peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.paper.layers import WORDS, layers_of, table_bytes
from benchmarks.paper.networks import DATA_PARALLEL, PIPELINE, SINGLE, PaperNetwork, PaperRun
from benchmarks.paper.schedules import (
    FASTFORWARD,
    LATENCY_S,
    MODULO,
    NVLINK_BYTES_PER_S,
    PCIE_BYTES_PER_S,
    PUSH,
    Pipeline,
)
from tf_ooo.costs.devices import device
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.models import model_costs
from tf_ooo.errors import OptionsError
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Task
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

# Kernels are launched in 5 us; captured graphs, which the authors run on one GPU, launch one in 1 us.
V100 = replace(device("v100").derated(0.8, 0.8), launch_s=5e-6)
CAPTURED = replace(V100, launch_s=1e-6)
# BytePS adds up within a machine, and each machine sends each gradient once.  How much it reaches of a
# p3.8xlarge's 10 Gbit/s is not published; one TCP connection there reaches half.
RATES_BYTES_PER_S = (1.25e9, 6.25e8)
# The update of layer i waits for the next step's F of layer i - 3 (num_dependency=3 in arguments.py and the
# edge in dp_schedule.py, of expr/data_par/code/OOO_backprop).
NUM_DEPENDENCY = 3
# Settings of a script that change nothing that the formulas count.
_NOT_COUNTED = {"vocabulary", "hidden", "classes", "channels", "pixels", "blocks"}
ASSUMPTIONS = {
    SINGLE: "kernels are launched in 1 us rather than 5; the baseline pays 5 us for each",
    DATA_PARALLEL: "each machine reaches 10 or 5 Gbit/s; four GPUs of one machine have PCIe",
    PIPELINE: "the authors' stages, order of GPUs and schedule, over a GPipe of the same stages that sends "
    "the shared table's gradient for each micro-batch; where F and dO are both ready, either comes first",
}


@dataclass(frozen=True)
class Prediction:
    """Gains in a published configuration.

    Attributes:
        authors: of the authors' schedule over the paper's baseline; two where two orders or rates are open.
        auto: of ours over the same baseline; in pipelines over a GPipe without a shared table, on one link.
        chosen: the schedule that ``auto`` chose.
    """

    run: PaperRun
    authors: tuple[float, ...]
    auto: float
    chosen: str


def predictions(network: PaperNetwork, settings: Mapping[str, Any]) -> Iterator[Prediction]:
    """One for each published configuration, with a user's settings in place of its own.

    Raises:
        OptionsError: a pipeline has fewer layers than a published run has GPUs.
    """
    predict = {SINGLE: _single, DATA_PARALLEL: _data_parallel, PIPELINE: _pipeline}[network.mode]
    counted = {name: value for name, value in settings.items() if name not in not_counted(network, settings)}
    for run in network.runs_with(counted):
        yield predict(network, _possible(run))


def not_counted(network: PaperNetwork, settings: Mapping[str, Any]) -> list[str]:
    """Which settings of a user the formulas do not have."""
    unknown = _NOT_COUNTED | ({"width"} if network.script == "resnet" else set())
    return [name for name in settings if name in unknown]


def _possible(run: PaperRun) -> PaperRun:
    """Modulo allocation takes a multiple of the GPUs as layers, or else it is fastforward."""
    layers = run.settings.get("layers", 0)
    if run.style and layers < run.devices:
        raise OptionsError(
            f"layers={layers}: a published run has {run.devices} GPUs, each with a layer or more"
        )
    return replace(run, style=FASTFORWARD) if run.style == MODULO and layers % run.devices else run


def _single(network: PaperNetwork, run: PaperRun) -> Prediction:
    options = dict(run.settings)
    depth = options.pop("layers", 121)
    name = f"densenet{depth}" if network.script == "densenet" else network.name
    stock, captured = (model_costs(name, on, **options) for on in (V100, CAPTURED))
    base_s = _step_s(stock, "in_order", mode=SINGLE)
    authors_s = _step_s(captured, "multi_stream", mode=SINGLE)
    auto = plan(layers=captured, schedule="auto", mode=SINGLE)
    return Prediction(run, (base_s / authors_s,), base_s / (auto.predicted_step_s or base_s), auto.policy)


def _data_parallel(network: PaperNetwork, run: PaperRun) -> Prediction:
    layers = model_costs(f"resnet{run.settings['layers']}", V100, batch=run.settings["batch"])
    workers = run.machines if run.machines > 1 else run.devices
    gains = []
    for rate in RATES_BYTES_PER_S if run.machines > 1 else (PCIE_BYTES_PER_S,):
        link = Link(LATENCY_S / (workers - 1), rate)
        on: dict[str, Any] = {"mode": DATA_PARALLEL, "devices": workers, "link": link}
        base_s = _step_s(layers, "in_order", **on)
        gains.append(base_s / _first_k_s(layers, run.k, on))
    auto = plan(layers=layers, schedule="auto", **on)
    return Prediction(run, tuple(gains), base_s / (auto.predicted_step_s or base_s), auto.policy)


def _first_k_s(layers: tuple[LayerCosts, ...], k: int, on: Mapping[str, Any]) -> float:
    """A step of reverse first-k in which updates wait as in the authors' graph."""
    k = min(k, len(layers))
    problem = Problem(layers, on["devices"], link=on["link"], mode=DATA_PARALLEL, options={"k": k})
    schedule = POLICIES["reverse_first_k"].make(problem)
    waits = [(Task("U", i), Task("F", i - NUM_DEPENDENCY), 1) for i in range(NUM_DEPENDENCY, k)]
    return simulate(replace(schedule, after=tuple(waits)), layers, on["link"], steps=4).steady_step_s


def pipeline_of(network: PaperNetwork, run: PaperRun, ends: bool = True) -> Pipeline:
    """The authors' pipeline of a configuration; ``ends``: with embedding and head where there are words."""
    layers = layers_of(network.script, run.settings, V100, ends)
    with_ends = ends and network.script in WORDS
    table = table_bytes(network.script, run.settings) if with_ends else 0.0
    return Pipeline(layers, run.devices, run.machines, run.microbatches, run.style, with_ends, table)


def _pipeline(network: PaperNetwork, run: PaperRun) -> Prediction:
    authors = pipeline_of(network, run)
    gpipe_s = authors.gpipe_s()
    gains = tuple(gpipe_s / replace(authors, forward_first=first).step_s() for first in (False, True))
    rate = NVLINK_BYTES_PER_S if run.machines == 1 else authors.bytes_per_s(0, run.devices - 1, authors.gpus)
    on: dict[str, Any] = {"mode": PIPELINE, "devices": run.devices, "microbatches": run.microbatches}
    on["link"] = Link(LATENCY_S, rate)
    auto, base_s = plan(layers=authors.layers, **on), _step_s(authors.layers, "gpipe", **on)
    return Prediction(run, gains, base_s / (auto.predicted_step_s or base_s), auto.policy)


def _step_s(layers: tuple[LayerCosts, ...], schedule: str, **on: Any) -> float:
    return plan(layers=layers, schedule=schedule, **on).predicted_step_s or 0.0


def why(network: PaperNetwork, run: PaperRun) -> Iterator[tuple[str, float]]:
    """What the gain over GPipe is with the authors' settings, and without each of them."""
    authors = pipeline_of(network, run)
    base_s = authors.gpipe_s()
    yield "all of the authors' settings", base_s / authors.step_s()
    yield "F before dO where both are ready", base_s / replace(authors, forward_first=True).step_s()
    if run.style == PUSH:
        yield "all forwards first (fastforward)", base_s / replace(authors, style="fastforward").step_s()
    yield "the last stage holds back no dW", base_s / replace(authors, holds=False).step_s()
    yield "GPUs 0 to 7 in order", base_s / replace(authors, gpus=range(8)).step_s()
    if authors.table_bytes:
        yield (
            "GPipe sends no gradient of the table",
            replace(authors, table_bytes=0).gpipe_s() / authors.step_s(),
        )
    if authors.ends:
        bare = pipeline_of(network, run, ends=False)
        yield "no embedding and no head", bare.gpipe_s() / bare.step_s()
    yield "GPipe recomputes", authors.gpipe_s(recompute=True) / authors.step_s()
    for name in ("fast_forward", "modulo", "zb_h1", "zb_h2"):
        problem = Problem(authors.layers, run.devices, run.microbatches, authors.link)
        schedule = POLICIES[name].make(problem)
        ours_s = simulate(schedule, authors.layers, authors.link).makespan_s
        gpipe = POLICIES["gpipe"].make(problem)
        yield f"this project's {name}", simulate(gpipe, authors.layers, authors.link).makespan_s / ours_s
