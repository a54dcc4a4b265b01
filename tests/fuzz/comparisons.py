"""The end of a set-up's program: trains twice, and compares the bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields

from tests.fuzz.setups import Pipeline, Setup

SAME_BITS = 'assert not bits, f"not the same bits: {bits}"'
REWRITTEN = 'assert report.rewritten_graph is not None, f"not rewritten: {report.fallback_reason}"'
NOT_BACK = 'assert not report.fell_back, f"fell back: {report.fallback_reason}"'
MOVED = 'assert report.moved_ops and report.added_edges, "rewritten, but no op was moved"'


def comparison(setup: Setup) -> Iterator[str]:
    """Lines that use what stands before them: ``fit`` and ``different``."""
    return _pipelines(setup) if setup.pipelines else _single(setup)


def _single(setup: Setup) -> Iterator[str]:
    options = f'schedule="{setup.schedule}", profile_steps={setup.profile_steps}, strict=True'
    yield "stock = fit()"
    yield f"callback = tf_ooo.OOOBackprop({options})"
    yield "rewritten = fit(callback)"
    yield "report = callback.report"
    yield "print(report.summary())"
    yield "bits = different(stock, rewritten)"
    yield SAME_BITS
    yield REWRITTEN
    yield NOT_BACK
    if setup.has_chain():
        yield MOVED
    else:
        yield "# Only the outputs are trained: there may be no order to choose."
        yield "moved = report.moved_ops and report.added_edges"
        yield 'assert moved or report.ops["dO"] == 0, f"rewritten, but no op was moved: {report.ops}"'


def _pipelines(setup: Setup) -> Iterator[str]:
    yield f"first = {_callback(setup.pipelines[0], setup)}"
    yield f"second = {_callback(setup.pipelines[1], setup)}"
    yield "bits = different(fit(first), fit(second))"
    yield "for report in (first.report, second.report):"
    yield "    print(report.summary())"
    yield SAME_BITS
    yield "for report in (first.report, second.report):"
    yield f"    {REWRITTEN}"
    yield f"    {MOVED}"


def _callback(pipeline: Pipeline, setup: Setup) -> str:
    asked = {field.name: getattr(pipeline, field.name) for field in fields(pipeline)}
    options = {**asked, "microbatches": setup.microbatches}
    given = ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items() if value is not None)
    return f'tf_ooo.OOOBackprop(mode="pipeline", {given}, strict=True)'
