"""The rows of a report's summary: what was found, in a user's words."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tf_ooo.costs.places import KIND_WORDS
from tf_ooo.report.environment import ON
from tf_ooo.report.gain import Gain
from tf_ooo.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from tf_ooo.report.report import Report


def summary_rows(report: Report) -> list[tuple[str, str]]:
    """Return the summary as (what, value); what is not known is left out."""
    baselines, turns = report.baselines_s.items(), report.in_turns
    gains = [Gain(name, times_s, report.steps_s, None, turns) for name, times_s in baselines if times_s]
    software, _, device = report.environment.partition(ON)
    limits = "" if report.fell_back else ", ".join(report.limits)  # each is a share by itself
    where = "on one device" if report.fell_back and report.mode == "pipeline" else report.mode
    rows = [
        ("gain", report.headline),
        *(("", gain.text) for gain in gains[1:] if report.steps_s),
        (f"{report.ranks} ranks", _ranks_text(report)),
        ("one device", _first_text(report)),
        ("predicted", _predicted_text(report)),
        ("limited by", limits and f"{limits} (of the plan; these overlap)"),
        ("state", "" if report.state in report.headline else report.state),
        ("mode, schedule", f"{where}, {report.schedule}"),
        ("kept of several ways", report.way),
        ("compared", report.compared),
        ("comparison", _comparison_text(report)),
        ("model", report.model),
        ("batch", _batch_text(report)),
        *(_plan_rows(report) if report.ops else ()),
        *report.pipeline.rows(not report.fell_back),
        *report.layerpipe.rows(report.layers),
        ("step, stock", seconds_text(report.stock_step_s)),
        ("step, rewritten", seconds_text(report.measured_step_s)),
        ("step, noise", seconds_text(report.step_noise_s)),
        ("predicted peak", _peak_text(report)),
        ("memory limit", _limit_text(report)),
        ("predicted peak, stock", bytes_text(report.stock_predicted_peak_bytes)),
        *(("measured timeline", line) for line in report.measured_against_plan),
        ("measured timeline", _not_measured_text(report)),
        *((f"XLA, {step}", compiled["text"]) for step, compiled in report.compiled.items()),
        ("costs", report.why_no_costs and f"not known: {report.why_no_costs}"),
        ("planning", seconds_text(report.plan_seconds)),
        ("device", device),
        ("run", f"{report.date}  {software}".strip()),
    ]
    return [(what, value) for what, value in rows if value not in ("", "-")]


def _ranks_text(report: Report) -> str:
    """Say how much faster all ranks train than one, and which share of the step is not its own."""
    if not report.alone_s or not report.running_s:
        return ""
    alone_s, together_s = statistics.median(report.alone_s), statistics.median(report.running_s)
    return (
        f"{report.ranks * alone_s / together_s:.2f}x the throughput of one: {seconds_text(together_s)} for "
        f"{report.ranks} batches instead of {seconds_text(alone_s)} for one; communication and waiting "
        f"{max(0.0, 1 - alone_s / together_s):.0%}"
    )


def _first_text(report: Report) -> str:
    """Say what the first steps took; beside stock steps only those in micro-batches add something."""
    first_s, same = report.first_steps_s, report.same_micro_batches
    if not (first_s and report.steps_s) or (report.baselines_s and not same):
        return ""
    return f"{seconds_text(statistics.median(first_s))} a step{same} ({len(first_s)} at the start)"


def _predicted_text(report: Report) -> str:
    """Say what was predicted before such a step had run, and by how much that missed."""
    if report.predicted_step_s is None:
        return ""
    several = report.pipeline or report.layerpipe or report.mode == "data_parallel"
    predicted = f"{seconds_text(report.predicted_step_s)} a step" + (
        "" if several else ", all ops one by one"
    )
    if report.fell_back and report.pipeline:
        return f"{predicted}, by the plan that does not run"
    if not report.running_s:
        return predicted
    measured_s = statistics.median(report.running_s)
    error = report.predicted_step_s / measured_s - 1
    off = f"{abs(error):.0%} too {'high' if error > 0 else 'low'}"
    return f"{predicted}; measured {seconds_text(measured_s)}: the prediction is {off}"


def _comparison_text(report: Report) -> str:
    """Say what the test took."""
    if not report.compared_steps:
        return ""
    took_s, several = report.profiling_overhead_s, report.mode == "data_parallel"
    what = "further traces, profiling and planning" if several else "a second step's trace"
    trace = f"; {seconds_text(took_s)} for {what}" if took_s else ""
    return f"{report.compared_steps} steps in turns, which all trained{trace}"


def _batch_text(report: Report) -> str:
    rows, parts = report.batch_rows, report.pipeline.microbatches if report.pipeline else 1
    parts = 1 if report.fell_back else parts  # one device takes a batch whole
    if rows is None:
        return ""
    of_each = f", on each of {report.ranks} ranks" if report.ranks > 1 else ""
    return f"{rows} rows a step{of_each}" + (f", in {parts} micro-batches" if parts > 1 else "")


def _plan_rows(report: Report) -> list[tuple[str, str]]:
    return [
        ("ops per kind", _ops_text(report)),
        ("layers", str(len(report.layers))),
        ("moved ops", f"{report.moved_ops} ({report.added_edges} edges added)"),
        ("gradients that stay mixed", str(len(report.mixed) or "")),
        ("unclassified", str(len(report.unclassified) or "")),
    ]


def _ops_text(report: Report) -> str:
    counts = (f"{KIND_WORDS.get(kind, kind)} {count}" for kind, count in report.ops.items() if count)
    return ", ".join(counts)


def _peak_text(report: Report) -> str:
    unknown, rows = report.unknown_size_ops, report.peak_rows
    if report.predicted_peak_bytes is None and unknown:
        why = "sizes that only running tells" if rows else "open sizes (with batch_size= it is known)"
        return f"not known: {unknown} tensors have {why}"
    return bytes_text(report.predicted_peak_bytes) + (f", batches of {rows} rows" if rows else "")


def _limit_text(report: Report) -> str:
    """Say the limit of each device, and who says so."""
    limits = report.memory_limits_bytes
    each = [bytes_text(limit) for limit in limits] if len(set(limits)) > 1 else []
    sizes = ", ".join(each) or f"{bytes_text(report.memory_limit_bytes)} each"
    return "" if report.memory_limit_bytes is None else f"{sizes}, {report.memory_limit_from}"


def _not_measured_text(report: Report) -> str:
    """Say why there is no measured timeline; if stock was kept without a plan, also how to have one."""
    how = f"with {report.how_to_record}" if report.fallback_reason and report.how_to_record else ""
    if report.measured_timeline is not None or not (report.not_measured or how):
        return ""
    if not report.not_measured:
        return f"none: the stock step ran; timeline= records a plan, and {how} there is one"
    return f"none: {report.not_measured}" + (f"; {how} some steps are recorded" if how else "")
