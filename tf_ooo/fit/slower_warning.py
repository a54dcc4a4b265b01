"""One warning where a fit over several devices or ranks is slower than without them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tf_ooo.report.gain import Gain
from tf_ooo.report.report import Report

_LOG = logging.getLogger("tf_ooo")
# So many steps are measured before anything is said.
ENOUGH = 10


class SlowerWarning:
    """Says once that less is faster, and what would be better; takes it back when more steps deny it.

    Attributes:
        advise: says it, given the gain; None: nothing is said, or it was said already.
    """

    def __init__(self) -> None:
        self.advise: Callable[[Gain], str] | None = None
        self._said = ""

    def look(self, report: Report, gain: Gain | None) -> None:
        """Look at what is known now."""
        if gain is None:
            return
        if not gain.slower:  # what was said is of a few steps
            report.forget(self._said)
        if not gain.slower or self.advise is None:
            return
        advise, self.advise = self.advise, None
        said = advise(gain)
        _LOG.warning("%s", said)
        # The times are those of now; the first line of the report has later ones.
        self._said = f"slower than {gain.baseline}; {said.removeprefix(f'{gain.text}; ')}"
        report.note(self._said)
