"""Does the order of a backward pass gain anything on one CPU device?  Stock and rewritten steps in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tf_ooo.bench.shared.networks import Network
from tf_ooo.bench.shared.options import SeveralValues, json_option, quick_option, several
from tf_ooo.bench.shared.processes import command, end_with, quiet, requests, result_of
from tf_ooo.bench.shared.rows import Row, reported
from tf_ooo.bench.shared.workloads import DATA_PARALLEL, LAYERPIPE, PIPELINE, Workload

if TYPE_CHECKING:
    import keras

ORDERS = ("fast_forward", "in_order")
# What users have without a word: it compares no order on one CPU device, and fits take turns.
AUTO = "auto"
_WARM = 2  # steps of each that are not timed
_STEPS_OF_A_FIT, _FITS = 20, 6  # of auto and of stock, in turns


def application(name: str, pixels: int, rows: int | None = None) -> keras.Model:
    """A network of keras.applications with ten classes, its weights random."""
    import keras

    shape = (pixels, pixels, 3)
    build = getattr(keras.applications, name)
    model = build(weights=None, input_shape=shape, classes=10, classifier_activation=None)
    assert isinstance(model, keras.Model)
    return model


def of_application(name: str, pixels: int, batch: int) -> Network:
    """One of :data:`NETWORKS`."""
    return Network(partial(application, name, pixels), batch, (pixels, pixels, 3))


NETWORKS = {
    "mlp": DATA_PARALLEL["mlp_small"],
    "mlp_uneven": LAYERPIPE["mlp"],
    "vgg16": DATA_PARALLEL["vgg16"],
    "resnet50": DATA_PARALLEL["resnet50"],
    "bert6": DATA_PARALLEL["bert"],
    "gpt2": PIPELINE["gpt2"],
    "rnn16": PIPELINE["rnn16"],
    "mobilenet_v2": of_application("MobileNetV2", 96, 16),
    "densenet121": of_application("DenseNet121", 64, 8),
    "efficientnet_b0": of_application("EfficientNetB0", 64, 16),
}


@dataclass(frozen=True)
class Request:
    """Steps of one network in an order, so many of each way."""

    network: str
    order: str
    steps: int


def fitted(workload: Workload, steps: int, callbacks: Sequence[keras.callbacks.Callback] = ()) -> list[float]:
    """Trains as many steps as comparing so many of each way takes; the loss of each."""
    return _losses(workload, 2 * (steps + _WARM), callbacks)


def _losses(workload: Workload, steps: int, callbacks: Sequence[keras.callbacks.Callback]) -> list[float]:
    settings = {"batch_size": len(workload.x), "epochs": steps, "verbose": 0}
    history = workload.model.fit(workload.x, workload.y, callbacks=[*callbacks], **settings)
    losses: list[float] = history.history["loss"]
    return losses


def in_turns(workload: Workload, order: str, steps: int) -> tuple[Row, list[float]]:
    """A fit with a named order, which takes turns with stock.

    Returns:
        A row with each step's seconds, and the loss of each step.
    """
    import tf_ooo
    from tf_ooo.report.environment import environment

    callback = tf_ooo.OOOBackprop(tf_ooo.SingleDevice(schedule=order, profile_steps=steps))
    losses = fitted(workload, steps, [callback])
    report, gain = callback.report, callback.report.gain
    row = {"schedule": order, "batch": len(workload.x)}
    row |= {"moved_ops": report.moved_ops, "environment": environment(workload.model), "date": report.date}
    if gain is None:
        return {**row, "text": report.headline}, losses
    low, high = gain.interval or (None, None)
    return {
        **row, "speedup": gain.ratio, "low": low, "high": high, "text": report.headline,
        "baseline_s": list(gain.baseline_s), "step_s": list(gain.ours_s),
    }, losses  # fmt: skip


def beside_stock(stock: Workload, ours: Workload, steps: int) -> Row:
    """What ``OOOBackprop()`` costs: short fits with it and without it, in turns.

    Returns:
        A row with the seconds of a step of each fit, what a fit does before its first step included.
    """
    import tf_ooo
    from tf_ooo.report.environment import environment

    callback = tf_ooo.OOOBackprop()
    ways: list[tuple[Workload, list[keras.callbacks.Callback], list[float]]] = [
        (stock, [], []), (ours, [callback], [])
    ]  # fmt: skip
    for turn in range(_WARM + min(_FITS, steps)):
        for workload, callbacks, seconds in ways[:: 1 if turn % 2 else -1]:
            started_s = time.perf_counter()
            _losses(workload, _STEPS_OF_A_FIT, callbacks)
            if turn >= _WARM:
                seconds.append((time.perf_counter() - started_s) / _STEPS_OF_A_FIT)
    baseline_s, ours_s = (seconds for _, _, seconds in ways)
    gain, report = statistics.median(baseline_s) / statistics.median(ours_s), callback.report
    return {
        "schedule": AUTO, "batch": len(ours.x), "moved_ops": report.moved_ops, "date": report.date,
        "environment": environment(ours.model), "speedup": gain, "baseline_s": baseline_s, "step_s": ours_s,
        "text": f"{gain:.2f}x stock, in turns of {_STEPS_OF_A_FIT} steps; {report.headline}",
    }  # fmt: skip


def run(request: Request) -> Row:
    """Of a network of this module."""
    from tf_ooo.bench.shared.workloads import make

    network = NETWORKS[request.network]
    if request.order == AUTO:
        return {"workload": request.network, **beside_stock(make(network), make(network), request.steps)}
    row, _ = in_turns(make(network), request.order, request.steps)
    return {"workload": request.network, **row}


def rows_of(networks: tuple[str, ...], orders: tuple[str, ...], steps: int) -> Iterator[list[Row]]:
    """Each in a process of its own, with as many threads as TensorFlow takes."""
    for network in networks:
        for order in orders:
            yield [result_of(command(__name__, Request(network, order, steps)), all_threads())]


def all_threads() -> dict[str, str]:
    """The environment of a process that logs nothing and computes with as many threads as there are cores."""
    return {name: value for name, value in quiet().items() if name != "OMP_NUM_THREADS"}


def text_of(row: Row) -> str:
    """One line."""
    return f"{row['workload']:<16} {row['schedule']:<13} {row['moved_ops']:5} ops moved   {row['text']}"


@click.command("single-cpu", cls=SeveralValues)
@several("--networks", click.Choice(list(NETWORKS)), default=list(NETWORKS), show_default=True)
@several("--orders", click.Choice((*ORDERS, AUTO)), default=[*ORDERS, AUTO], show_default=True)
@click.option("--steps", default=30, show_default=True, help="Steps of each way, in turns.")
@quick_option("One network, one order and auto, ten steps of each way: under a minute.", expose=False,
              networks=list(NETWORKS)[:1], orders=[ORDERS[0], AUTO], steps=10)  # fmt: skip
@json_option
def single_cpu(
    networks: tuple[str, ...], orders: tuple[str, ...], steps: int, json_file: Path | None
) -> None:
    """One CPU device: does the order of the backward pass gain anything?

    Stock and rewritten steps take turns in one fit; TensorFlow's executor runs what is ready on all cores.
    With auto, which compares no order there, fits with and without OOOBackprop() take turns.
    """
    reported(rows_of(networks, orders, steps), text_of, json_file)


if __name__ == "__main__":
    end_with(run(*requests(Request)))
