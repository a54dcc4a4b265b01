"""What the simulator says of the published configurations, on the paper's hardware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tf_ooo.bench.paper.layers import Counted, layers_of
from tf_ooo.bench.paper.networks import DATA_PARALLEL, PIPELINE, SINGLE, PaperNetwork, PaperRun
from tf_ooo.bench.planner import ooo
from tf_ooo.bench.planner.published import Inputs, load
from tf_ooo.bench.shared.rows import Row
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.models import model_costs

# GPUs of one machine by PCIe or NVLink, machines by the 10 and 25 Gbit/s of Amazon's p3 instances.
RATES_BYTES_PER_S = (1.2e10, 3.125e9, 1.25e9)
SCHEDULES = ("fast_forward", "modulo", "zb_h1")
_EVERYWHERE = "a V100 in single precision at 80% of its published peaks; nothing here was measured on one"
ASSUMPTIONS = {
    SINGLE: (
        _EVERYWHERE,
        "kernels are launched in 1 us rather than 5, as captured graphs do; the baseline pays 5 us for each",
    ),
    DATA_PARALLEL: (
        _EVERYWHERE,
        "each GPU's link reaches 10, 5 or 2.5 Gbit/s; search over the stock order with its barrier",
    ),
    PIPELINE: (
        _EVERYWHERE,
        "4-byte numbers, the scripts' micro-batches, messages over 96, 25 or 10 Gbit/s everywhere",
        "no embedding and no head; GPipe recomputes nothing; modulo over GPipe",
    ),
}


def rows(network: PaperNetwork, mode: str) -> Iterator[Row]:
    """A row for each published configuration, schedule and link; gains are over stock as the paper has it."""
    inputs = load(ooo.INPUTS)
    for run in network.runs:
        if run.mode == mode:
            for row in _ROWS[mode](inputs, network, run):
                about = {"kind": "predicted", "network": network.name, "configuration": run.name}
                yield {**row, **about, "assumed": run.assumed}


def _single(inputs: Inputs, network: PaperNetwork, run: PaperRun) -> Iterator[Row]:
    yield from ooo.single_device_rows(inputs, network.name, run.settings)


def _data_parallel(inputs: Inputs, _: PaperNetwork, run: PaperRun) -> Iterator[Row]:
    given = inputs["data_parallel"]
    name = f"resnet{run.settings['layers']}"
    layers = model_costs(name, ooo.the_device(inputs), batch=run.settings["batch"])
    for rate in given["bytes_per_s"]:
        link = Link(given["hop_latency_s"] / (run.devices - 1), rate)
        yield from ooo.data_parallel_rows(name, layers, run.devices, run.k, link)


def _pipeline(inputs: Inputs, network: PaperNetwork, run: PaperRun) -> Iterator[Row]:
    layers = layers_of(network.script, run.settings, ooo.the_device(inputs), Counted())
    on: dict[str, Any] = {"devices": run.devices, "microbatches": run.microbatches}
    for rate in RATES_BYTES_PER_S:
        link = Link(inputs["pipeline"]["latency_s"], rate)
        yield from ooo.pipeline_rows(network.name, layers, link, on, SCHEDULES)


_ROWS = {SINGLE: _single, DATA_PARALLEL: _data_parallel, PIPELINE: _pipeline}
