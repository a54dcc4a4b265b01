"""Decides that a model trains on one device after all, where several are no gain."""

from __future__ import annotations

import statistics

from tf_ooo.fit.baseline import ONE_DEVICE
from tf_ooo.report.report import Report
from tf_ooo.units import seconds_text


def why_uncut(report: Report, devices: int, too_short: bool) -> str:
    """Say why one device goes on, before the model is cut; empty: several are predicted to be faster.

    Also where one device cannot be measured (the model does not fit on it, ``compare=False``), unless that is
    because the fit is ``too_short``.
    """
    measured, predicted_s = report.baselines_s.get(ONE_DEVICE), report.predicted_step_s
    if not measured:
        said = f"whether {devices} devices are faster was not measured: {report.no_baseline}"
        return said if too_short else ""
    one_s = statistics.median(measured)
    if predicted_s is None or predicted_s < one_s:
        return ""
    return (
        f"{devices} devices are predicted to take {seconds_text(predicted_s)} a step, one takes "
        f"{seconds_text(one_s)}, measured"
    )


def why_back(report: Report) -> str:
    """Say why the model goes back to one device, when steps on several were measured; empty: they stay."""
    gain, first = report.gain, report.gain_over_first
    if gain is None and first is not None and first.slower:
        return f"measured: {first.text}"
    if gain is None or gain.faster or gain.ratio >= 1:
        return ""
    return f"measured: {gain.text}"
