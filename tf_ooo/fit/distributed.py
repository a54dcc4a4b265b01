"""What fits over several devices have in common: what they refuse, and what they say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tf_ooo.compat import keras_layers, train_function
from tf_ooo.errors import BackendError
from tf_ooo.hosts.cluster import Cluster
from tf_ooo.hosts.target import Devices, Target, target_of
from tf_ooo.report.environment import environment
from tf_ooo.report.report import Report
from tf_ooo.tracing.renewal import renew

_LOG = logging.getLogger("tf_ooo")
_COMPILED = "jit_compile=True: XLA compiles the step for one device; compile the model with jit_compile=False"
_REPLACED = (
    "train_on_batch, or make_train_function, was called in this fit: from then on it trained in stock order, "
    "on one device; call it after the fit"
)
_ENDED = "training ended after "


class Distributed:
    """What a mode over several devices knows of the model that it trains, from fit to fit.

    Attributes:
        report: of the model trained last.
        target: the devices of the fit that was checked last.
        known: of which train function, on which devices, the report is; None before the first fit.
    """

    def __init__(self, mode: str) -> None:
        self.report = Report(mode=mode)
        self.target: Target = Devices(())
        self.known: tuple[Any, Sequence[str]] | None = None

    def place(self, model: Any, devices: Any, local_rank: int = 0) -> None:
        """Before each fit; see :func:`tf_ooo.hosts.target.target_of`."""
        self.target = target_of(devices, local_rank)
        if isinstance(self.target, Cluster):
            renew(model)

    def begin(self, model: Any) -> bool:
        """Before each fit; whether it is another model's, or on other devices, than the one before."""
        known = train_function.train_function_of(model), self.target.devices
        other = known != self.known
        if other:
            mode, self.known = self.report.mode, known
            self.report = Report(mode=mode, model=str(model.name), environment=environment(model))
        # Of the fit before, and not true of this one.
        notes = self.report.notes
        self.report.notes = [note for note in notes if note != _REPLACED and not note.startswith(_ENDED)]
        return other

    def note_too_short(self, steps: int) -> None:
        """Says why a fit of so few steps has not been distributed; of none there is nothing to say."""
        if steps:
            self._say(
                f"{_ENDED}{steps} steps, before the model was cut: one step more than profile_steps of one "
                "fit are on one device; profile_steps=1, or costs= of an earlier run, leave most of them out"
            )

    def note_replaced(self) -> None:
        """Says that another train function was put in: the weights are right, on one device."""
        self._say(_REPLACED)

    def _say(self, text: str) -> None:
        self.report.notes.append(text)
        _LOG.warning("%s", text)


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
