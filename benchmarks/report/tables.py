"""Tables of the page, from kept rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import pandas as pd

from benchmarks.case import NOBODY, PYTORCH, STOCK
from benchmarks.gains import LOST, Compared, compared, gain_of, ours_of, runs_of
from benchmarks.kept import Row

# The order of modes in tables and pictures; a mode that is not here comes last.
MODES = (
    "pipeline",
    "mesh",
    "unequal",
    "data_parallel",
    "layerpipe",
    "one_cpu",
    "any_size",
    "emulated",
    "torch",
)
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

    Columns: mode, case, run, suite, baseline, ratio, low, high, pairs, verdict, predicted (the gain by both
    plans, or nan), ours_s and baseline_s (medians), cores, machine, command.
    """
    lines = [_line(of) for of in compared(rows)]
    frame = pd.DataFrame(lines)
    if frame.empty:
        return frame
    place = {mode: number for number, mode in enumerate(MODES)}
    frame["place"] = frame["mode"].map(lambda mode: place.get(mode, len(place)))
    return frame.sort_values(["place", "case", "run"]).drop(columns="place").reset_index(drop=True)


def _line(of: Compared) -> dict[str, object]:
    ours = of.ours
    return {
        "mode": ours.mode, "case": ours.case, "run": ours.run, "suite": ours.suite,
        "baseline": of.baseline.way, "ratio": of.gain.ratio, "low": of.gain.low, "high": of.gain.high,
        "pairs": of.gain.pairs, "verdict": of.gain.verdict, "predicted": of.predicted,
        "ours_s": statistics.median(ours.turns_s), "baseline_s": statistics.median(of.baseline.turns_s),
        "cores": ours.cores, "machine": ours.machine, "command": ours.command,
    }  # fmt: skip


def newest(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the last run of each case."""
    return frame.groupby(["mode", "case"], sort=False).tail(1)


def result(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one line a mode: the setting whose gain is the middle one, and how many of all settings lost.

    Of an even number of settings it is the lower of the two in the middle.
    """
    lines = []
    for mode, of_mode in newest(frame).groupby("mode", sort=False):
        by_gain = of_mode.sort_values("ratio").reset_index(drop=True)
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
    lost = newest(frame).query("verdict == @LOST", local_dict={"LOST": LOST})
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
    last = {of_run[0].case: of_run for of_run in runs_of(rows).values()}
    lines = []
    for of_run in last.values():
        fused = [row for row in of_run if row.had_by == PYTORCH and row.about.get("fused")]
        shipped = [row for row in of_run if row.had_by == PYTORCH]
        nobody = [row for row in of_run if row.had_by == NOBODY]
        ours = ours_of(of_run)
        if ours is None or not fused or not nobody:
            continue
        asked = ours.parameters
        lines.append({
            "Model": asked["model"] + (", in processes" if asked.get("processes") else ""),
            "Devices": asked["devices"],
            "Over the best fused": _over(ours, fused),
            "Over the best of PyTorch": _over(ours, shipped),
            "Over the best unfused": _over(ours, nobody),
        })  # fmt: skip
    if not lines:
        return pd.DataFrame()
    by_model = pd.DataFrame(lines).groupby("Model", sort=False)
    table = by_model.agg(_range)
    table.insert(0, "Settings", by_model.size())
    return table.reset_index()


def _over(ours: Row, baselines: Sequence[Row]) -> float:
    fastest = min(baselines, key=lambda row: statistics.median(row.turns_s))
    return gain_of(fastest.turns_s, ours.turns_s).ratio


def _range(values: pd.Series) -> str:
    low, high = (f"{end:g}" if isinstance(end, int) else f"{end:.2f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def predictions(rows: Iterable[Row]) -> pd.DataFrame:
    """Return one line for each way that a plan was made for: predicted and measured seconds, and the error.

    Columns: mode, case, way, run, predicted_s, measured_s, error (above 0: predicted too slow).
    """
    lines = [
        {
            "mode": row.mode, "case": row.case, "way": row.way, "run": row.run,
            "predicted_s": row.predicted_s, "measured_s": statistics.median(row.turns_s),
        }
        for row in rows
        if row.predicted_s
    ]  # fmt: skip
    frame = pd.DataFrame(lines)
    if not frame.empty:
        frame["error"] = frame["predicted_s"] / frame["measured_s"] - 1
    return frame


def prediction_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the errors of predictions by mode: least, middle, greatest, and how many are within 5%."""
    frame = predictions(rows)
    if frame.empty:
        return frame
    of_mode = frame.groupby("mode", sort=False)["error"]
    lines = [
        {
            "Mode": TITLES.get(str(mode), str(mode)),
            "Runs": len(errors),
            "Error, least / middle / greatest": f"{errors.min():+.0%} / {errors.median():+.0%} / "
            f"{errors.max():+.0%}",
            "Within 2%": int((errors.abs() <= 0.02).sum()),
            "Within 5%": int((errors.abs() <= 0.05).sum()),
        }
        for mode, errors in of_mode
    ]
    return pd.DataFrame(lines)


def machines(rows: Iterable[Row]) -> pd.DataFrame:
    """Return what ran: by mode the runs, their turns, the share of a core, seconds of our step."""
    lines = []
    for mode in dict.fromkeys(row.mode for row in rows):
        of_mode = [row for row in rows if row.mode == mode]
        ours_s = [statistics.median(row.turns_s) for row in of_mode if row.had_by not in (STOCK, PYTORCH)]
        cores = sorted({row.cores for row in of_mode if row.cores is not None})
        lines.append({
            "Mode": TITLES.get(mode, mode),
            "Runs": len({row.run for row in of_mode}),
            "Turns of a way": f"{min(len(row.turns_s) for row in of_mode)} to "
            f"{max(len(row.turns_s) for row in of_mode)}",
            "Share of a core": ", ".join(f"{share:g}" for share in cores) or "all",
            "Step": f"{min(ours_s):.3g} to {max(ours_s):.3g} s",
            "Same bits as stock": _bits(of_mode),
        })  # fmt: skip
    return pd.DataFrame(lines)


def _bits(rows: Iterable[Row]) -> str:
    """How many of the compared rows have stock's bits, and how far the others are from them."""
    compared_rows = [row for row in rows if row.bits is not None]
    if not compared_rows:
        return "not compared"
    same = sum(row.bits == "stock" for row in compared_rows)
    apart = max((row.largest_difference or 0.0 for row in compared_rows), default=0.0)
    return f"{same} of {len(compared_rows)}" + (f", others within {apart:.0e}" if apart else "")
