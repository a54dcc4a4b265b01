"""Do the side streams' kernels run beside the main stream's?  Reads TensorFlow's profiler of a few steps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tf_ooo.bench.shared.options import COUNT, SeveralValues, json_option, several
from tf_ooo.bench.shared.rows import Row, write_rows
from tf_ooo.bench.single.cases import OURS, STOCK, Case
from tf_ooo.bench.single.networks import NETWORKS
from tf_ooo.fit.spans import Span, busy_spans, length_s, span_of

if TYPE_CHECKING:
    from tf_ooo.compat.tf_profiler import TracedEvent


def overlap_of(events: Sequence[TracedEvent]) -> Row:
    """Busy seconds of each GPU stream, which is a line of a GPU's plane, and those of two or more at once."""
    streams: dict[str, list[Span]] = {}
    for event in events:
        if event.plane.startswith("/device:GPU") and event.line.startswith("Stream"):
            streams.setdefault(event.line, []).append(span_of(event))
    busy = {line: busy_spans(spans) for line, spans in streams.items()}
    beside_s, running, since_s = 0.0, 0, 0.0
    for moment_s, change in sorted(
        edge for spans in busy.values() for begin_s, end_s in spans for edge in ((begin_s, 1), (end_s, -1))
    ):
        beside_s += (moment_s - since_s) * (running >= 2)
        running, since_s = running + change, moment_s
    return {
        "streams_s": {line: length_s(spans) for line, spans in busy.items()},
        "kernels": {line: len(spans) for line, spans in streams.items()},
        "busy_s": length_s(busy_spans(itertools.chain.from_iterable(busy.values()))),
        "overlapped_s": beside_s,
    }


def profiled(case: Case, ways: Sequence[str], steps: int) -> list[Row]:
    """One row for each way that can be made, printed too; the others are printed with their reasons."""
    from tf_ooo.bench.single import worker  # imports TensorFlow
    from tf_ooo.compat.tf_profiler import traced_events

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
@click.option("--batch", type=COUNT, default=32, show_default=True)
@click.option("--steps", type=COUNT, default=5, show_default=True)
@several("--ways", click.Choice([STOCK, *OURS]), default=[STOCK, "early", "joint"], show_default=True)
@json_option
def single_overlap(
    network: str, batch: int, steps: int, ways: tuple[str, ...], json_file: Path | None
) -> None:
    """Do side streams run beside the main stream?

    Needs a GPU.  Reads TensorFlow's profiler of a few steps, of stock XLA and of ours.
    """
    write_rows(json_file, profiled(Case(network, batch), ways, steps))
