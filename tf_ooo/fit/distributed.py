"""What fits over several devices have in common: what they refuse, and what they say."""

from __future__ import annotations

import logging
from typing import Any

from tf_ooo.compat import keras_layers, train_function
from tf_ooo.errors import BackendError
from tf_ooo.report.report import Report

_LOG = logging.getLogger("tf_ooo")
_COMPILED = "jit_compile=True: XLA compiles the step for one device; compile the model with jit_compile=False"
_REPLACED = (
    "train_on_batch, or make_train_function, was called in this fit: from then on it trained in stock order, "
    "on one device; call it after the fit"
)
_ENDED = "training ended after "


def check_model(model: Any, mode: str) -> None:
    """Raises BackendError for a model that cannot be distributed."""
    reason = train_function.why_not_rewritable(model)
    if model.jit_compile is True and not train_function.keras_compiles_by_itself(model):
        reason = _COMPILED
    if reason is not None:
        raise BackendError(f"mode={mode!r}: {reason}")
    if keras_layers.made_in_strategy(model):
        raise BackendError(
            f"the model was made in the scope of a tf.distribute strategy; mode={mode!r} needs one "
            "made outside"
        )
    stateful = keras_layers.stateful_layers(model)
    if stateful:
        raise BackendError(
            f"mode={mode!r}: {stateful[0]} keeps the states of its rows from batch to batch (stateful=True), "
            "and batches are on their way side by side; make it with stateful=False"
        )


def note_too_short(report: Report, steps: int) -> None:
    """Says why a fit of so few steps has not been distributed."""
    text = (
        f"{_ENDED}{steps} steps, before the model was cut: one step more than profile_steps of one fit are "
        "on one device; profile_steps=1, or costs= of an earlier run, leave most of them out"
    )
    _say(report, text)


def note_replaced(report: Report) -> None:
    """Says that another train function was put in: the weights are right, and have stayed on one device."""
    _say(report, _REPLACED)


def drop_notes_of_fit(report: Report) -> None:
    """Before the next fit, of which these need not be true."""
    report.notes = [note for note in report.notes if note != _REPLACED and not note.startswith(_ENDED)]


def _say(report: Report, text: str) -> None:
    report.notes.append(text)
    _LOG.warning("%s", text)
