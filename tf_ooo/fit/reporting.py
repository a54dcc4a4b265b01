"""Writes into a fit's report, and saves the report in its folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grappler_passes.compat import releases
from tf_ooo.options import OneDeviceOptions
from tf_ooo.report.parts import Outcome
from tf_ooo.report.report import Report
from tf_ooo.report.summary import Gain

_LOG = logging.getLogger("tf_ooo")
# So many steps are measured before anything is said.
ENOUGH = 10


class SlowerWarning:
    """Says once that less is faster, and what would be better; takes it back when more steps deny it."""

    def __init__(self) -> None:
        self.advise: Callable[[Gain], str] | None = None  # None: nothing is said, or it was said already
        self._said = ""

    def look(self, report: Report, gain: Gain | None) -> None:
        """Look at what is known now."""
        if gain is not None and not gain.slower:  # what was said is of a few steps
            report.forget(self._said)
        if gain is None or not gain.slower or self.advise is None:
            return
        advise, self.advise = self.advise, None
        said = advise(gain)
        _LOG.warning("%s", said)
        # The times are those of now; the first line of the report has later ones.
        self._said = f"slower than {gain.baseline}; {said.removeprefix(f'{gain.text}; ')}"
        report.note(self._said)


def fall_back(
    report: Report, reason: str, logged: bool = False, expected: bool = False, how_to_record: str = ""
) -> None:
    """Notes, and logs in one line, that the stock step runs.

    ``expected``: no reason to warn.  Not logged again where it is ``logged`` already, as an unsupported
    TensorFlow is once in a process.
    """
    report.put(Outcome(True, reason, how_to_record=how_to_record))
    level = logging.INFO if expected or reason.startswith("measured") else logging.WARNING
    if not logged and releases.is_news(reason):
        _LOG.log(level, "keeping the stock step: %s", reason)


def note_unused(report: Report, options: OneDeviceOptions) -> None:
    """Notes, and logs in one line, which options are not looked at, as XLA does not compile the step."""
    if options.given_for_xla:
        note = f"{', '.join(options.given_for_xla)}: no effect without jit_compile=True"
        report.note(note, log=logging.WARNING)


def save_timeline(report: Report, folder: Any, prefix: str = "") -> tuple[Path, Path] | None:
    """Writes ``report.html``, ``trace.json`` and measured gains; logs that a folder cannot be written."""
    try:
        page = report.save_html(Path(folder) / f"{prefix}report.html")
        trace = report.save_trace(Path(folder) / f"{prefix}trace.json")
        if report.gains is not None:
            report.gains.save(Path(folder) / f"{prefix}gains.json")
    except OSError as error:
        _LOG.warning("the report was not written: %s", error)
        return None
    _LOG.info("report: %s, trace: %s", page, trace)
    return page, trace
