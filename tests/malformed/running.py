"""Tries a malformed input in this process and says what came of it."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.running import Outcome
from tests.malformed.case import Case, CommandFailed, Lost, StockRefuses
from tests.malformed.drawing import drawn
from tests.malformed.judging import fault_of, shown

REFUSED, ACCEPTED, STOCK = "refused", "accepted", "stock refuses it"
GOOD = (REFUSED, ACCEPTED, STOCK)


def run(number: int) -> Outcome:
    """Return what comes of the input of this number."""
    return outcome_of(drawn(number))


def outcome_of(case: Case) -> Outcome:
    """Tries it in a new folder, which is the working directory, too."""
    before, printed = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(printed):
        os.chdir(folder)
        try:
            case.attempt(Path(folder))
        except Exception as error:
            outcome = _judged(case, error)
        else:
            outcome = Outcome(ACCEPTED)
        finally:
            os.chdir(before)
    return outcome


def _judged(case: Case, error: Exception) -> Outcome:
    if isinstance(error, StockRefuses):
        return Outcome(STOCK, str(error))
    if isinstance(error, Lost):
        return Outcome("lost", f"{error}\n{_trace(error)}")
    fault = fault_of(error, case.named)
    if fault:
        return Outcome(fault, f"{type(error).__name__}: {shown(error)}\n{_trace(error)}")
    return Outcome(REFUSED, shown(error))


def _trace(error: Exception) -> str:
    if isinstance(error, CommandFailed) and error.__cause__ is None:
        return error.printed
    return "".join(traceback.format_exception(error)[-12:])
