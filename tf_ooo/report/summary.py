"""Computes the first lines of a report: how much faster a step is, and the rows of the summary."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tf_ooo.units import KIND_WORDS, bytes_text, seconds_text

if TYPE_CHECKING:
    from keras import Model

    from tf_ooo.report.report import Report


# Between the software and the device that it runs on.
ON = "; on "


def environment(model: Model | None = None) -> str:
    """Return versions and device, for the model's Keras or else for ``tf.keras``.  Starts no GPU."""
    import tensorflow as tf

    from tf_ooo.compat import versions
    from tf_ooo.version import __version__

    keras = versions.user_keras() if model is None else versions.keras_of(model)
    name = "Keras" if keras.__name__ == "keras" else keras.__name__
    software = f"tf_ooo {__version__}, TensorFlow {tf.__version__}, {name} {keras.__version__}"
    device = f"CPU {platform.machine()}, {os.cpu_count()} cores"
    if gpus := tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpus[0])
        device = f"{len(gpus)} x {details.get('device_name', 'GPU')}"
    return f"{software}, Python {platform.python_version()}{ON}{device}"


# This belongs to the standard normal distribution: an interval holds the ratio in 95 of 100 cases.
_TWO_SIDED_95 = 1.96
# A machine with other users changes its speed by at least so much from one group of steps to the next: equal
# short fits differed by 11% and 13%.
_LEAST_DRIFT = 0.1
# Steps whose median tells how fast the machine was.
_GROUP = 6
# Two ways to measure a step differ by no more than that, if the machine was as fast.
_NOT_ALIKE = 2.0


@dataclass(frozen=True)
class Gain:
    """Holds measured steps beside those of a baseline.

    Attributes:
        baseline: its name, ``"stock Keras"`` or ``"one device"``.
        baseline_s, ours_s: seconds of single steps, at least one of each.
        decided: the interval of steps compared in turns, valid for repeated looks; None: calculated from the
            seconds.
        in_turns: whether steps of both took turns; if not, one group ran before the other, and the machine
            may have been faster then.
        elsewhere_s: about the seconds of a baseline's step at another moment; 0: not known.
    """

    baseline: str
    baseline_s: Sequence[float]
    ours_s: Sequence[float]
    decided: tuple[float, float] | None = None
    in_turns: bool = False
    elsewhere_s: float = 0.0

    @property
    def baseline_median_s(self) -> float:
        return statistics.median(self.baseline_s)

    @property
    def ours_median_s(self) -> float:
        return statistics.median(self.ours_s)

    @property
    def ratio(self) -> float:
        """Return the baseline's median over ours: above 1, ours is faster."""
        return self.baseline_median_s / self.ours_median_s

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95% interval of the ratio; None: too few steps to say.

        If steps did not take turns, it is wider by :attr:`drift` at both ends.
        """
        if self.decided is not None:
            return self.decided
        within = self._within_groups
        if within is None or self.in_turns:
            return within
        return within[0] / (1 + self.drift), within[1] * (1 + self.drift)

    @property
    def drift(self) -> float:
        """Return by which share the machine may have been slower for one group of steps than for the other.

        It is the largest distance between the medians of a few successive steps and of all of their kind, or
        between the baseline's and its step's at another moment; at least 10%.
        """
        slowed = self.baseline_median_s / self.elsewhere_s if self.elsewhere_s else 1.0
        between = slowed - 1 if slowed > _NOT_ALIKE else 0.0
        return max(_LEAST_DRIFT, _moved(self.baseline_s), _moved(self.ours_s), between)

    @property
    def _within_groups(self) -> tuple[float, float] | None:
        """Return the interval as if both groups had run at the same time: Hodges' and Lehmann's.

        It spans the ratios of all pairs of steps, without as many of the lowest and the highest as the
        Mann-Whitney test allows.  An interrupted step moves it little.
        """
        ours, theirs = len(self.ours_s), len(self.baseline_s)
        pairs = ours * theirs
        left_out = math.floor(pairs / 2 - _TWO_SIDED_95 * math.sqrt(pairs * (ours + theirs + 1) / 12))
        if left_out < 1:
            return None
        ratios = sorted(baseline_s / our_s for baseline_s in self.baseline_s for our_s in self.ours_s)
        return ratios[left_out - 1], ratios[pairs - left_out]

    @property
    def faster(self) -> bool:
        """Return whether ours is surely faster."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def slower(self) -> bool:
        """Return whether ours is surely slower."""
        return self.interval is not None and self.interval[1] < 1

    @property
    def text(self) -> str:
        """Say the gain in plain words, with both times, the number of steps and the interval."""
        ours, baseline = seconds_text(self.ours_median_s), seconds_text(self.baseline_median_s)
        times = f"{ours} a step instead of {baseline} ({self.basis})"
        if self.slower:
            return f"slower than {self.baseline}: {times}"
        if self.faster:
            about = "" if self._took_turns else "about "
            return f"{about}{self.ratio:.2f}x faster than {self.baseline}: {times}"
        return f"no sure gain over {self.baseline}: {times}"

    @property
    def basis(self) -> str:
        """Return ``12 + 12 steps, 95% interval 1.19-1.29``; ``5 + 20 steps, not in turns, ...``."""
        steps = f"{len(self.baseline_s)} + {len(self.ours_s)} steps"
        turns, interval = "" if self._took_turns else ", not in turns", self.interval
        range_text = (
            "95% interval {:.2f}-{:.2f}".format(*interval)
            if interval
            else f"{self.ratio:.2f}x, too few for an interval"
        )
        return f"{steps}{turns}, {range_text}"

    @property
    def _took_turns(self) -> bool:
        return self.in_turns or self.decided is not None

    @property
    def ratio_text(self) -> str:
        """Return ``0.98-1.03x``, without an interval ``1.01x``."""
        return f"{self.ratio:.2f}x" if self.interval is None else "{:.2f}-{:.2f}x".format(*self.interval)


