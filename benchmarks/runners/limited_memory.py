"""A model on workers that may each use half of what it needs; the system ends who uses more.

Beside it stock Keras trains in one process: without a limit, for its weights, and under the same limit.
"""

import contextlib
import os
import tempfile
import time

import keras
import numpy as np

import tf_ooo
from benchmarks.cases import Case, Measured, Way, WayRun
from benchmarks.machine.groups import memory_group, why_no_limit
from benchmarks.models import SEED, Network, compared, weights_of
from benchmarks.processes import BenchmarkError, cluster_of, command, quiet, result_of, worker_line

_LENGTH, _VOCABULARY, _HEADS = 32, 512, 8
# Fewer micro-batches make smaller graphs, which are in the workers' memory, too.
_MICROBATCHES, _ROWS = 2, 8
# Tensors get this share of what a worker may use: its process and its graphs take the rest.
_PLANNED_SHARE = 0.78
# Adam has two numbers for each weight.
_WITH_SLOTS = 3
# Memory that is free is given back, so that the most that was used is what was needed.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "4"}


def why_not(case: Case) -> str:
    """Say why this machine cannot run the case; return an empty text where it can."""
    return why_no_limit()


def run(case: Case) -> Measured:
    """Run one way after the other: together they would need more memory than there is."""
    ways, not_run = dict[str, WayRun](), dict[str, str]()
    whole, limit_bytes = case.ways[0].name, case.parameters["limit_mb"] * 10**6
    with tempfile.TemporaryDirectory() as folder:
        for way in case.ways:
            try:
                ways[way.name] = _ran(case, way, limit_bytes, folder)
            except BenchmarkError:
                if not way.options["limited"] or way.options["workers"]:
                    raise
                not_run[way.name] = "the system ended it: it needs more than the limit"
        weights = {name: list(np.load(f"{folder}/{name}.npz").values()) for name in ways}
    bits, ways = compared(ways, weights, weights.pop(whole))  # which has nothing to be compared with
    needed_bytes = _WITH_SLOTS * ways[whole].about["weights_bytes"]
    about = {"weights and slots, times the limit": round(needed_bytes / limit_bytes, 2), "not_run": not_run}
    return Measured(ways, bits, None, about, not_run)


def _ran(case: Case, way: Way, limit_bytes: int, folder: str) -> WayRun:
    """Run one way: its workers, or its one process, have the limit."""
    workers, limited = way.options["workers"], way.options["limited"]
    environment = quiet(threads=None) | (_ALLOCATOR if limited else {})
    names = [f"benchmarks_{os.getpid()}_{task}" for task in range(workers or int(limited))]
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(memory_group(name, limit_bytes)) for name in names]

        def line(cluster: str, task: int) -> list[str]:
            return groups[task].command(worker_line(cluster, task))

        cluster, _ = stack.enter_context(cluster_of(workers, line, environment, folder))
        start = command(f"{__name__}:train", case, cluster, f"{folder}/{way.name}.npz")
        ran: WayRun = result_of(groups[0].command(start) if limited and not workers else start, environment)
        ran.about["used_bytes"] = [group.most_bytes for group in groups]
    return ran


def train(case: Case, cluster: str, path: str) -> WayRun:
    """Train in this process, ours over the workers of a cluster, and save the weights."""
    given, steps = case.parameters, 1 + case.parameters["steps"]
    marks, losses = list[float](), list[float]()

    def note(batch: int, logs: dict[str, float]) -> None:
        marks.append(time.perf_counter())
        losses.append(float(logs["loss"]))

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    if cluster:
        limit_bytes = int(_PLANNED_SHARE * given["limit_mb"] * 1e6)
        options = tf_ooo.Pipeline(
            devices=cluster, microbatches=_MICROBATCHES, memory_limit_bytes=limit_bytes, profile_steps=0
        )
        callbacks.append(tf_ooo.OOOBackprop(options))
    with tf_ooo.host_memory() if cluster else contextlib.nullcontext():
        keras.utils.set_random_seed(SEED)
        sizes = {"heads": _HEADS, "vocabulary": _VOCABULARY} | {n: given[n] for n in ("layers", "width")}
        model = Network("gpt2", _ROWS, (_LENGTH,), sizes, _VOCABULARY).build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, (_ROWS * steps, _LENGTH))
    x, y = tokens.astype("int32"), np.roll(tokens, -1, 1)
    model.fit(x, y, batch_size=_ROWS, shuffle=False, verbose=0, callbacks=callbacks)
    np.savez(path, *weights_of(model))
    about = {"weights_bytes": 4 * model.count_params(), "mean_losses": losses}
    predicted_s = None
    if cluster:
        report = callbacks[1].report
        about |= {"schedule": report.schedule, "reason": report.fallback_reason}
        about["predicted_peak_bytes"] = list(report.pipeline.predicted_peak_bytes)
        predicted_s = report.predicted_step_s
    # The first step is traced and planned.
    return WayRun(list(np.diff(marks)), predicted_s, about=about)
