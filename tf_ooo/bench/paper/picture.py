"""One picture of all networks: the published range, what is predicted, what was measured here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tf_ooo.bench.paper.figures import Figure, title_of

_PUBLISHED, _PREDICTED, _MEASURED = "#bbbbbb", "#1f6f8b", "#e4572e"


def save_picture(figures: Sequence[Figure], path: Path) -> None:
    """Writes a PNG: a line for each network and mode; runs at earlier settings are hollow."""
    from matplotlib.figure import Figure as Picture  # slow to import

    picture = Picture(figsize=(8.5, 1.6 + 0.36 * len(figures)), layout="constrained")
    axes = picture.add_subplot()
    labels: dict[str, str | None] = {
        "published": "published",
        "predicted": "predicted",
        "here": "measured here",
        "earlier": "at earlier settings",
    }
    for place, figure in enumerate(figures):
        if figure.published:
            low, high = figure.published
            axes.barh(place, high - low, left=low, height=0.7, color=_PUBLISHED, label=labels["published"])
            labels["published"] = None
        if figure.predicted:
            ends = min(figure.predicted), max(figure.predicted)
            axes.plot(ends, (place, place), "|-", color=_PREDICTED, linewidth=3, label=labels["predicted"])
            labels["predicted"] = None
        newest = [run for runs in figure.newest for run in runs]
        for name, filled in (("earlier", "none"), ("here", "full")):
            gains = [run.gain for run in figure.measured if (run in newest) == (filled == "full")]
            if gains:
                at = [place] * len(gains)
                axes.plot(gains, at, "o", color=_MEASURED, fillstyle=filled, label=labels[name])
                labels[name] = None
    names = [f"{title_of(figure)}, {figure.mode.replace('_', ' ')}" for figure in figures]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("times as fast as the baseline", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    picture.legend(loc="outside upper center", ncols=3, fontsize=8)
    picture.savefig(path, dpi=110)
