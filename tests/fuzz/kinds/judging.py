"""Trains a set-up stock and with our callback, and says what came of it."""

from __future__ import annotations

import re
import traceback
from dataclasses import replace

import numpy as np

from tests.fuzz.compared import why_not_compiled
from tests.fuzz.kinds.drawing import OwnSetup
from tests.fuzz.kinds.training import Trained, train
from tests.harness.children import Outcome

GOOD, REFUSED, SAID = "good", "refused", "said"
# float32 beside float64: what is rounding in the one is nothing in the other.
ROUNDING, OF_DOUBLES, OF_HALF = 2e-6, 1e-9, 2e-2
# A pipeline of several micro-batches may refuse these, and the refusal must name this.
_MEET = r"compares rows with one another"
REFUSALS = {
    "ops over rows": rf"rows first meet at op.*{_MEET}",
    "Lambda over rows": rf"layer 'lambda.*{_MEET}",
    "Model.call over rows": rf"looked at: Mixing.*rows first meet.*{_MEET}",
    "layer over rows": rf"layer '(softmax|unit_normalization).*{_MEET}",
    "loss over rows": rf"looked at: loss of_rows.*{_MEET}|the loss adds up rows \(looked at: loss of_rows",
    "scaled gradients": r"gradient",
    "several models": r"",
}
# These variants may be refused with one micro-batch too.
ALWAYS_REFUSED = {
    "updates inside": r"loop",
    "sum of losses": r"a loop stays whole",
    "by hand": r"totals|Variable|accumulat|micro_steps",
}
# A pipeline may change these in a result, if a line says so: what the line must name, and that it comes
# before the first step. ``None`` among what is off: anything.
SAYINGS: dict[str, tuple[str, str | None]] = {
    "BatchNormalization": (r"batch_normalization.* over \d+ rows", None),
    "Dropout": (r"random numbers are drawn.*(dropout|gaussian_noise)", None),
    "layer that assigns": (r"assigning|state", None),
    "own logs": (r"the log norm is the mean of its micro-batches", r"^norm$"),
}


def run(setup: OwnSetup) -> Outcome:
    """Return what came of it; on one of several ranks, if it has ranks."""
    ranks = None
    if setup.ranks:
        import horovod.tensorflow as hvd

        from tf_ooo import data_parallel

        ranks = data_parallel.connect(setup.ranks.engine)
        hvd.init()
    try:
        stock = train(setup, ours=False, ranks=ranks)
    except Exception as error:
        return Outcome("stock", f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")
    try:
        ours = train(setup, ours=True, ranks=ranks)
    except Exception as error:
        return Outcome(type(error).__name__, f"{error}\n{traceback.format_exc()[-3000:]}")
    if ours.refused:
        return _of_refusal(setup, ours)
    off = differences(stock, ours)
    if setup.mode.endswith("pipeline"):
        return _of_pipeline(setup, off, ours)
    return _of_one_step(setup, off, ours)


def differences(stock: Trained, ours: Trained) -> dict[str, float]:
    """Return how far each weight, slot and log is off, if it has other bits; what one lacks is inf."""
    off, theirs, mine = {}, dict(stock.values), dict(ours.values)
    for name in theirs.keys() | mine.keys():
        a, b = theirs.get(name), mine.get(name)
        if a is None or b is None or a.shape != b.shape:
            off[name] = float("inf")
        elif a.tobytes() != b.tobytes():
            same_nan = np.array_equal(np.isnan(a), np.isnan(b)) if a.dtype.kind == "f" else True
            apart = np.abs(np.nan_to_num(a.astype("float64")) - np.nan_to_num(b.astype("float64")))
            size = max(1.0, float(np.abs(np.nan_to_num(a.astype("float64"))).max(initial=0.0)))
            off[name] = float(apart.max(initial=0.0)) / size if same_nan else float("inf")
    return off


def _of_refusal(setup: OwnSetup, ours: Trained) -> Outcome:
    said = ours.refused
    if ours.changed:
        return Outcome("refused after a weight changed", f"{ours.changed[:3]}: {said}")
    words = ALWAYS_REFUSED.get(setup.variant)
    if words is None and setup.mode.endswith("pipeline") and setup.microbatches > 1:
        words = REFUSALS.get(setup.kind)
    if not words:
        return Outcome("refused without need", said)
    if not re.search(words, said, re.DOTALL):
        return Outcome("a refusal does not name it", said)
    return Outcome(REFUSED, said)


def _of_one_step(setup: OwnSetup, off: dict[str, float], ours: Trained) -> Outcome:
    """One device, or each rank: the bits of stock, or a report that says rounding."""
    report = ours.report
    if setup.options["schedule"] != "auto" and report.rewritten_graph is None:
        return Outcome("not rewritten", f"{report.fallback_reason}")
    if not off:
        return Outcome(GOOD)
    worst = max(off.values())
    rounding = any("rounding" in text for text in (*ours.said, report.summary()))
    if rounding and worst < 1e-4:
        return Outcome(SAID, f"rounding, {worst:.1e}")
    return Outcome("not the same bits", _listed(off))


def _of_pipeline(setup: OwnSetup, off: dict[str, float], ours: Trained) -> Outcome:
    if ours.report.rewritten_graph is None:
        return Outcome("not rewritten", f"{ours.report.fallback_reason}")
    if setup.mode == "compiled_pipeline" and (said := why_not_compiled(ours.report)) is not None:
        return Outcome(SAID, said) if said else Outcome("nothing compiled", f"{ours.report.notes}")
    half = setup.kind == "half precision"
    far = {name: value for name, value in off.items() if value > (OF_HALF if half else ROUNDING)}
    if not far:
        return Outcome(GOOD)
    said = _said(setup, far, ours)
    if said:
        return Outcome(SAID, said)
    if not half and setup.dtype == "float32":  # what is rounding is not there in 64 bits
        wide = run(replace(setup, dtype="float64"))
        return replace(wide, text=f"in float64: {wide.text}") if wide.kind != GOOD else wide
    exact = {name: value for name, value in far.items() if half or value > OF_DOUBLES}
    return Outcome("another result", _listed(exact)) if exact else Outcome(GOOD)


def _said(setup: OwnSetup, far: dict[str, float], ours: Trained) -> str:
    """The line that says it; empty: none, or not of all that is off, or too late."""
    if setup.kind not in SAYINGS or setup.microbatches == 1:
        return ""
    words, only = SAYINGS[setup.kind]
    texts = ours.early if only is None else ours.said
    if only is not None and not all(re.search(only, name) for name in far):
        return ""
    return next((text for text in texts if re.search(words, text, re.DOTALL)), "")


def _listed(off: dict[str, float]) -> str:
    worst = sorted(off.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {value:.1e}" for name, value in worst[:6]) + f" ({len(off)} in all)"
