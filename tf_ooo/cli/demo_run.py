"""Runs ``tf-ooo demo``: emulated devices first, then the same training twice on this machine's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import tf_ooo
from tf_ooo.cli.digits import digits
from tf_ooo.demo.strips import strips, verdict
from tf_ooo.demo.training import BLOCKS, DEVICES, MICROBATCHES, trained
from tf_ooo.demo.waits import library
from tf_ooo.errors import BackendError
from tf_ooo.report.parts import save_timeline
from tf_ooo.report.report import Report
from tf_ooo.units import seconds_text

BATCH, SEED = 64, 7
_WIDEST = 140
_NO_GAIN = (
    "no gain, and none was to be expected: on a CPU TensorFlow runs whatever is ready on all cores, and none "
    "waits for an order; what waits are several devices, links, and a GPU's streams"
)


def build_model() -> keras.Model:
    """Return a small compiled conv net with the same weights every time."""
    keras.utils.set_random_seed(SEED)
    layers: list[Any] = [keras.Input((8, 8, 1))]
    for filters in (32, 64, 64):
        layers += [keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
                   keras.layers.BatchNormalization(), keras.layers.ReLU()]  # fmt: skip
    layers += [keras.layers.Flatten(), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # The rewrite is for the graph executor; by default Keras may hand the step to XLA on a GPU.
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"], jit_compile=False)
    return model


def train(
    name: str, epochs: int, callbacks: list[Any], progress: Progress
) -> tuple[dict[str, Any], list[Any]]:
    """Train once; return the history and the final weights."""
    images, labels = digits()
    task = progress.add_task(name, total=-(-len(images) // BATCH) * epochs)
    ticker = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: progress.advance(task))
    settings = {"batch_size": BATCH, "epochs": epochs, "verbose": 0, "callbacks": [*callbacks, ticker]}
    model = build_model()
    history = model.fit(images[..., None], labels, **settings)
    return history.history, model.get_weights()


def run_demo(out: Path, epochs: int, schedule: str) -> Report:
    """Show devices that wait for each other, then one that does not; write the report into ``out``."""
    console = Console(soft_wrap=True)
    run_emulated(console)
    console.rule("This machine's own device: a conv net on digits")
    return run_real(console, out, epochs, schedule)


def run_emulated(console: Console) -> None:
    """Train on emulated devices; print strips of a step and the verdict, or why not.

    BackendError: weights differ.
    """
    console.rule(f"{DEVICES} emulated devices")
    console.print(
        "Each layer's F, dO and dW hold their device for some milliseconds, as on a GPU, instead of "
        "computing; everything else is real: the graph, where it runs, its order, messages and updates. "
        f"The model has an embedding, {BLOCKS} blocks and a head; a batch has {MICROBATCHES} micro-batches."
    )
    try:
        library()
    except BackendError as error:
        console.print(str(error))
        return
    with console.status("training in three ways, about half a minute"):
        ways = trained()
    for line in strips(ways, min(console.width, _WIDEST)):
        console.print(line, soft_wrap=True)
    console.print(Text(verdict(ways), style="bold"))
    if not ways[-1].same_bits:
        raise BackendError("the weights differ between two schedules; please report this")


def run_real(console: Console, out: Path, epochs: int, schedule: str) -> Report:
    """Train twice, print the table, write ``report.html`` and ``trace.json`` into ``out``."""
    callback = tf_ooo.OOOBackprop(schedule=schedule, profile_steps=10, compare=True)
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        stock_history, stock_weights = train("stock", epochs, [], progress)
        history, weights = train("rewritten", epochs, [callback], progress)
    same_loss = stock_history["loss"] == history["loss"]
    same = same_loss and all(np.array_equal(a, b) for a, b in zip(stock_weights, weights, strict=True))
    console.print(_table(callback.report, same, history["accuracy"][-1]))
    if callback.report.headline.startswith("no gain") and not tf.config.list_physical_devices("GPU"):
        console.print(_NO_GAIN)
    written = save_timeline(callback.report, out)
    if written is not None:
        console.print(f"report: {written[0]}")
    if not same:
        raise BackendError("the weights differ between stock and rewritten; please report this")
    if written is None:
        raise BackendError(
            f"no report was written: {out} cannot be written to; give another folder with --out"
        )
    report: Report = callback.report
    return report


def _table(report: Report, same: bool, accuracy: float) -> Table:
    table = Table("kind", "ops", title="Rewritten training step")
    for kind, count in report.ops.items():
        table.add_row(kind, str(count))
    table.add_section()
    table.add_row("moved ops", str(report.moved_ops))
    table.add_row("step, stock order", seconds_text(report.stock_step_s))
    table.add_row("step, rewritten", seconds_text(report.measured_step_s))
    table.add_row("kept", report.state)
    table.add_row("weights bit-equal", "yes" if same else "NO")
    table.add_row("accuracy", f"{accuracy:.3f}")
    return table
