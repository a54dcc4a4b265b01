"""Tries a malformed input in this process and says what came of it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import traceback
from pathlib import Path

from tests.harness.children import Outcome
from tests.malformed.case import Case, CommandFailed, Lost, StockRefuses
from tests.malformed.drawing import drawn
from tests.malformed.judging import fault_of, shown


def run(number: int) -> Outcome:
    """Return what comes of the input of this number."""
    logging.disable(logging.ERROR)
    try:
        return outcome_of(drawn(number))
    finally:
        logging.disable(logging.NOTSET)


def outcome_of(case: Case) -> Outcome:
    """Tries it in a new folder, which is the working directory, too."""
    before, printed = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(printed):
        os.chdir(folder)
        try:
            case.attempt(Path(folder))
        except Exception as error:
            return _judged(case, error)
        finally:
            os.chdir(before)
    return Outcome("accepted")


def _judged(case: Case, error: Exception) -> Outcome:
    if isinstance(error, StockRefuses):
        return Outcome("stock refuses it", str(error))
    if isinstance(error, Lost):
        return Outcome("lost", f"{error}\n{_trace(error)}")
    fault = fault_of(error, case.named)
    if fault:
        return Outcome(fault, f"{type(error).__name__}: {shown(error)}\n{_trace(error)}")
    return Outcome("refused", shown(error))


def _trace(error: Exception) -> str:
    if isinstance(error, CommandFailed) and error.__cause__ is None:
        return error.printed
    return "".join(traceback.format_exception(error)[-12:])
