"""Does the order of a backward pass gain anything on one CPU device?  Stock and rewritten steps in turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tf_ooo.bench.shared.networks import Network
from tf_ooo.bench.shared.options import SeveralValues, json_option, quick_option, several
from tf_ooo.bench.shared.processes import command, end_with, quiet, requests, result_of
from tf_ooo.bench.shared.rows import Row, reported
from tf_ooo.bench.shared.workloads import DATA_PARALLEL, LAYERPIPE, PIPELINE

if TYPE_CHECKING:
    import keras

ORDERS = ("fast_forward", "in_order")
_WARM = 2  # steps of each that are not timed


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


def run(request: Request) -> Row:
    """A fit with a named order, which takes turns with stock; the row has each step's seconds."""
    import tf_ooo
    from tf_ooo.bench.shared.workloads import make
    from tf_ooo.report.environment import environment

    workload = make(NETWORKS[request.network])
    options = tf_ooo.SingleDevice(schedule=request.order, profile_steps=request.steps)
    callback = tf_ooo.OOOBackprop(options)
    epochs = 2 * (request.steps + _WARM)
    batch = len(workload.x)
    workload.model.fit(
        workload.x, workload.y, batch_size=batch, epochs=epochs, verbose=0, callbacks=[callback]
    )
    report, gain = callback.report, callback.report.gain
    row = {"workload": request.network, "schedule": request.order, "batch": batch}
    row |= {"moved_ops": report.moved_ops, "environment": environment(workload.model), "date": report.date}
    if gain is None:
        return {**row, "text": report.headline}
    low, high = gain.interval or (None, None)
    return {
        **row, "speedup": gain.ratio, "low": low, "high": high, "text": report.headline,
        "baseline_s": list(gain.baseline_s), "step_s": list(gain.ours_s),
    }  # fmt: skip


def rows_of(networks: tuple[str, ...], orders: tuple[str, ...], steps: int) -> Iterator[list[Row]]:
    """Each in a process of its own, with as many threads as TensorFlow takes."""
    environment = {name: value for name, value in quiet().items() if name != "OMP_NUM_THREADS"}
    for network in networks:
        for order in orders:
            yield [result_of(command(__name__, Request(network, order, steps)), environment)]


def text_of(row: Row) -> str:
    """One line."""
    return f"{row['workload']:<16} {row['schedule']:<13} {row['moved_ops']:5} ops moved   {row['text']}"


@click.command("single-cpu", cls=SeveralValues)
@several("--networks", click.Choice(list(NETWORKS)), default=list(NETWORKS), show_default=True)
@several("--orders", click.Choice(ORDERS), default=list(ORDERS), show_default=True)
@click.option("--steps", default=30, show_default=True, help="Steps of each way, in turns.")
@quick_option("One network and order, ten steps of each way: under a minute.")
@json_option
def single_cpu(
    networks: tuple[str, ...], orders: tuple[str, ...], steps: int, quick: bool, json_file: Path | None
) -> None:
    """One CPU device: does the order of the backward pass gain anything?

    Stock and rewritten steps take turns in one fit; TensorFlow's executor runs what is ready on all cores.
    """
    if quick:
        networks, orders, steps = networks[:1], orders[:1], 10
    reported(rows_of(networks, orders, steps), text_of, json_file)


if __name__ == "__main__":
    end_with(run(*requests(Request)))
