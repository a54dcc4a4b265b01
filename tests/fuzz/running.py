"""Runs a set-up's program in this process and says what came of it."""

from __future__ import annotations

import contextlib
import functools
import io
import traceback
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.program import IMPORTS, body
from tests.fuzz.setups import Setup

GOOD, REFUSED, SAID = "good", "refused", "said"


@dataclass(frozen=True)
class Outcome:
    """Says what came of a set-up.

    ``kind`` is ``"good"``, ``"refused"`` (a mode names what it does not take), ``"said"`` (another result,
    and a line that names what is not the same), ``"stock"`` (the stock
    step fails already: no set-up that a user could have), or what failed: two outcomes of one kind are
    taken for one fault.
    """

    kind: str
    text: str = ""
    cpu_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.kind not in (GOOD, REFUSED, SAID)


def run(setup: Setup) -> Outcome:
    """Runs it: stock and rewritten, compared."""
    import keras

    keras.backend.clear_session()
    namespace: dict[str, Any] = {"__name__": "setup"}
    source = IMPORTS + body(setup)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"set-up {setup.number}", "exec"), namespace)
    except Exception as error:
        outcome = _outcome_of(error, namespace, setup)
        return replace(outcome, text=f"{outcome.text}\n{printed.getvalue()}")
    finally:
        keras.config.set_dtype_policy("float32")
    return Outcome(GOOD, printed.getvalue())


def _outcome_of(error: Exception, namespace: dict[str, Any], setup: Setup) -> Outcome:
    from tf_ooo.errors import BackendError, MemoryLimitError, OptionsError

    said = f"{type(error).__name__}: {error}"
    clear = isinstance(error, (OptionsError, MemoryLimitError, BackendError)) and not error.__cause__
    if clear and setup.mode != "single" and "TensorFlow cannot" not in said:
        return Outcome(REFUSED, said)
    if not setup.pipelines and "stock" not in namespace:
        return Outcome("stock", said)
    if not isinstance(error, AssertionError):
        return Outcome(type(error).__name__, said + "\n" + traceback.format_exc())
    kind = str(error).partition(":")[0]
    if kind == "not the same bits":
        kind = _unless_stock_differs(kind, namespace)
    return Outcome(kind, said)


def _unless_stock_differs(kind: str, namespace: dict[str, Any]) -> str:
    """Some stock training does not repeat itself: no fault of the rewritten one then."""
    pipeline = [namespace["first"]] if "first" in namespace else []
    stock = namespace.get("stock_horovod") or functools.partial(namespace["fit"], *pipeline)
    fits = [stock() for _ in range(4)]
    again = [namespace["different"](fits[0], other) for other in fits[1:]]
    return "stock does not repeat itself" if any(again) else kind
