"""Fills a report with what became of a rewritten graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from grappler_passes.graph.dependencies import WOULD_CLOSE_A_CYCLE
from grappler_passes.graph.liveness import unknown_sizes
from grappler_passes.passes.base import Note
from grappler_passes.passes.order import CLOSES_A_CYCLE
from tf_ooo.costs.places import Places
from tf_ooo.planning.model.schedule import Task
from tf_ooo.report.parts import Rewritten, StepOps
from tf_ooo.report.report import Report
from tf_ooo.report.sections import LayerRow
from tf_ooo.rewriting.result import RewriteResult

# Passes note these; what was done as planned is no news.
_SKIPPED, _MIXED = "skipped", "mixed"
_OWN_ORDER = "left in TensorFlow's own order, as "
_EACH_OTHER, _IN_A_LOOP = "they would wait for each other", "a loop or a condition lies between them"


def fill_plan(report: Report, result: RewriteResult | None) -> None:
    """Copies what a rewrite found into the report."""
    if result is None or report.rewritten_graph is result.graph_def:
        return
    clear_plan(report)
    graph, schedule, notes = result.training_graph, result.schedule, result.notes
    report.notes[:] = [*notes, *(note for note in report.notes if note not in notes)]
    unknown = len(unknown_sizes(graph))
    scheduled = set(schedule.tasks)
    layers = [
        replace(LayerRow.of(layer), own_dO=Task("dO", layer.index) in scheduled) for layer in graph.layers
    ]
    report.put(replace(StepOps.of(graph, layers), mixed=dict(result.mixed)))
    report.put(Rewritten(result.moved_ops, result.added_edges, result.graph_def, notes))
    report.change(
        planned=schedule,
        plan_seconds=result.plan_seconds,
        predicted_peak_bytes=None if unknown else schedule.predicted_peak_bytes,
        peak_rows=None,
        unknown_size_ops=unknown,
    )


def told(whose: Callable[[], Places], notes: Iterable[Note], texts: Iterable[str] = ()) -> tuple[str, ...]:
    """Say what passes and plans could not do, in a user's words: each once, layers in the place of ops."""
    said: list[tuple[str, tuple[str, ...]]] = [(text, ()) for text in texts]
    unordered: dict[str, list[str]] = {}
    for note in notes:
        why = _why_unordered(note)
        if why:
            unordered.setdefault(why, []).extend(note.nodes)
        elif note.status == _MIXED:
            said.append((f"not taken apart: {note.reason}", note.nodes))
    said += [(_OWN_ORDER + why, tuple(nodes)) for why, nodes in unordered.items()]
    if not said:
        return ()
    places = whose()
    return tuple(dict.fromkeys(places.told(text, names) for text, names in said))


def _why_unordered(note: Note) -> str:
    """Say why two ops do not run in the planned order, without talk of graphs; empty: the note says it."""
    if note.status != _SKIPPED:
        return ""
    if note.reason.endswith((CLOSES_A_CYCLE, WOULD_CLOSE_A_CYCLE)):
        return _EACH_OTHER
    return _IN_A_LOOP


def clear_plan(report: Report) -> None:
    """Nothing is moved any more; what was found in the step stays, and so do the notes of others."""
    report.forget(*report.plan_notes)
    report.put(Rewritten())
    report.change(planned=None, timeline=None)
