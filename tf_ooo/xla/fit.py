"""``model.fit`` with a compiled step: takes batches out of Keras' iterator and runs the rewritten step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_ooo import compat
from tf_ooo.xla.session import StreamSession
from tf_ooo.xla.step import Rewriter, StreamStep


class FitSteps:
    """In the place of Keras' train function.

    Batches are taken one by one, so that their sizes are known when the step is traced: Keras' own
    iterators leave the batch size open.

    Args:
        model: whose ``train_step`` runs.
        stock: Keras' train function, for batches whose step cannot be rewritten.
        session, rewrite: see :class:`StreamStep`.
    """

    def __init__(
        self, model: Any, stock: Callable[..., Any], session: StreamSession, rewrite: Rewriter
    ) -> None:
        self.model = model
        self._convert = compat.step_on_data(model, lambda data: data)

        def stock_step(data: Any) -> Any:
            return stock([data])

        self.step = StreamStep(compat.step_on_data(model, model.train_step), stock_step, session, rewrite)

    def __call__(self, iterator: Any) -> Any:
        """One execution: ``steps_per_execution`` steps; the logs of the last.  StopIteration at the end."""
        batches = compat.take(iterator, int(self.model.steps_per_execution))
        if not batches:
            raise StopIteration
        logs = None
        for batch in batches:
            logs = self.step(batch)
        return logs

    def experimental_get_tracing_count(self) -> int:
        """For how many kinds of batches the step was made."""
        return self.step.experimental_get_tracing_count()

    def _list_all_concrete_functions(self) -> list[Any]:
        return []
