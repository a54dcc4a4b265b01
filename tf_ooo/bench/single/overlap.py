"""Do the side streams' kernels run beside the main stream's?  Reads TensorFlow's profiler of a few steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tf_ooo.bench.shared.options import SeveralValues, json_option, several
from tf_ooo.bench.shared.rows import Row, write_rows
from tf_ooo.bench.single.cases import OURS, STOCK, Case
from tf_ooo.bench.single.networks import NETWORKS

if TYPE_CHECKING:
    from tf_ooo.compat.tf_profiler import TracedEvent


def overlap_of(events: Sequence[TracedEvent]) -> Row:
    """Busy seconds of each GPU stream, and seconds in which two or more are busy at once.

    ``events`` are of GPU planes; a line is a stream.
    """
    streams: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.plane.startswith("/device:GPU") and event.line.startswith("Stream"):
            streams.setdefault(event.line, []).append((event.begin_s, event.begin_s + event.duration_s))
    merged = {line: _merged(spans) for line, spans in streams.items()}
    edges = sorted(
        [(begin, 1) for spans in merged.values() for begin, _ in spans]
        + [(end, -1) for spans in merged.values() for _, end in spans]
    )
    busy_s = beside_s = 0.0
    running, since = 0, 0.0
    for moment, change in edges:
        busy_s += (moment - since) * (running >= 1)
        beside_s += (moment - since) * (running >= 2)
        running, since = running + change, moment
    return {
        "streams_s": {line: sum(end - begin for begin, end in spans) for line, spans in merged.items()},
        "kernels": {line: len(spans) for line, spans in streams.items()},
        "busy_s": busy_s,
        "overlapped_s": beside_s,
    }


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def profiled(case: Case, ways: Sequence[str], steps: int) -> list[Row]:
    """One row for each way that can be made, printed too; the others are printed with their reasons."""
    from tf_ooo.bench.single import worker  # noqa: PLC0415 - imports TensorFlow
    from tf_ooo.compat.tf_profiler import traced_events  # noqa: PLC0415

    timed = worker.TimedSteps(case)
    rows: list[Row] = []
    for way in ways:
        timed.make(way)
    for way, step in timed.steps.items():
        events: list[TracedEvent] = []
        with traced_events(events):
            worker.run(step, steps)
        row = {"workload": case.name, "schedule": way, "device": worker.device(), "note": timed.said[way]}
        compiled = timed.modules[way].to_dict() if way in timed.modules else None
        rows.append({**row, "compiled": compiled, **overlap_of(events)})
        click.echo(json.dumps(rows[-1]))
    for way in set(ways) - timed.steps.keys():
        click.echo(f"{way}: not run: {timed.said[way]}")
    return rows


@click.command("single-overlap", cls=SeveralValues)
@click.option("--network", type=click.Choice(NETWORKS), default="densenet121-k12", show_default=True)
@click.option("--batch", default=32, show_default=True)
@click.option("--steps", default=5, show_default=True)
@several("--ways", click.Choice([STOCK, *OURS]), default=[STOCK, "early", "joint"], show_default=True)
@json_option
def single_overlap(
    network: str, batch: int, steps: int, ways: tuple[str, ...], json_file: Path | None
) -> None:
    """Do side streams run beside the main stream?

    Needs a GPU.  Reads TensorFlow's profiler of a few steps, of stock XLA and of ours.
    """
    write_rows(json_file, profiled(Case(network, batch), ways, steps))
