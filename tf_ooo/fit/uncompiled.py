"""On a GPU Keras 3 compiles a model with XLA by itself; modes that cannot have that set it aside."""

from __future__ import annotations

from typing import Any

from tf_ooo.compat import train_function
from tf_ooo.report.report import Report

NOTE = (
    "jit_compile=True, on a GPU Keras' own choice: XLA compiles a step for one device without communication, "
    "so the model is not compiled during this fit"
)


class Uncompiled:
    """A model's ``jit_compile=True`` set aside, unless it can only be the user's choice.

    So are its evaluations: XLA would compile them for one device too.
    """

    def __init__(self) -> None:
        self._model: Any = None
        self._optimizer: Any = None

    def set_aside(self, model: Any) -> None:
        """Does nothing to a model that is not compiled by XLA."""
        if model.jit_compile is True and train_function.keras_compiles_by_itself(model):
            train_function.set_jit_compile(model, False)
            self._model, self._optimizer = model, model.optimizer

    def note_in(self, report: Report) -> None:
        """Says so, where it was set aside."""
        if self._model is not None and NOTE not in report.notes:
            report.notes.append(NOTE)

    def put_back(self) -> None:
        """As it was, unless the model has been compiled anew."""
        model, self._model = self._model, None
        if model is not None and model.optimizer is self._optimizer and model.jit_compile is False:
            train_function.set_jit_compile(model, True)
        self._optimizer = None