def _moved(times_s: Sequence[float]) -> float:
    """Return the greatest distance of a group's median from that of all, as a share."""
    starts = range(0, len(times_s) - _GROUP + 1, _GROUP)
    middle_s = statistics.median(times_s)
    medians_s = (statistics.median(times_s[start : start + _GROUP]) for start in starts)
    return max((max(middle_s / each_s, each_s / middle_s) - 1 for each_s in medians_s), default=0.0)


def summary_rows(report: Report) -> list[tuple[str, str]]:
    """Return the summary as (name, value); values that are not known are left out."""
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
    """Say how much faster all ranks train than one, and the share of communication in the step."""
    if not report.alone_s or not report.running_s:
        return ""
    alone_s, together_s = statistics.median(report.alone_s), statistics.median(report.running_s)
    return (
        f"{report.ranks * alone_s / together_s:.2f}x the throughput of one: {seconds_text(together_s)} for "
        f"{report.ranks} batches instead of {seconds_text(alone_s)} for one; communication and waiting "
        f"{max(0.0, 1 - alone_s / together_s):.0%}"
    )


def _first_text(report: Report) -> str:
    """Say the seconds of the first steps; beside stock steps only those in micro-batches add something."""
    first_s, same = report.first_steps_s, report.same_micro_batches
    if not (first_s and report.steps_s) or (report.baselines_s and not same):
        return ""
    return f"{seconds_text(statistics.median(first_s))} a step{same} ({len(first_s)} at the start)"


def _predicted_text(report: Report) -> str:
    """Say the prediction made before such a step had run, and its error."""
    if report.predicted_step_s is None:
        return ""
    several = report.pipeline or report.layerpipe or report.mode == "data_parallel"
    how = "" if several else ", all ops one by one"
    predicted = f"{seconds_text(report.predicted_step_s)} a step{how}"
    if report.fell_back and report.pipeline:
        return f"{predicted}, by the plan that does not run"
    if not report.running_s:
        return predicted
    measured_s = statistics.median(report.running_s)
    error = report.predicted_step_s / measured_s - 1
    off = f"{abs(error):.0%} too {'high' if error > 0 else 'low'}"
    return f"{predicted}; measured {seconds_text(measured_s)}: the prediction is {off}"


def _comparison_text(report: Report) -> str:
    """Say how many steps the test took, and the seconds besides."""
    if not report.compared_steps:
        return ""
    took_s, several = report.profiling_overhead_s, report.mode == "data_parallel"
    what = "further traces, profiling and planning" if several else "a second step's trace"
    trace = f"; {seconds_text(took_s)} for {what}" if took_s else ""
    return f"{report.compared_steps} steps in turns, which all trained{trace}"


def _batch_text(report: Report) -> str:
    if report.batch_rows is None:
        return ""
    parts = 1 if report.fell_back else report.pipeline.microbatches  # one device takes a batch whole
    of_each = f", on each of {report.ranks} ranks" if report.ranks > 1 else ""
    in_parts = f", in {parts} micro-batches" if parts > 1 else ""
    return f"{report.batch_rows} rows a step{of_each}{in_parts}"


def _plan_rows(report: Report) -> list[tuple[str, str]]:
    counts = (f"{KIND_WORDS.get(kind, kind)} {count}" for kind, count in report.ops.items() if count)
    return [
        ("ops per kind", ", ".join(counts)),
        ("layers", str(len(report.layers))),
        ("moved ops", f"{report.moved_ops} ({report.added_edges} edges added)"),
        ("compiled by XLA", report.compiled_tasks),
        ("gradients that stay mixed", str(len(report.mixed) or "")),
        ("unclassified", str(len(report.unclassified) or "")),
    ]


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
