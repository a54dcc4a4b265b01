"""Tables of the page, from kept rows."""

import statistics
from collections.abc import Iterable, Sequence

import pandas as pd

from benchmarks.case import NOBODY, PYTORCH, STOCK
from benchmarks.gains import LOST, compared, gain_over, runs_of
from benchmarks.kept import SAME, Row

# In the order of tables and pictures; a mode that is not here comes last.
TITLES = {
    "pipeline": "Pipelines on workers",
    "mesh": "Replicas and pipelines",
    "unequal": "Workers of unequal speed",
    "data_parallel": "Data parallel (Horovod)",
    "layerpipe": "LayerPipe",
    "one_cpu": "One CPU device",
    "any_size": "Larger than a worker",
    "emulated": "Emulated devices",
    "torch": "Beside torch, by efficiency",
}


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """Return one line for each run: ours beside the strongest baseline that a user can have.

    Columns: mode, case, run, suite, baseline, ratio, low, high, pairs, verdict, and predicted (the gain by
    both plans, or nan).
    """
    lines = [
        {"mode": of.ours.mode, "case": of.ours.case, "run": of.ours.run, "suite": of.ours.suite}
        | {"baseline": of.baseline.way, **of.gain._asdict()}
        | {"verdict": of.gain.verdict, "predicted": of.predicted}
        for of in compared(rows)
    ]
    frame, places = pd.DataFrame(lines), {mode: place for place, mode in enumerate(TITLES)}
    if frame.empty:
        return frame
    frame["place"] = frame["mode"].map(lambda mode: places.get(mode, len(places)))
    return frame.sort_values(["place", "case", "run"], ignore_index=True)


def newest(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the last run of each case."""
    return frame.groupby(["mode", "case"], sort=False).tail(1)


def result(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one line a mode: the setting whose gain is the middle one, and how many of all settings lost.

    Of an even number of settings it is the lower of the two in the middle.
    """
    lines = []
    for mode, of_mode in newest(frame).groupby("mode", sort=False):
        by_gain = of_mode.sort_values("ratio", ignore_index=True)
        middle = by_gain.iloc[(len(by_gain) - 1) // 2]
        lines.append({
            "Mode": TITLES.get(str(mode), str(mode)),
            "Middle setting": middle["case"],
            "Baseline": f"`{middle['baseline']}`",
            "Gain (95%)": gain_text(middle["ratio"], middle["low"], middle["high"]),
            "All settings": f"{by_gain['ratio'].min():.2f} to {by_gain['ratio'].max():.2f}",
            "Lost": f"{(by_gain['verdict'] == LOST).sum()} of {len(by_gain)}",
            "Predicted": "" if pd.isna(middle["predicted"]) else f"{middle['predicted']:.2f}",
            "Command": f"`run {middle['suite']}`",
        })  # fmt: skip
    return pd.DataFrame(lines)


def gain_text(ratio: float, low: float | None, high: float | None) -> str:
    """Write ``1.12 (1.10 to 1.15)``."""
    return f"{ratio:.2f}" if low is None or pd.isna(low) else f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the settings in whose last run ours was slower, by the whole interval."""
    lost = newest(frame)
    lost = lost[lost["verdict"] == LOST]
    return pd.DataFrame({
        "Mode": lost["mode"].map(lambda mode: TITLES.get(mode, mode)),
        "Setting": lost["case"],
        "Baseline": lost["baseline"].map("`{}`".format),
        "Gain (95%)": [gain_text(*line) for line in lost[["ratio", "low", "high"]].itertuples(index=False)],
    })  # fmt: skip


def parts(rows: Iterable[Row]) -> pd.DataFrame:
    """Return for each model the least and the greatest gain of ours over each kind of baseline.

    The kinds are fused schedules, everything that PyTorch ships, and what nobody can have: what is left over
    the last does not come from sending dO before dW has run.
    """
    lines = []
    for run in {run[0].case: run for run in runs_of(rows).values()}.values():  # the last one of each case
        shipped = [row for row in run if row.had_by == PYTORCH]
        fused = gain_over((row for row in shipped if row.about.get("fused")), run)
        nobodys = gain_over((row for row in run if row.had_by == NOBODY), run)
        best = gain_over(shipped, run)
        if fused is None or nobodys is None or best is None:
            continue
        asked = run[0].parameters
        lines.append({
            "Model": asked["model"] + (", in processes" if asked.get("processes") else ""),
            "Devices": asked["devices"],
            "Over the best fused": fused.gain.ratio,
            "Over the best of PyTorch": best.gain.ratio,
            "Over the best unfused": nobodys.gain.ratio,
        })  # fmt: skip
    if not lines:
        return pd.DataFrame()
    by_model = pd.DataFrame(lines).groupby("Model", sort=False)
    table = by_model.agg(_range)
    table.insert(0, "Settings", by_model.size())
    return table.reset_index()


def _range(values: pd.Series) -> str:
    low, high = (f"{end:g}" if isinstance(end, int) else f"{end:.2f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def predictions(rows: Iterable[Row]) -> pd.DataFrame:
    """Return mode, measured seconds and error (above 0: too slow) of each way that a plan was made for."""
    lines = [(row.mode, row.predicted_s, statistics.median(row.turns_s)) for row in rows if row.predicted_s]
    frame = pd.DataFrame(lines, columns=["mode", "predicted_s", "measured_s"])
    return frame.assign(error=frame["predicted_s"] / frame["measured_s"] - 1)


def prediction_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the errors of predictions by mode: least, middle, greatest, and how many are within 5%."""
    lines = []
    for mode, errors in predictions(rows).groupby("mode", sort=False)["error"]:
        low, middle, high = errors.min(), errors.median(), errors.max()
        lines.append({
            "Mode": TITLES.get(str(mode), str(mode)),
            "Runs": len(errors),
            "Error, least / middle / greatest": f"{low:+.0%} / {middle:+.0%} / {high:+.0%}",
            "Within 2%": int((errors.abs() <= 0.02).sum()),
            "Within 5%": int((errors.abs() <= 0.05).sum()),
        })  # fmt: skip
    return pd.DataFrame(lines)


def machines(rows: Iterable[Row]) -> pd.DataFrame:
    """Return what ran: by mode the runs, their turns, the share of a core, seconds of our step."""
    rows, lines = list(rows), []
    for mode in dict.fromkeys(row.mode for row in rows):
        of_mode = [row for row in rows if row.mode == mode]
        ours_s = [statistics.median(row.turns_s) for row in of_mode if row.had_by not in (STOCK, PYTORCH)]
        cores = sorted({row.cores for row in of_mode if row.cores is not None})
        turns = [len(row.turns_s) for row in of_mode]
        lines.append({
            "Mode": TITLES.get(mode, mode),
            "Runs": len({row.run for row in of_mode}),
            "Turns of a way": f"{min(turns)} to {max(turns)}",
            "Share of a core": ", ".join(f"{share:g}" for share in cores) or "all",
            "Step": f"{min(ours_s):.3g} to {max(ours_s):.3g} s",
            "Same bits as stock": _bits([row for row in of_mode if row.bits is not None]),
        })  # fmt: skip
    return pd.DataFrame(lines)


def _bits(rows: Sequence[Row]) -> str:
    """How many of the compared rows have stock's bits, and how far the others are from them."""
    same, apart = sum(row.bits == SAME for row in rows), [row.largest_difference or 0.0 for row in rows]
    if not rows:
        return "not compared"
    return f"{same} of {len(rows)}" + (f", others within {max(apart):.0e}" if any(apart) else "")
