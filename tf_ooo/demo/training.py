"""Trains a model of emulated layers by stock Keras on one device, and by 1F1B and auto on four."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf_ooo.demo.waits import LOG, Log, prefer
from tf_ooo.errors import BackendError
from tf_ooo.planning.policies import one_f_one_b

DEVICES, MICROBATCHES, BLOCKS = 4, 8, 6
STOCK, ONE_F_ONE_B, AUTO = "stock fit", one_f_one_b.POLICY.name, "auto"
# Seconds of a block's F for one micro-batch.
_BLOCK_S = 0.008
_ROWS, _WIDTH, _SEED = 2, 1024, 7
# Steps that are not counted, which trace, and steps that are.
_WARM, _STEPS = 2, 5
_MOST_S, _TAIL = 600.0, 2000
Costs = tuple[float, float, float]


@dataclass(frozen=True)
class Trained:
    """Holds the results of one way.

    ``steps_s``: seconds of each counted step.  ``tasks``: device, kind, start and end in seconds of each task
    in the median step.  ``difference``: the largest of a weight from stock's.  ``same_bits``: whether all
    weights equal 1F1B's at the end; None: sums are in another order.
    """

    name: str
    steps_s: list[float]
    tasks: list[tuple[int, str, float, float]]
    difference: float = 0.0
    same_bits: bool | None = None

    @property
    def step_s(self) -> float:
        """Return the median step's seconds."""
        return statistics.median(self.steps_s)


def gpt_shares(blocks: int) -> list[Costs]:
    """Return F, dO and dW relative to a block's F: an embedding has no dO, a head takes 2.5 blocks."""
    return [(0.25, 0.0, 0.25), *[(1.0, 1.05, 0.95)] * blocks, (2.5, 2.5, 2.5)]


def layer_seconds() -> list[Costs]:
    """Return F, dO and dW of each layer for one micro-batch."""
    return [(f * _BLOCK_S, do * _BLOCK_S, dw * _BLOCK_S) for f, do, dw in gpt_shares(BLOCKS)]


def trained() -> list[Trained]:
    """Train in a process of its own, as devices must be made before TensorFlow's first op.

    BackendError: the process failed; the text is the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trained.json"
        own = {LOG: str(Path(folder) / "log"), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
        # A checkout in this folder, of which nothing is compiled, is not what was installed.
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        own["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command, env = [sys.executable, "-m", __name__, str(out)], os.environ | own
        try:
            done = subprocess.run(
                command, env=env, cwd=folder, capture_output=True, text=True, timeout=_MOST_S
            )
        except subprocess.TimeoutExpired as error:
            raise BackendError(f"training on emulated devices took more than {_MOST_S:g} s") from error
        if done.returncode:
            raise BackendError(f"training on emulated devices failed: {done.stderr[-_TAIL:]}")
        return [Trained(**way) for way in json.loads(out.read_text())]


def main(out: str) -> None:
    """Train each way, and write the results as JSON."""
    import numpy as np
    import tensorflow as tf

    import tf_ooo.demo.emulated  # noqa: F401 - which makes the log's file

    tf.config.set_visible_devices([], "GPU")  # four emulated CPU devices are wanted
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2 * DEVICES + 4)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    log = Log(os.environ[LOG])
    log.wait(1)
    ways = [_train(name, log, Path(out).parent) for name in (STOCK, ONE_F_ONE_B, AUTO)]
    stock, of_1f1b = ways[0][1], ways[1][1]
    finished = [
        dataclasses.replace(
            way,
            difference=max(float(np.abs(a - b).max()) for a, b in zip(weights, stock, strict=True)),
            same_bits=None if way.name == STOCK else all(map(np.array_equal, weights, of_1f1b)),
        )
        for way, weights in ways
    ]
    Path(out).write_text(json.dumps([dataclasses.asdict(way) for way in finished]))


def _train(name: str, log: Log, folder: Path) -> tuple[Trained, list[Any]]:
    """Train a model from the same weights, always on the same batch."""
    import keras

    from tf_ooo.demo.emulated import Emulated, emulated_model

    keras.backend.clear_session()
    # A device that is given the whole batch has each task as long as all micro-batches together.
    whole = MICROBATCHES if name == STOCK else 1
    layers = [Emulated((f * whole, do * whole, dw * whole)) for f, do, dw in layer_seconds()]
    model, x, y = emulated_model(layers, _ROWS * MICROBATCHES, _WIDTH, _SEED)
    steps: list[tuple[float, Any]] = []
    prefer()  # threads that other ways have started, too
    watch = _watch(log, lambda seconds, records: steps.append((seconds, records)))
    model.fit(x, y, batch_size=len(x), epochs=_WARM + _STEPS, shuffle=False, verbose=0,
              callbacks=[*([] if name == STOCK else [_ours(name, folder)]), watch])  # fmt: skip
    counted = steps[_WARM:]
    _, records = sorted(counted, key=lambda step: step[0])[len(counted) // 2]
    return Trained(name, [seconds for seconds, _ in counted], _tasks(records)), model.get_weights()


def _ours(name: str, folder: Path) -> Any:
    """Return the callback of a pipeline that is planned with the tasks' seconds.

    The schedule is read from a file, so that layers stay whole: a wait cannot be divided.
    """
    import tf_ooo
    from tf_ooo.costs.table import CostTable

    like: dict[str, Any] = dict.fromkeys(("output_bytes", "activation_bytes"), 4.0 * _ROWS * _WIDTH)
    like["weight_bytes"] = 4.0 * _WIDTH
    layers = tuple(tf_ooo.LayerCosts(*seconds, **like) for seconds in layer_seconds())
    split: dict[str, Any] = {"devices": DEVICES, "microbatches": MICROBATCHES}
    costs, path = CostTable(layers, tf_ooo.Link(30e-6)), folder / f"{name}.txt"
    path.write_text(tf_ooo.plan(layers=costs, schedule=name, **split).to_text())
    measured: dict[str, Any] = {"costs": costs, "profile_steps": 0, "compare": False, "check_loss": False}
    return tf_ooo.OOOBackprop("pipeline", path, **split, **measured)


def _watch(log: Log, add: Callable[[float, Any], None]) -> Any:
    """Return a callback that hands over the seconds of each step, and the tasks that ran in it."""
    import keras

    began_s: list[float] = []

    def begin(batch: int, logs: dict[str, float] | None = None) -> None:
        log.new()
        began_s[:] = [time.perf_counter()]

    def end(batch: int, logs: dict[str, float]) -> None:
        float(logs["loss"])
        add(time.perf_counter() - began_s[0], log.new())

    return keras.callbacks.LambdaCallback(on_train_batch_begin=begin, on_train_batch_end=end)


def _tasks(records: Any) -> list[tuple[int, str, float, float]]:
    """Return device, kind, start and end of each record, from the first one's start on."""
    began_s = float(records["start"].min())
    return [
        (
            int(device.decode().rpartition(":")[2]),
            name.decode().rpartition("/")[2].partition("_")[0],
            start - began_s,
            end - began_s,
        )
        for _, start, end, device, name in records.tolist()
    ]


if __name__ == "__main__":
    main(sys.argv[1])
