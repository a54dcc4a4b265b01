"""Runs a set-up's program in this process and says what came of it."""

from __future__ import annotations

import contextlib
import io
import traceback
from dataclasses import replace
from typing import Any

from tests.fuzz.program import IMPORTS, body
from tests.fuzz.setups import Setup
from tests.fuzz.several import PLAIN
from tests.harness.children import Outcome

GOOD = "good"
_FAR = "beyond rounding"


def run(setup: Setup) -> Outcome:
    """Trains it stock and rewritten, by two schedules, or op by op and compiled.

    The outcome is ``"refused"`` if a mode names what it does not take, ``"stock"`` if the stock step fails
    already: no set-up that a user could have.  What is off by more than rounding may be rounding still, where
    a largest value is chosen or something small divides: then it is not off in float64, or where stock
    TensorFlow or Keras fails at the model in that, with updates that divide by nothing.
    """
    outcome = _run(setup)
    if outcome.kind != _FAR:
        return outcome
    for other in (replace(setup, policy="float64"), replace(setup, optimizer=PLAIN)):
        again = _run(other).kind if other != setup else _FAR
        if again in (GOOD, _FAR):
            break
    return Outcome("said", f"rounding: {outcome.text}") if again == GOOD else outcome


def _run(setup: Setup) -> Outcome:
    import keras

    keras.backend.clear_session()
    namespace: dict[str, Any] = {"__name__": "setup"}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(IMPORTS + body(setup), f"set-up {setup.number}", "exec"), namespace)
    except Exception as error:
        outcome = _outcome_of(error, namespace.get("fits"), setup)
        return replace(outcome, text=f"{outcome.text}\n{printed.getvalue()}")
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    return Outcome(GOOD, printed.getvalue())


def _outcome_of(error: Exception, fits: Any, setup: Setup) -> Outcome:
    from tf_ooo.errors import BackendError, MemoryLimitError, OptionsError

    said = f"{type(error).__name__}: {error}"
    clear = isinstance(error, (OptionsError, MemoryLimitError, BackendError)) and not error.__cause__
    if clear and setup.mode != "single" and "TensorFlow cannot" not in said:
        return Outcome("refused", said.partition("\n")[0])
    if not setup.pipelines and not (fits and fits.stock_trains):
        return Outcome("stock", said)
    if isinstance(error, AssertionError):
        return Outcome(str(error).partition(":")[0], said)
    return Outcome(type(error).__name__, f"{said}\n{traceback.format_exc()}")
