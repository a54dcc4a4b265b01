"""What a run of ``tf-ooo bench data-parallel`` is asked for, and the rows that come of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from tf_ooo.bench.shared.rows import Row, bits_text, known, seconds_of

BASELINE, LOCAL, TUNED = "horovod", "local", "horovod_tuned"
TAPE, PLAIN = "horovod_tape", "k=0"
# Stock, with as many steps in one execution as ours.
SAME_STEPS = ("horovod_k", "horovod_tape_k")
# TensorFlow's own strategy, with one step and with as many.
STRATEGY, STRATEGY_SAME_STEPS = "multi_worker", "multi_worker_k"
STOCK = (BASELINE, STRATEGY)
# Threads that communicate do not wait for those that compute; in runs before 2026-11-26 they did.
MESSAGES = "run first"
# Ours through TensorFlow's own collectives instead of Horovod.
COLLECTIVES = "collectives"
# Name: what the callback is given; None: without tf_ooo.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    TAPE: None,
    **dict.fromkeys((*SAME_STEPS, STRATEGY, STRATEGY_SAME_STEPS)),
    LOCAL: None,
    "in_order": {"schedule": "in_order", "profile_steps": 0},
    PLAIN: {"schedule": "reverse_first_k", "k": 0, "profile_steps": 0},
    "reverse_first_k": {"schedule": "reverse_first_k", "profile_steps": 0},
    "search": {"schedule": "search", "profile_steps": 0},
    f"{COLLECTIVES}_k=0": {"schedule": "reverse_first_k", "k": 0, "profile_steps": 0, "engine": COLLECTIVES},
    f"{COLLECTIVES}_search": {"schedule": "search", "profile_steps": 0, "engine": COLLECTIVES},
    # Fits of a bench are too short to pay for a comparison: it is asked for.
    "auto": {"profile_steps": 2, "compare": True},
}


@dataclass(frozen=True)
class DataParallelRun:
    """Options of the command, and the prefix of the CPU groups.

    ``communication``: how many times as long as computing it was to take, where the link was chosen so; 0: it
    was chosen by ``mbit``.
    """

    workload: str
    configurations: list[str]
    mbit: float
    workers: int
    cores: float
    rows: int
    steps: int
    repetitions: int
    communication: float = 0.0
    group: str = ""
    cluster: str = ""


class DataParallelMeasured(TypedDict):
    """Of each configuration ``seconds`` of a step in each turn, a check sum of its weights, a plan;
    ``communication_s``: of one message as large as all that is sent, an allreduce of ``gradient_bytes``;
    ``batch_rows``: of each worker."""

    configurations: dict[str, Row]
    communication_s: float
    gradient_bytes: int
    workers: int
    batch_rows: int


def bandwidth_mbit(alone: DataParallelMeasured, communication: float) -> float:
    """The link on which all gradients take so many times as long as computing, by ``alone``'s local steps.

    A ring of n workers sends them 2 (n - 1) times (Patarasuk & Yuan 2009), over one link here.
    """
    compute_s = _median_s(alone, LOCAL)
    sent_bytes = 2 * (alone["workers"] - 1) * alone["gradient_bytes"]
    return round(8 * sent_bytes / (communication * compute_s) / 1e6, 1)


def as_if_in_turns(
    alone: DataParallelMeasured, shipped: DataParallelMeasured, together: DataParallelMeasured
) -> Row:
    """Stock Horovod with knobs, which are a process's, from processes of their own.

    Its times as they would be in turns: what knobs change of Horovod ``shipped``, which had processes of its
    own too, is what they change of the same steps ``together`` with all others; how fast the machine computed
    meanwhile is taken out.
    """
    stock_k = SAME_STEPS[0]
    run = alone["configurations"][stock_k]
    same = _median_s(together, stock_k) / _median_s(shipped, stock_k)
    machine = _median_s(shipped, LOCAL) / _median_s(alone, LOCAL)
    return run | {"seconds": [seconds * same * machine for seconds in run["seconds"]]}


def _median_s(measured: DataParallelMeasured, name: str) -> float:
    return float(statistics.median(measured["configurations"][name]["seconds"]))


def rows_of(
    measured: DataParallelMeasured, asked: DataParallelRun, tuned: Sequence[Row] = (),
    knobs: Mapping[str, str] | None = None,
) -> list[Row]:  # fmt: skip
    """One row for each configuration, beside stock Horovod as it ships; of the ``tuned`` runs the best.

    ``over_strongest``: how many times as fast as the fastest of all that are stock.  ``reordering_alone``: as
    this mode with as many steps together, in which nothing is reordered.  ``knobs``: Horovod's, which
    all were given.
    """
    runs = dict(measured["configurations"])
    if tuned:
        runs[TUNED] = min(tuned, key=lambda run: statistics.median(run["seconds"]))
    local = runs.pop(LOCAL)["seconds"] if LOCAL in runs else None
    local_s = None if local is None else statistics.median(local)
    # Its fastest turn: the median of another configuration may not be below a bound by noise.
    bound_s = None if local is None else max(min(local), measured["communication_s"])
    stock, rows = runs[BASELINE], []
    medians = {name: statistics.median(run["seconds"]) for name, run in runs.items()}
    strongest = min((name for name in medians if name.startswith(STOCK)), key=medians.__getitem__)
    for name, run in runs.items():
        seconds, is_stock = seconds_of(run["seconds"], stock["seconds"]), name.startswith(STOCK)
        plain_s = medians.get(f"{COLLECTIVES}_{PLAIN}" if name.startswith(COLLECTIVES) else PLAIN)
        row = {
            "workload": asked.workload,
            "mode": "data_parallel",
            "baseline": BASELINE,
            "devices": measured["workers"],
            "bandwidth_bit_s": asked.mbit * 1e6 or None,
            "communication": asked.communication or None,
            "cores": asked.cores,
            "steps": asked.steps,
            "batch_rows": measured.get("batch_rows"),
            "messages": MESSAGES,
            "bound_s": bound_s,
            "compute_s": local_s,
            "communication_s": measured["communication_s"],
            **seconds,
            "schedule": name,
            "runs": run.get("schedule"),
            "predicted_step_s": run.get("predicted_step_s"),
            "over_bound": None if bound_s is None else seconds["step_s"] / bound_s,
            "strongest": strongest,
            "over_strongest": medians[strongest] / medians[name],
            "reordering_alone": None if is_stock or plain_s is None else plain_s / medians[name],
            "bit_equal": run["bits"] == stock["bits"],
            "losses": run.get("losses"),
            "reason": run.get("reason") or None,
            "knobs": dict(knobs or {}) | run.get("knobs", {}) or None,
        }
        rows.append(known(row))
    return rows


def text_of(row: Row) -> str:
    """One line."""
    mbit = row.get("bandwidth_bit_s", 0) / 1e6
    more = f", predicted {row['predicted_step_s'] * 1e3:.0f} ms" if "predicted_step_s" in row else ""
    if "reordering_alone" in row:
        more += f", {row['over_strongest']:.2f}x {row['strongest']}, {row['reordering_alone']:.2f}x {PLAIN}"
    if "bound_s" in row:
        more += f", {row['over_bound']:.2f} of {row['bound_s'] * 1e3:.0f} ms, the bound"
    return (
        f"{row['workload']} {mbit:6.0f} Mbit/s  {row['schedule']:18s} {row['step_s'] * 1e3:7.1f} ms "
        f"({row['step_s_min'] * 1e3:.0f}-{row['step_s_max'] * 1e3:.0f})  {row['speedup']:.2f}x"
        f"{more}, {bits_text(row)}"
    )
