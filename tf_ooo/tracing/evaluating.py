"""The flat functions of one test or predict step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tf_ooo.compat import evaluation, nests, tf_functions


class EvaluationFunctions:
    """Callable with a batch and the spec of the data that it is of: Keras' test or predict step on it.

    They are traced as Keras traces its own, for a spec or any shape, and have the bits of those; but each
    batch is a call of its own, so that no two are under way at once.  ``tracing`` is entered around calls.
    """

    def __init__(
        self,
        model: Any,
        kind: evaluation.Kind,
        tracing: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model, self._kind, self._tracing = model, kind, tracing
        self._functions: dict[Any, Any] = {}

    def __call__(self, batch: Any, spec: Any = None) -> Any:
        key = None if spec is None else nests.signature(spec)
        if key not in self._functions:
            specs = None if spec is None else [spec]
            step = evaluation.step_on_data(self._model, self._kind)
            self._functions[key] = tf_functions.plain_function(step, specs, any_shape=True)
        with self._tracing():
            return self._functions[key](batch)

    @property
    def traced(self) -> int:
        return sum(function.experimental_get_tracing_count() for function in self._functions.values())
