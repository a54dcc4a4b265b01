"""Reads seconds of stages from traces of ``torch.profiler``: one Chrome trace for each rank of a pipeline.

Torch 2.14 records each action of a multi-stage schedule as a range named ``PP:1F0``: stage, letter and
micro-batch; :mod:`tf_ooo.planning.model.torch_csv` has the letters.  A range begins with waiting for what
others send, so only the time from its first op to the end of its last op counts; on a GPU, only its kernels'
time.
"""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.costs.table import CostTable, errors_of
from tf_ooo.errors import CostError

_ACTION = re.compile(r"PP:(\d+)([FIWB])\d+")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MICROSECOND_S = 1e-6
_HALVED = "of stages whose backward pass torch ran at once, a half is dO and a half dW"
_UNKNOWN = "a trace of torch tells seconds alone: no bytes, no update, no messages"

Seconds = dict[tuple[int, str], list[float]]  # the seconds of each run, by stage and letter


def load_costs(path: str | Path) -> CostTable:
    """Return the costs in a file, or from a folder of traces.  CostError says what is wrong, and where."""
    path = Path(path)
    if path.is_dir():
        return costs_of_traces(sorted(path.glob("*.json")), path)
    with errors_of(str(path)):
        is_trace = '"traceEvents"' in path.read_text(encoding="utf-8")
    return costs_of_traces([path], path) if is_trace else CostTable.load(path)


def costs_of_traces(paths: Iterable[Path], where: Path) -> CostTable:
    """Return one layer per stage, with the medians of its F, dO and dW."""
    seconds: Seconds = defaultdict(list)
    for path in paths:
        with errors_of(str(path)):
            content = json.loads(path.read_text(encoding="utf-8"))
            for stage, letter, run_s in _actions(_ranges(content)):
                seconds[stage, letter].append(run_s)
    if not seconds:
        raise CostError(
            f"{where}: no action of a pipeline (PP:0F0) in its traces; torch names those of schedules with "
            "several stages on a rank, and of whatever is loaded from a file (--torch-csv)"
        )
    stages = range(max(stage for stage, _ in seconds) + 1)
    halved = any((stage, "W") not in seconds for stage in stages[1:])
    layers = tuple(_layer(seconds, stage, where) for stage in stages)
    return CostTable(layers, source="measured", device="torch", assumptions=(*[_HALVED][:halved], _UNKNOWN))


def _layer(seconds: Seconds, stage: int, where: Path) -> LayerCosts:
    medians = {
        letter: statistics.median(seconds[stage, letter]) for letter in "FIWB" if (stage, letter) in seconds
    }
    if "F" not in medians or not medians.keys() & {"W", "B"}:
        raise CostError(
            f"{where}: stage {stage} has no forward or no backward; give a folder with each rank's trace"
        )
    if "W" in medians:
        output_grad_s, weight_grad_s = medians.get("I", 0.0), medians["W"]
    else:  # nobody reads the gradient of the first stage's input
        output_grad_s = medians["B"] / 2 if stage else 0.0
        weight_grad_s = medians["B"] - output_grad_s
    return LayerCosts(medians["F"], output_grad_s, weight_grad_s, name=f"stage{stage}")


def _ranges(content: Any) -> list[dict[str, Any]]:
    """Return the events of a trace that have a duration."""
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise CostError("no trace of torch.profiler: it has no list traceEvents")
    ranges = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    for event in ranges:
        if not all(isinstance(event.get(key), (int, float)) for key in ("ts", "dur")):
            raise CostError(f"no trace of torch.profiler: an event without ts and dur: {event!r:.80}")
    return ranges


def _actions(ranges: list[dict[str, Any]]) -> Iterator[tuple[int, str, float]]:
    """Yield stage, letter and seconds of each action that ran; actions of a rank never overlap."""
    of_cpu = [event for event in ranges if event.get("cat") != "gpu_user_annotation"]
    named = ((_ACTION.fullmatch(str(event.get("name"))), event) for event in of_cpu)
    actions = sorted(
        ((event["ts"], event["dur"], match) for match, event in named if match), key=lambda one: one[:2]
    )
    starts = [start for start, _, _ in actions]
    spans: dict[int, tuple[float, float]] = {}
    for issued, start, end in _work(ranges):
        number = bisect_right(starts, issued) - 1
        if number >= 0 and issued <= starts[number] + actions[number][1]:
            first, last = spans.get(number, (start, end))
            spans[number] = min(first, start), max(last, end)
    for number, (_, _, match) in enumerate(actions):
        first, last = spans.get(number, (0.0, 0.0))  # torch's I of the first stage does nothing
        yield int(match[1]), match[2], (last - first) * _MICROSECOND_S


def _work(ranges: list[dict[str, Any]]) -> Iterator[tuple[float, float, float]]:
    """Yield when each kernel was launched, began and ended; each op if the trace has no kernels."""
    kernels = [event for event in ranges if event.get("cat") == "kernel"]
    launched = {_correlation(event): event["ts"] for event in ranges if event.get("cat") in _LAUNCHES}
    for event in kernels or [event for event in ranges if event.get("cat") == "cpu_op"]:
        name, start = str(event.get("name")), event["ts"]
        if not name.startswith(("nccl", "c10d::", "gloo:")):
            yield launched.get(_correlation(event), start) if kernels else start, start, start + event["dur"]


def _correlation(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")
