"""Which assumption makes up the difference between predicted and published gains of pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tf_ooo.bench.paper.layers import WORDS, Counted, layers_of
from tf_ooo.bench.paper.networks import PIPELINE, PaperNetwork, PaperRun
from tf_ooo.bench.paper.predicted import GPUS_OF_A_MACHINE, NVLINK_BYTES_PER_S
from tf_ooo.bench.planner import ooo
from tf_ooo.bench.planner.published import load, predicted
from tf_ooo.bench.shared.rows import Row
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.rewriting.plan import plan

V100_BYTES = 16e9
# Beside a weight its gradient and Adam's two averages.
_COPIES = 4
SCHEDULES = ("fast_forward", "modulo", "zb_h1", "zb_h2")


@dataclass(frozen=True)
class Assumed:
    """One set of assumptions.

    Attributes:
        name: for the table.
        counted: how layers are counted.
        rate_bytes_per_s, latency_s: of a message.
        launch_s: of a kernel; None: 5 us.
        device: of the planner's table.
        recompute: of GPipe: ``"none"`` or ``"all"``.
        table_sent: GPipe sends the gradient of the table that embedding and head share from the last device
            to the first, for each micro-batch; no step of it is shorter than that.
    """

    name: str
    counted: Counted = Counted()
    rate_bytes_per_s: float = 1.2e10
    latency_s: float = 5e-5
    launch_s: float | None = None
    device: str = "v100"
    recompute: str = "none"
    table_sent: bool = False


# What all but the first add to.
BASE = "the scripts' micro-batches, 4-byte numbers, 96 Gbit/s"
ASSUMED = (
    Assumed("24 sequences a micro-batch, 2-byte numbers", Counted(element_bytes=2, rows=24)),
    Assumed(BASE),
    Assumed("and NVLink, 200 Gbit/s", rate_bytes_per_s=NVLINK_BYTES_PER_S),
    Assumed("and embedding and head", Counted(ends=True)),
    Assumed("and 20 us to launch a kernel, as without XLA", launch_s=20e-6),
    Assumed("and 1 ms for each message", latency_s=1e-3),
    Assumed("and 25 Gbit/s everywhere", rate_bytes_per_s=3.125e9),
    Assumed("and tensor cores", device="v100-fp16"),
    Assumed(
        "and 25 Gbit/s, GPipe sends the shared table's gradient", rate_bytes_per_s=3.125e9, table_sent=True
    ),
    Assumed("and a GPipe that recomputes", recompute="all"),
)


def rows(network: PaperNetwork) -> Iterator[Row]:
    """One for each pipeline, set of assumptions and schedule; and the bound that no order of tasks passes."""
    for run in network.runs_with({}, PIPELINE):
        for assumed in ASSUMED:
            if _concerns(assumed, network, run):
                yield from _rows(network, run, assumed)


def memory_rows(network: PaperNetwork) -> Iterator[Row]:
    """What GPipe needs on its fullest GPU where it recomputes nothing, embedding and head included.

    Activations as simulated; of weights, their gradients and Adam's averages at most as much as one GPU can
    have: the table, and an equal part of the layers, rounded up.
    """
    inputs = load(ooo.INPUTS)
    for run in network.runs_with({}, PIPELINE):
        counted = Counted(ends=network.script in WORDS)
        layers = layers_of(network.script, run.settings, ooo.the_device(inputs), counted)
        on: dict[str, Any] = {"devices": run.devices, "microbatches": run.microbatches}
        gpipe = plan(layers=layers, schedule="gpipe", mode=PIPELINE, **on)
        yield {
            "kind": "memory",
            "network": network.name,
            "configuration": run.name,
            **on,
            "mode": run.mode,
            "schedule": "gpipe",
            "peak_bytes": gpipe.predicted_peak_bytes,
            "state_bytes": _state_bytes(layers, run.devices),
        }


def _state_bytes(layers: Sequence[LayerCosts], devices: int) -> float:
    """Of the largest layers that one GPU can have."""
    sizes = sorted((layer.weight_bytes or 0.0 for layer in layers), reverse=True)
    return _COPIES * sum(sizes[: -(-len(layers) // devices)])


def _concerns(assumed: Assumed, network: PaperNetwork, run: PaperRun) -> bool:
    """Whether a set of assumptions says something else of this network than the set that it adds to."""
    if assumed.rate_bytes_per_s == NVLINK_BYTES_PER_S:
        return run.devices <= GPUS_OF_A_MACHINE
    if assumed.counted.ends:
        return network.script in WORDS
    return not assumed.table_sent or _shares_table(run)


def _rows(network: PaperNetwork, run: PaperRun, assumed: Assumed) -> Iterator[Row]:
    inputs = load(ooo.INPUTS)
    device = ooo.the_device(inputs, assumed.device)
    if assumed.launch_s is not None:
        device = replace(device, launch_s=assumed.launch_s)
    counted = assumed.counted
    if network.script not in WORDS:
        counted = replace(counted, rows=None)
    layers = layers_of(network.script, run.settings, device, counted)
    link = Link(assumed.latency_s, assumed.rate_bytes_per_s)
    on: dict[str, Any] = {"devices": run.devices, "microbatches": run.microbatches}
    work_s = run.microbatches * fullest_s([layer.busy_s for layer in layers], run.devices)
    least_s = _table_s(network, run, link) if assumed.table_sent else 0.0
    for row in ooo.pipeline_rows(network.name, layers, link, on, SCHEDULES, assumed.recompute):
        base_s = max(least_s, row["predicted_baseline_step_s"])
        about = {"kind": "why", "network": network.name, "configuration": run.name, "assumed": assumed.name}
        gains = predicted(row["predicted_step_s"], base_s)
        yield {**row, **about, **gains, "bound_s": work_s, "bound": base_s / work_s}


def fullest_s(seconds: Sequence[float], devices: int) -> float:
    """What the fullest device computes at least, as each layer is on one of them.

    Of more than k layers for each device, one device has k + 1 (Graham 1969's bounds of a makespan).
    """
    longest_first = sorted(seconds, reverse=True)
    crowded = [
        sum(longest_first[count * (devices - 1) : count * devices + 1])
        for count in range((len(seconds) - 1) // devices + 1)
    ]
    return max(sum(seconds) / devices, *crowded)


def _table_s(network: PaperNetwork, run: PaperRun, link: Link) -> float:
    """What it takes the link to send the table's gradient for each micro-batch."""
    table_bytes = 4 * WORDS[network.script] * run.settings["width"]
    return run.microbatches * link.occupied_s(table_bytes)


def _shares_table(run: PaperRun) -> bool:
    return run.settings.get("task") == "pretrain"
