"""Predicts the published configurations on the paper's hardware: V100 GPUs, 10 and 25 Gbit/s, PCIe, NVLink.

Nothing is measured: costs are a roofline by formula, as of ``tf-ooo bench planner ooo``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_ooo.bench.paper.layers import Counted, layers_of
from tf_ooo.bench.paper.networks import DATA_PARALLEL, PIPELINE, SCRIPTS, SINGLE, PaperNetwork, PaperRun
from tf_ooo.bench.planner import ooo
from tf_ooo.bench.planner.published import Inputs, load
from tf_ooo.bench.shared.rows import Row
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.models import CLASSES, model_costs

# GPUs of one machine by PCIe, machines by the 25 and 10 Gbit/s of Amazon's p3 instances.
RATES_BYTES_PER_S = (1.2e10, 3.125e9, 1.25e9)
# One link of NVLink in one direction, between the GPUs of one machine (NVIDIA V100 datasheet: 300 GB/s are
# six links in both directions).
NVLINK_BYTES_PER_S, GPUS_OF_A_MACHINE = 2.5e10, 8
# Data parallel, beside those of the planner's page.
_FAST_NETWORK_BYTES_PER_S = 3.125e9
SCHEDULES = ("fast_forward", "modulo", "zb_h1")
_EVERYWHERE = "a V100 in single precision at 80% of its published peaks; nothing here was measured on one"
_ASSUMPTIONS = {
    SINGLE: (
        _EVERYWHERE,
        "kernels are launched in 1 us rather than 5, as captured graphs do; the baseline pays 5 us for each",
    ),
    DATA_PARALLEL: (
        _EVERYWHERE,
        "each GPU's link reaches 25, 10, 5 or 2.5 Gbit/s; search over the stock order with its barrier",
    ),
    PIPELINE: (
        _EVERYWHERE,
        "4-byte numbers, messages over 96 (PCIe), 25 or 10 Gbit/s everywhere; up to 8 GPUs over NVLink too, "
        "25 GB/s",
        "no embedding and no head; GPipe recomputes nothing; modulo over GPipe",
    ),
}
# Settings that the formulas have, by script, and those which change nothing of what they count: the head and
# the embedding are left out.
_COUNTED = {
    "densenet121": {"growth", "batch", "pixels"},
    "mobilenet_v3_large": {"alpha", "batch", "pixels"},
    "resnet": {"layers", "batch", "pixels"},
    "rnn": {"layers", "width", "length", "batch"},
    "feed_forward": {"layers", "width", "batch"},
    "bert": {"task", "layers", "width", "heads", "length", "batch"},
    "gpt3": {"layers", "width", "heads", "length", "batch"},
}
_NOT_COUNTED = {
    "rnn": {"vocabulary"}, "feed_forward": {"classes"}, "bert": {"vocabulary", "hidden"},
    "gpt3": {"vocabulary"},
}  # fmt: skip
# Those which have one value in the formulas, that of size full.
_ALWAYS: Mapping[str, Mapping[str, Any]] = {
    "densenet121": {"blocks": (6, 12, 24, 16), "classes": CLASSES},
    "mobilenet_v3_large": {"classes": CLASSES},
    "resnet": {"blocks": 1, "width": 1, "classes": CLASSES},
    # The inputs of the first layer, which the formulas make as many as its units.
    "feed_forward": {"pixels": 32},
}
# The fewest pixels at which a script's network begins with the stride of 4 that the formulas have.
_LEAST_PIXELS = {"densenet121": 128, "resnet": 33}


def why_none(network: PaperNetwork, mode: str, settings: Mapping[str, Any]) -> str:
    """Why nothing is predicted; empty where something is."""
    if mode not in network.modes:
        return f"the paper has no configuration of {network.name} in mode {mode}"
    runs = network.runs_with(settings, mode)
    if mode == PIPELINE and all(run.devices == 1 for run in runs):
        return "one GPU: no pipeline"
    for of in (run.settings for run in runs if "heads" in run.settings):
        if of["width"] % of["heads"]:  # at other sizes the script may have fewer heads
            return f"width={of['width']} is no multiple of the published size's heads={of['heads']}"
    return _not_in_formulas(network, settings)


def _not_in_formulas(network: PaperNetwork, settings: Mapping[str, Any]) -> str:
    """With which of the settings the script builds another network than the formulas count."""
    counted, always = _COUNTED[network.script], _ALWAYS.get(network.script, {})
    for name in sorted(set(settings) - counted - _NOT_COUNTED.get(network.script, set())):
        if name not in always:
            return f"the formulas have no {name!r} of {network.name}"
        value = tuple(settings[name]) if isinstance(settings[name], list) else settings[name]
        if value != always[name]:
            return f"the formulas have no {name!r} of {network.name} but {always[name]}"
    least = _LEAST_PIXELS.get(network.script, 0)
    if settings.get("pixels", least) < least:
        return f"below {least} pixels {network.name} begins without the stride of 4 of the formulas"
    return ""


def rows(network: PaperNetwork, mode: str, settings: Mapping[str, Any] | None = None) -> Iterator[Row]:
    """A row for each published configuration, schedule and link; gains are over stock as the paper has it.

    With a user's ``settings``, which the rows tell as ``changed``.
    """
    settings = settings or {}
    if why_none(network, mode, settings):
        return
    inputs = load(ooo.INPUTS)
    for run in network.runs_with(settings, mode):
        for row in _ROWS[mode](inputs, network, run):
            about = {"kind": "predicted", "network": network.name, "configuration": run.name}
            yield {**row, **about, "assumed": run.assumed, "changed": run.changed}


def assumptions(network: PaperNetwork, mode: str, rows: Sequence[Row]) -> list[str]:
    """What is assumed of all networks of a mode, of this one, and of the configurations of its rows."""
    of_all = list(_ASSUMPTIONS[mode])
    if mode == PIPELINE and network.source == SCRIPTS:
        of_all.append("the scripts' micro-batches")
    of_rows = dict.fromkeys((row["assumed"], row["changed"]) for row in rows if row["assumed"])
    of_all += (text + (", but for what you set" if changed else "") for text, changed in of_rows)
    return of_all


def _single(inputs: Inputs, network: PaperNetwork, run: PaperRun) -> Iterator[Row]:
    yield from ooo.single_device_rows(inputs, network.name, _options(network, run))


def _data_parallel(inputs: Inputs, network: PaperNetwork, run: PaperRun) -> Iterator[Row]:
    given, options = inputs["data_parallel"], _options(network, run)
    name = f"resnet{options.pop('layers')}"
    layers = model_costs(name, ooo.the_device(inputs), **options)
    for rate in (_FAST_NETWORK_BYTES_PER_S, *given["bytes_per_s"]):
        link = Link(given["hop_latency_s"] / (run.devices - 1), rate)
        yield from ooo.data_parallel_rows(name, layers, run.devices, run.k, link)


def _options(network: PaperNetwork, run: PaperRun) -> dict[str, Any]:
    """Of :func:`tf_ooo.costs.models.model_costs`, which calls pixels the image's."""
    counted = {name: value for name, value in run.settings.items() if name in _COUNTED[network.script]}
    return {"image" if name == "pixels" else name: value for name, value in counted.items()}


def _pipeline(inputs: Inputs, network: PaperNetwork, run: PaperRun) -> Iterator[Row]:
    layers = layers_of(network.script, run.settings, ooo.the_device(inputs), Counted())
    on: dict[str, Any] = {"devices": run.devices, "microbatches": run.microbatches}
    nvlink = (NVLINK_BYTES_PER_S,) if run.devices <= GPUS_OF_A_MACHINE else ()
    for rate in (*nvlink, *RATES_BYTES_PER_S):
        link = Link(inputs["pipeline"]["latency_s"], rate)
        yield from ooo.pipeline_rows(network.name, layers, link, on, SCHEDULES)


_ROWS = {SINGLE: _single, DATA_PARALLEL: _data_parallel, PIPELINE: _pipeline}
