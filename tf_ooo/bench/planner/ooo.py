"""Predicted gains of out-of-order backprop's configurations beside the published ranges.

EuroSys 2022, doi 10.1145/3492321.3519563.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tf_ooo.bench.planner import published
from tf_ooo.bench.planner.published import Inputs, predicted
from tf_ooo.bench.shared.rows import Row
from tf_ooo.costs.devices import DeviceModel, device
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.models import model_costs
from tf_ooo.rewriting.plan import plan

INPUTS = published.FOLDER / "ooo_inputs.json"
ASSUMPTIONS = (
    "costs are a roofline of a V100 in single precision at 80% of its published peaks, which gives ResNet-50 "
    "about 380 images/s; pipelines with tensor cores too; nothing here was measured on a V100",
    "data parallel: each GPU has a link of its own that reaches 10, 5 or 2.5 Gbit/s, a gradient "
    "of n bytes occupies it for 2 (w - 1) / w n bytes (ring; the published runs used "
    "BytePS) and pays two hops of 50 us; GPUs that share a machine and its network card are not modelled",
    "data parallel: 'in_order' is the stock order with the barrier between steps, 'in_order, no barrier' is "
    "the published baseline k=0; k counts layers with weights as in the authors' code",
    "one device: kernels share the device in proportion to what each could fill (LayerCosts.occupancy); "
    "the streams' priority is not modelled",
    "one device: 'launch hidden' also lets each kernel start after 1 us rather than 5 us, as the authors' "
    "captured graphs do, and compares with the stock order that pays 5 us",
    "pipeline: embedding and head are left out; micro-batches of 24 sequences (published for fine-tuning "
    "only); GPipe recomputes nothing; messages over 96 Gbit/s (PCIe) or 10 Gbit/s",
)


def the_device(inputs: Inputs, name: str = "") -> DeviceModel:
    """The derated V100, or another one."""
    given = inputs["device"]
    return replace(
        device(name or given["name"]).derated(given["flop_share"], given["bytes_share"]),
        launch_s=given["launch_s"],
    )


def rows(inputs: Inputs, quick: bool = False) -> Iterator[Row]:
    """One row for each configuration and schedule; ``quick``: the first of each kind."""
    for kind in (_data_parallel, _single_device, _pipeline):
        for row in kind(inputs, quick):
            low, high = inputs["published"][row["mode"]]
            yield {**row, "published_low": low, "published_high": high}


def step_s(layers: Sequence[LayerCosts], schedule: str, **options: Any) -> float:
    """The predicted step of one schedule."""
    return plan(layers=layers, schedule=schedule, **options).predicted_step_s or 0.0


def _data_parallel(inputs: Inputs, quick: bool) -> Iterator[Row]:
    given = inputs["data_parallel"]
    for work in given["workloads"][: 1 if quick else None]:
        layers = model_costs(work["model"], the_device(inputs), batch=work["batch"])
        pairs = itertools.product(work["k"].items(), given["bytes_per_s"])
        for (workers, k), rate in itertools.islice(pairs, 1 if quick else None):
            link = Link(given["hop_latency_s"] / (int(workers) - 1), rate)
            name = f"{work['model']} b{work['batch']}"
            yield from data_parallel_rows(name, layers, int(workers), k, link)


def data_parallel_rows(
    name: str, layers: Sequence[LayerCosts], workers: int, k: int, link: Link
) -> Iterator[Row]:
    """Reverse first-k with the published ``k``, the best k and ``search``, over both baselines."""
    k = min(k, len(layers))
    of_link = partial(step_s, layers, mode="data_parallel", devices=workers, link=link)
    baselines = {"in_order": of_link("in_order"), "in_order, no barrier": of_link("in_order", barrier=False)}
    compute_s = sum(layer.busy_s for layer in layers)
    communication_s = sum(link.allreduce_s(layer.weight_bytes, workers) for layer in layers)
    seconds = {
        f"reverse_first_k k={k}": of_link("reverse_first_k", k=k),
        "reverse_first_k": of_link("reverse_first_k"),
        "search": of_link("search"),
    }
    for schedule, baseline in itertools.product(seconds, baselines):
        yield {
            "workload": name,
            "mode": "data_parallel",
            "schedule": schedule,
            "baseline": baseline,
            "devices": workers,
            "bandwidth_bit_s": link.bytes_per_s * 8,
            "bound_s": max(compute_s, communication_s),
            "communication_to_compute": communication_s / compute_s,
            **predicted(seconds[schedule], baselines[baseline]),
        }


def _single_device(inputs: Inputs, quick: bool) -> Iterator[Row]:
    for work in inputs["single_device"][: 1 if quick else None]:
        options = {key: value for key, value in work.items() if key != "model"}
        yield from single_device_rows(inputs, work["model"], options)


def single_device_rows(inputs: Inputs, name: str, options: Mapping[str, Any]) -> Iterator[Row]:
    """Streams over the stock order, both with launches hidden, and over the stock order with them."""
    model = the_device(inputs)
    hidden = replace(model, launch_s=inputs["device"]["launch_hidden_s"])
    stock, layers = (model_costs(name, on, **options) for on in (model, hidden))
    seconds = step_s(layers, "multi_stream")
    for baseline, costs in (("in_order", layers), ("in_order, launches not hidden", stock)):
        yield {
            "workload": " ".join([name, *(f"{key}={value}" for key, value in options.items())]),
            "mode": "single_device",
            "schedule": "multi_stream",
            "baseline": baseline,
            "devices": 1,
            "bound_s": sum(layer.forward_s + layer.output_grad_s for layer in layers),
            **predicted(seconds, step_s(costs, "in_order")),
        }


def _pipeline(inputs: Inputs, quick: bool) -> Iterator[Row]:
    given = inputs["pipeline"]
    configurations = itertools.product(given["workloads"], given["devices"], given["bytes_per_s"])
    for work, name, rate in itertools.islice(configurations, 1 if quick else None):
        sizes = {key: work[key] for key in ("layers", "hidden", "heads")}
        on, link = the_device(inputs, name), Link(given["latency_s"], rate)
        costs = model_costs("transformer", on, seq=given["seq"], microbatch=given["microbatch"], **sizes)
        run = {"devices": work["devices"], "microbatches": work["microbatches"]}
        for row in pipeline_rows(f"bert-{work['layers']}", costs, link, run):
            yield {"device": name, **row}


def pipeline_rows(
    name: str, costs: Sequence[LayerCosts], link: Link, run: Mapping[str, int],
    schedules: Sequence[str] = ("fast_forward", "modulo"), recompute: str = "none",
) -> Iterator[Row]:  # fmt: skip
    """Schedules over GPipe on the ``devices`` and ``microbatches`` of a run; ``recompute``: GPipe's."""
    options: dict[str, Any] = {"layers": costs, "link": link, "mode": "pipeline", **run}
    baseline_s = plan(schedule="gpipe", recompute=recompute, **options).predicted_step_s or 0.0
    for policy in schedules:
        schedule = plan(schedule=policy, **options)
        yield {
            "workload": name,
            "mode": "pipeline",
            "schedule": policy,
            "baseline": "gpipe",
            **run,
            "bandwidth_bit_s": link.bytes_per_s * 8,
            "peak_bytes": schedule.predicted_peak_bytes,
            **predicted(schedule.predicted_step_s or 0.0, baseline_s),
        }


def table(rows: Sequence[Row]) -> str:
    """The rows as text; * marks those outside the published range."""
    lines = []
    for row in rows:
        low, high, gain = row["published_low"], row["published_high"], row["predicted_speedup"]
        mark = " " if low <= gain <= high else "*"
        rate = f" {row['bandwidth_bit_s'] / 1e9:g}Gbit" if "bandwidth_bit_s" in row else ""
        name = f"{row['workload']} {row.get('device', '')}".strip()
        what = f"{name} x{row['devices']}{rate}: {row['schedule']} / {row['baseline']}"
        lines.append(f"{what:<85} {gain:6.3f}{mark} published {low:.2f}-{high:.2f}")
    return "\n".join(lines)


main = published.command(
    "ooo", __doc__, "The first configuration of each kind.", INPUTS, rows, table, ASSUMPTIONS
)
