"""A model on workers that may each use half of what it needs; the system ends who uses more.

Beside it stock Keras trains in one process: without a limit, for its weights, and under the same limit.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.case import Case, Measured, Way, WayRun
from benchmarks.machine import memory_groups
from benchmarks.models import SEED, Network, check_sum, largest_difference, weights_of
from benchmarks.processes import BenchmarkError, command, end_with, quiet, requests, result_of
from tf_ooo.hosts.addresses import free_ports

_LENGTH, _VOCABULARY, _HEADS = 32, 512, 8
# Fewer micro-batches make smaller graphs, which are in the workers' memory, too.
_MICROBATCHES, _ROWS = 2, 8
# Tensors get this share of what a worker may use: its process and its graphs take the rest.
_PLANNED_SHARE = 0.78
# Adam has two numbers for each weight.
_WITH_SLOTS = 3
# Memory that is free is given back, so that the most that was used is what was needed.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "4"}


@dataclass(frozen=True)
class Asked:
    """A process trains this: ours over a cluster's workers, stock without one; it saves the weights."""

    cluster: str
    weights: str


def why_not(case: Case) -> str:
    """Say why this machine cannot run the case; return an empty text where it can."""
    return memory_groups.why_not()


def run(case: Case) -> Measured:
    """Run one way after the other: together they would need more memory than there is."""
    limit_bytes = case.parameters["limit_mb"] * 10**6
    ways: dict[str, WayRun] = {}
    not_run: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in case.ways:
            weights = str(Path(folder) / f"{len(ways)}.npz")
            with _limited(way, limit_bytes) as (cluster, groups):
                start = command(__name__, case, Asked(cluster, weights))
                alone = groups[0].command(start) if groups and not cluster else start
                environment = quiet(threads=None) | (_ALLOCATOR if groups else {})
                try:
                    ways[way.name] = WayRun(**result_of(alone, environment))
                except BenchmarkError:
                    if not groups or cluster:
                        raise
                    not_run[way.name] = "the system ended it: it needs more than the limit"
                used = [group.most_bytes for group in groups]
            if way.name in ways:
                ways[way.name].about["used_bytes"] = used
        whole, ours = case.ways[0].name, case.ways[1].name
        apart = largest_difference(*(_weights(Path(folder) / f"{number}.npz") for number in (1, 0)))
    stock_bits = ways[whole].bits
    ways[whole] = replace(ways[whole], bits=None)  # has nothing to be compared with
    ways[ours] = replace(ways[ours], largest_difference=apart)
    needed_bytes = _WITH_SLOTS * ways[whole].about["weights_bytes"]
    about = {"weights and slots, times the limit": round(needed_bytes / limit_bytes, 2), "not_run": not_run}
    return Measured(ways, stock_bits, None, about, not_run)


@contextlib.contextmanager
def _limited(way: Way, limit_bytes: int) -> Iterator[tuple[str, list[memory_groups.MemoryGroup]]]:
    """Make groups for the workers of a way, or for its one process; yield the workers' addresses, too."""
    workers = way.options["workers"]
    with contextlib.ExitStack() as stack:
        count = workers or int(way.options["limited"])
        prefix = f"benchmarks_{os.getpid()}_"
        groups = [
            stack.enter_context(memory_groups.memory_group(f"{prefix}{task}", limit_bytes))
            for task in range(count)
        ]
        cluster = ",".join(f"127.0.0.1:{port}" for port in free_ports(workers))
        start = [sys.executable, "-m", "tf_ooo", "worker", "--cluster", cluster, "--task"]
        for task in range(workers):
            worker = subprocess.Popen(
                groups[task].command([*start, str(task)]),
                env=quiet(threads=None) | _ALLOCATOR, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            assert worker.stdout is not None
            worker.stdout.readline()  # that it is ready
        yield cluster, groups


def _weights(path: Path) -> list[np.ndarray]:
    with np.load(path) as stored:
        return [stored[name] for name in stored.files]


def train(case: Case, asked: Asked) -> WayRun:
    """Train in this process, and save the weights."""
    import keras

    import tf_ooo

    given = case.parameters
    options = tf_ooo.Pipeline(
        devices=asked.cluster or 1,
        microbatches=_MICROBATCHES,
        memory_limit_bytes=int(_PLANNED_SHARE * given["limit_mb"] * 1e6),
        profile_steps=0,
    )
    callback = tf_ooo.OOOBackprop(options) if asked.cluster else None
    with tf_ooo.host_memory() if asked.cluster else contextlib.nullcontext():
        keras.utils.set_random_seed(SEED)
        sizes = {
            "layers": given["layers"],
            "width": given["width"],
            "heads": _HEADS,
            "vocabulary": _VOCABULARY,
        }
        model = Network("gpt2", _ROWS, (_LENGTH,), sizes, _VOCABULARY).build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    steps = 1 + given["steps"]
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, (_ROWS * steps, _LENGTH))
    marks: list[float] = []
    losses: list[float] = []

    def note(batch: int, logs: dict[str, float]) -> None:
        marks.append(time.perf_counter())
        losses.append(float(logs["loss"]))

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    x, y = tokens.astype("int32"), np.roll(tokens, -1, 1)
    callbacks += [callback] if callback else []
    model.fit(x, y, batch_size=_ROWS, shuffle=False, verbose=0, callbacks=callbacks)
    np.savez(asked.weights, *weights_of(model))
    about = {"weights_bytes": 4 * model.count_params(), "mean_losses": losses}
    if callback is not None:
        report = callback.report
        about |= {"schedule": report.schedule, "reason": report.fallback_reason}
        about["predicted_peak_bytes"] = list(report.pipeline.predicted_peak_bytes)
    predicted_s = callback.report.predicted_step_s if callback else None
    # The first step is traced and planned.
    return WayRun(list(np.diff(marks)), predicted_s, check_sum(model), None, about)


if __name__ == "__main__":
    end_with(train(*requests(Case, Asked)))
