"""Tables from kept rows, and the pages that they stand in."""

import re
from collections.abc import Iterable, Sequence

import pandas as pd

from benchmarks.cases import NOBODY, PYTORCH, STOCK
from benchmarks.gpu import tables as gpu
from benchmarks.kept import LOST, SAME, Row, compared, gain_over, runs_of

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_README = ["Mode", "Middle setting", "Baseline", "Gain (95%)", "All settings", "Lost"]
# In the order of tables and pictures.
TITLES = {
    "pipeline": "Pipelines on workers",
    "mesh": "Replicas and pipelines",
    "unequal": "Workers of unequal speed",
    "data_parallel": "Data parallel (Horovod)",
    "layerpipe": "LayerPipe",
    "one_cpu": "One CPU device",
    "compiled": "Compiled tasks, one CPU",
    "any_size": "Larger than a worker",
    "emulated": "Emulated devices",
    "torch": "Beside torch, by efficiency",
    "torch_csv": "Our order in torch, emulated",
}
_EMULATED = ("emulated", "torch_csv")
_MEASURED = ("pipeline", "mesh", "unequal", "data_parallel", "layerpipe", "one_cpu", "compiled", "torch")


def tables_of(rows: Sequence[Row]) -> dict[str, str]:
    """Return all tables by the names that pages have for them, as Markdown."""
    frame = frame_of(rows)
    if frame.empty:
        return {}
    emulated, measured = (result(frame[frame["mode"].isin(modes)]) for modes in (_EMULATED, _MEASURED))
    by_name = {
        "result": measured,
        "emulated": emulated,
        "readme": pd.concat([measured, emulated])[_README],
        "torch-settings": in_torch(frame),
        "emulated-settings": parts([row for row in rows if row.mode == "emulated"]),
        "losses": losses(frame),
        "predictions": prediction_table(rows),
        "ran": machines([row for row in rows if row.mode != gpu.MODE]),
        "gpu": gpu.measured(rows),
        "gpu-on-paper": gpu.on_paper(),
    }
    return {name: markdown(table) for name, table in by_name.items()}


def markdown(table: pd.DataFrame) -> str:
    """Write a table as Markdown."""
    if table.empty:
        return "There is none yet.\n"
    lines = [list(table), ["---"] * len(table.columns), *table.fillna("").to_numpy().tolist()]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def with_tables(text: str, by_name: dict[str, str]) -> str:
    """Return the page with its tables made anew; KeyError: it asks for a table that there is none of."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{by_name[match[2]]}\n{match[3]}", text)


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """Return one line for each run: ours beside the strongest baseline that a user can have."""
    places = list(TITLES)
    by_mode = sorted(compared(rows), key=lambda of: (places.index(of.ours.mode), of.ours.case, of.ours.run))
    return pd.DataFrame([
        {"mode": of.ours.mode, "suite": of.ours.suite, "way": of.baseline.way}
        | {"Mode": TITLES[of.ours.mode], "Setting": of.ours.case, "Baseline": f"`{of.baseline.way}`"}
        | {"Gain (95%)": of.gain.text(), **of.gain._asdict(), "verdict": of.gain.verdict}
        | {"predicted": of.predicted}
        for of in by_mode
    ])  # fmt: skip


def newest(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the last run of each case."""
    return frame.groupby(["mode", "Setting"], sort=False).tail(1)


def result(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one line a mode: the setting whose gain is the middle one, and how many of all settings lost.

    Of an even number of settings it is the lower of the two in the middle.
    """
    lines = []
    for _, of_mode in newest(frame).groupby("mode", sort=False):
        by_gain = of_mode.sort_values("ratio", ignore_index=True)
        middle = by_gain.iloc[(len(by_gain) - 1) // 2]
        lines.append({
            "Mode": middle["Mode"],
            "Middle setting": middle["Setting"],
            "Baseline": middle["Baseline"],
            "Gain (95%)": middle["Gain (95%)"],
            "All settings": f"{by_gain['ratio'].min():.2f} to {by_gain['ratio'].max():.2f}",
            "Lost": f"{(by_gain['verdict'] == LOST).sum()} of {len(by_gain)}",
            "Predicted": "" if pd.isna(middle["predicted"]) else f"{middle['predicted']:.2f}",
            "Command": f"`run {middle['suite']}`",
        })  # fmt: skip
    return pd.DataFrame(lines)


def losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the settings in whose last run ours was slower, by the whole interval."""
    last = newest(frame)
    return last[last["verdict"] == LOST][["Mode", "Setting", "Baseline", "Gain (95%)"]]


def in_torch(frame: pd.DataFrame) -> pd.DataFrame:
    """Return each setting in which our order ran in torch."""
    last = newest(frame[frame["mode"] == "torch_csv"])
    told = last["predicted"].map("{:.2f}".format)
    return last[["Setting", "Baseline", "Gain (95%)"]].assign(Predicted=told)


def parts(rows: Iterable[Row]) -> pd.DataFrame:
    """Return for each model the least and the greatest gain of ours over each kind of baseline.

    The kinds are fused schedules, everything that PyTorch ships, and what nobody can have: what is left over
    the last does not come from sending dO before dW has run.
    """
    lines = []
    for run in {run[0].case: run for run in runs_of(rows)}.values():  # the last one of each case
        shipped = [row for row in run if row.had_by == PYTORCH]
        kinds = {
            "Over the best fused": [row for row in shipped if row.about.get("fused")],
            "Over the best of PyTorch": shipped,
            "Over the best unfused": [row for row in run if row.had_by == NOBODY],
        }
        gains = {kind: gain_over(baselines, run) for kind, baselines in kinds.items()}
        if None not in gains.values():
            asked = run[0].parameters
            model = asked["model"] + (", in processes" if asked.get("processes") else "")
            ratios = {kind: of.gain.ratio for kind, of in gains.items() if of}
            lines.append({"Model": model, "Devices": asked["devices"], **ratios})
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
    lines = [(TITLES[row.mode], row.predicted_s, row.median_s) for row in rows if row.predicted_s]
    frame = pd.DataFrame(lines, columns=["Mode", "predicted_s", "measured_s"])
    return frame.assign(error=frame["predicted_s"] / frame["measured_s"] - 1)


def prediction_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the errors of predictions by mode: least, middle, greatest, and how many are within 5%."""
    lines = []
    for mode, errors in predictions(rows).groupby("Mode", sort=False)["error"]:
        low, middle, high = errors.min(), errors.median(), errors.max()
        lines.append({
            "Mode": mode,
            "Runs": len(errors),
            "Error, least / middle / greatest": f"{low:+.0%} / {middle:+.0%} / {high:+.0%}",
            "Within 2%": (errors.abs() <= 0.02).sum(),
            "Within 5%": (errors.abs() <= 0.05).sum(),
        })  # fmt: skip
    return pd.DataFrame(lines)


def machines(rows: Sequence[Row]) -> pd.DataFrame:
    """Return what ran: by mode the runs, their turns, the share of a core, seconds of our step."""
    lines = []
    for mode in dict.fromkeys(row.mode for row in rows):
        of_mode = [row for row in rows if row.mode == mode]
        ours_s = [row.median_s for row in of_mode if row.had_by not in (STOCK, PYTORCH)]
        cores = sorted({row.cores for row in of_mode if row.cores is not None})
        turns = [len(row.turns_s) for row in of_mode]
        lines.append({
            "Mode": TITLES[mode],
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
