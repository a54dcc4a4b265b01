"""Pictures of the page, from kept rows, by matplotlib."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from benchmarks.kept import LOST, WON, Row
from benchmarks.report.tables import frame_of, predictions

_COLORS = {WON: "tab:green", LOST: "tab:red"}
_KINDS = {"F": "tab:blue", "dO": "tab:orange", "dW": "tab:green", "U": "tab:gray"}
_TICKS = (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.7, 2, 3, 4)
# The run whose median turns the README shows, and the ways beside each other.
README_CASE, README_WAYS = "gpt, 8 layers, 4 micro-batches, 4 devices, 5 ms", ("1f1b", "auto")


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw all pictures into a folder: ``forest.png``, ``predictions.png`` and ``turns.png``."""
    forest(frame_of(rows), folder / "forest.png")
    scatter(rows, folder / "predictions.png")
    shown = [row for row in rows if row.case == README_CASE and row.way in README_WAYS]
    last = [row for row in shown if row.run == shown[-1].run and "turn" in row.about]
    if last:
        strips(sorted(last, key=lambda row: README_WAYS.index(row.way)), folder / "turns.png")


def forest(frame: pd.DataFrame, path: Path) -> None:
    """Draw the gain of every run with its interval, one line each, by mode."""
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.2 * len(frame)))
    labels, place = dict[int, str](), 0
    for mode, of_mode in frame.groupby("Mode", sort=False):
        place += 1
        left = axes.get_yaxis_transform()
        axes.text(0.005, place, mode, transform=left, weight="bold", va="center", fontsize=8)
        for line in of_mode.itertuples():
            place += 1
            color = _COLORS.get(line.verdict, "tab:gray")
            ends = [line.ratio if pd.isna(end) else end for end in (line.low, line.high)]
            axes.plot(ends, [place, place], color=color, lw=2)
            axes.plot(line.ratio, place, "o", color=color, ms=4)
            labels[place] = f"{line.Setting}, over {line.way}"
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks([*labels], [*labels.values()], fontsize=7)
    axes.set_ylim(place + 1, 0)
    axes.set_xscale("log")
    axes.set(xticks=_TICKS, xticklabels=[f"{tick:g}" for tick in _TICKS], xlim=axes.get_xlim())
    axes.minorticks_off()
    axes.set_xlabel("times as fast as the strongest baseline of its run,\nmedian of paired turns and 95%")
    _save(figure, path)


def scatter(rows: Iterable[Row], path: Path) -> None:
    """Draw predicted over measured seconds of a step, by mode, beside lines of 5% and 20% error."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for mode, of_mode in predictions(rows).groupby("Mode", sort=False):
        axes.plot(of_mode["measured_s"], 100 * of_mode["error"], "o", ms=4, alpha=0.7, label=mode)
    axes.axhspan(-5, 5, color="tab:green", alpha=0.12, lw=0)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("seconds of a step, median of its turns")
    axes.set_ylabel("predicted before the run, % too long")
    axes.legend(fontsize=8)
    _save(figure, path)


def strips(rows: Sequence[Row], path: Path) -> None:
    """Draw one kept turn of each way on one scale: the one whose seconds are the median of its turns.

    Rows need ``about["turn"]``: lists of device, kind, stage, micro-batch, start and end in seconds.
    """
    end_ms = max(1e3 * event[5] for row in rows for event in row.about["turn"])
    size = 9, 1.1 + 1.5 * len(rows)
    figure, all_axes = plt.subplots(len(rows), 1, figsize=size, sharex=True, squeeze=False)
    for axes, row in zip(all_axes[:, 0], rows, strict=True):
        for device, kind, _stage, microbatch, *times_s in row.about["turn"]:
            start, end = (1e3 * time for time in times_s)
            axes.barh(device, end - start, left=start, height=0.9, color=_KINDS[kind], ec="white", lw=0.3)
            if end - start > 0.02 * end_ms and microbatch is not None:
                middle = (start + end) / 2
                axes.text(middle, device, str(microbatch + 1), fontsize=5, ha="center", va="center")
        axes.axvline(max(1e3 * event[5] for event in row.about["turn"]), color="black", lw=0.8)
        axes.set_title(f"{row.way}: {1e3 * row.median_s:.0f} ms a step", fontsize=9, loc="left")
        devices = sorted({event[0] for event in row.about["turn"]})
        axes.set_yticks(devices, [f"device {device + 1}" for device in devices], fontsize=7)
        axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the first task began")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in list(_KINDS.values())[:3]]
    figure.legend(handles, list(_KINDS)[:3], loc="upper right", ncol=3, fontsize=8)
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
