"""The end of a set-up's program: trains twice, and compares the bits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from tests.fuzz.setups import Pipeline, Ranks, Setup
from tests.fuzz.several import LAUNCHES

SAME_BITS = 'assert not bits, f"not the same bits: {bits}"'
REWRITTEN = 'assert report.rewritten_graph is not None, f"not rewritten: {report.fallback_reason}"'
NOT_BACK = 'assert not report.fell_back, f"fell back: {report.fallback_reason}"'
MOVED = 'assert report.moved_ops and report.added_edges, "rewritten, but no op was moved"'


# In ``fit``: what our callback makes of the logs.
LOGS = "    history = history if callbacks else of_all_ranks(history)\n"
OF_ALL_RANKS = """\
def of_all_ranks(history):
    of_ranks, means = ranks.gather(history), {{}}
    for name in history:
        epochs = zip(*(history[name] for history in of_ranks), strict=True)
        means[name] = [math.fsum({rows} * v for v in values) / ({rows} * ranks.size) for values in epochs]
    return means


def stock_horovod():
    apply = model.optimizer.apply

    def averaging(gradients, variables=None):
        reduced = [None if g is None else hvd.allreduce(g, {how}) for g in gradients]
        return apply(reduced, variables)

    object.__setattr__(model.optimizer, "apply", averaging)
    model.train_function = None
    trained = fit()
    object.__delattr__(model.optimizer, "apply")
    model.train_function = None
    return trained

"""
CLUSTER = """\
import json
import os

workers = ["127.0.0.1:23451", "127.0.0.1:23452"]
task = {"type": "worker", "index": int(os.environ["HOROVOD_RANK"])}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

"""


def launching(setup: Setup) -> tuple[str, str]:
    """Return what stands before a program that two ranks run, and how to run it."""
    if not setup.ranks:
        return "", ""
    variables = "".join(f"{name}={value} " for name, value in LAUNCHES[setup.ranks.launch].items())
    start = CLUSTER if setup.ranks.engine == "collectives" else ""
    return start, f": {variables}horovodrun -np 2 python FILE"


def ranks_of(setup: Setup) -> Iterator[str]:
    """Joins the ranks; stock Horovod is what both engines are compared with."""
    if setup.ranks:
        yield "import math"
        yield "import zlib"
        yield ""
        yield "import horovod.tensorflow as hvd"
        yield "from tf_ooo import data_parallel"
        yield ""
        yield f'ranks = data_parallel.connect("{setup.ranks.engine}")'
        yield "hvd.init()"
        yield ""


def comparison(setup: Setup) -> Iterator[str]:
    """Lines that use what stands before them: ``fit`` and ``different``."""
    if setup.ranks:
        return _data_parallel(setup, setup.ranks)
    return _pipelines(setup) if setup.pipelines else _single(setup)


def _single(setup: Setup) -> Iterator[str]:
    options = f'schedule="{setup.schedule}", profile_steps={setup.profile_steps}, strict=True'
    yield "stock = fit()"
    yield f"callback = tf_ooo.OOOBackprop({options})"
    yield "rewritten = fit(callback)"
    yield "report = callback.report"
    yield "print(report.summary())"
    yield "bits = different(stock, rewritten)"
    yield SAME_BITS
    yield REWRITTEN
    yield NOT_BACK
    if setup.has_chain():
        yield MOVED
    else:
        yield "# Only the outputs are trained: there may be no order to choose."
        yield "moved = report.moved_ops and report.added_edges"
        yield 'one = len(report.layers) < 2 or any("_cell" in layer.name for layer in report.layers)'
        yield 'assert moved or one or not report.ops["dO"], f"rewritten, but no op was moved: {report.ops}"'


def _pipelines(setup: Setup) -> Iterator[str]:
    for name, pipeline in zip(("first", "second"), setup.pipelines, strict=True):
        options = {**_options(pipeline), "microbatches": setup.microbatches}
        yield f"{name} = {_callback('pipeline', options)}"
    yield "bits = different(fit(first), fit(second))"
    yield "for report in (first.report, second.report):"
    yield "    print(report.summary())"
    yield SAME_BITS
    yield "for report in (first.report, second.report):"
    yield f"    {REWRITTEN}"
    yield f"    {MOVED}"


def _data_parallel(setup: Setup, ranks: Ranks) -> Iterator[str]:
    fp16 = ", compression=hvd.Compression.fp16" if ranks.compression == "fp16" else ""
    yield OF_ALL_RANKS.format(rows=setup.rows, how=f"op=hvd.{ranks.op}{fp16}")
    yield "stock = stock_horovod()"
    options = {**_options(ranks), "engine": ranks.engine, "profile_steps": setup.profile_steps}
    del options["launch"]
    yield f"callback = {_callback('data_parallel', options)}"
    yield "rewritten = fit(callback)"
    yield "report = callback.report"
    yield "print(report.summary())"
    yield "bits = sum(ranks.gather(different(stock, rewritten)), [])"
    if setup.steps_per_execution > 1:
        yield "if bits:  # Keras' own loop has other bits than its single step for some layers (Conv3D)"
        yield "    model.steps_per_execution = 1"
        yield "    bits = sum(ranks.gather(different(stock_horovod(), rewritten)), [])"
    yield SAME_BITS
    yield "equal = (*model.trainable_variables, *model.optimizer.variables)"
    yield "sums = ranks.gather([zlib.crc32(np.array(v).tobytes()) for v in equal])"
    yield 'assert sums[0] == sums[1], f"ranks differ: {sums}"'
    if ranks.schedule != "auto":
        yield REWRITTEN
        yield NOT_BACK
    if ranks.schedule == "fast_forward" and setup.has_chain():
        yield MOVED


def _callback(mode: str, options: Mapping[str, Any]) -> str:
    given = ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items() if value is not None)
    return f'tf_ooo.OOOBackprop(mode="{mode}", {given}, strict=True)'


def _options(value: Pipeline | Ranks) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
