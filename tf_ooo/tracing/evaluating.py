"""The flat functions of one test or predict step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import evaluation, nests, tf_functions

if TYPE_CHECKING:
    import keras


class EvaluationFunctions:
    """Keras' test or predict step on one batch, as functions.

    They are traced as Keras traces its own, for the spec of a dataset or for any shape, and have the bits of
    those; but each batch is a call of its own, so that no two are under way at once.  ``tracing`` is entered
    around calls.  ``step``: in place of Keras' own.
    """

    def __init__(
        self,
        model: keras.Model,
        kind: evaluation.Kind,
        tracing: Callable[[], AbstractContextManager[Any]],
        step: Callable[[Any], Any] | None = None,
    ) -> None:
        self._model, self._kind, self._tracing, self._step = model, kind, tracing, step
        self._functions: dict[Any, Any] = {}

    def __call__(self, batch: object, spec: object) -> Any:
        with self._tracing():
            return self._functions[_key(spec)](batch)

    def make(self, example: object, spec: object) -> None:
        """Traces, if that has not been done, for data of a spec; None: for the shape of an example.

        Raises whatever tracing raises; nothing runs.
        """
        if _key(spec) in self._functions:
            return
        step = self._step or evaluation.step_on_data(self._model, self._kind)
        specs = None if spec is None else [spec]
        function = tf_functions.plain_function(step, specs, any_shape=True)
        with self._tracing():
            function.get_concrete_function(*([example] if spec is None else ()))
        self._functions[_key(spec)] = function

    @property
    def traced(self) -> int:
        return sum(function.experimental_get_tracing_count() for function in self._functions.values())


def _key(spec: object) -> Any:
    return None if spec is None else nests.signature(spec)
