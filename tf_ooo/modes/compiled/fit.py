"""``model.fit`` with a compiled step: takes batches out of Keras' iterator and runs the rewritten step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_ooo.compat import iterators, train_function
from tf_ooo.errors import MemoryLimitError
from tf_ooo.modes.compiled.session import StreamSession
from tf_ooo.modes.compiled.step import StreamStep, Way
from tf_ooo.tracing.unrolled import numbered_steps


class FitSteps:
    """In the place of Keras' train function.

    Batches are taken one by one, so that their sizes are known when the step is traced: Keras' own
    iterators leave the batch size open.

    Args:
        model: whose ``train_step`` runs.
        stock: Keras' train function, for batches whose step cannot be rewritten.
        session, way: see :class:`StreamStep`.
        together: so many steps go into one compiled function; what is left over runs step by step.
    """

    def __init__(
        self,
        model: Any,
        stock: Callable[..., Any],
        session: StreamSession,
        way: Way,
        together: int = 1,
    ) -> None:
        self.model, self.together, self.session = model, together, session
        on_batch = train_function.step_on_data(model, model.train_step)

        def stock_steps(batches: list[Any]) -> list[Any]:
            return [stock([batch]) for batch in batches]

        self.step = StreamStep(on_batch, lambda batch: stock([batch]), session, way)
        self.steps = StreamStep(numbered_steps(on_batch), stock_steps, session, way)

    def __call__(self, iterator: Any) -> Any:
        """One execution: ``steps_per_execution`` steps; the logs of the last.  StopIteration at the end."""
        batches = self.session.waiting or iterators.take(
            iterator, train_function.steps_per_execution(self.model)
        )
        self.session.waiting = []
        if not batches:
            raise StopIteration
        logs = None
        while batches:
            count = self.together if 1 < self.together <= len(batches) else 1
            try:
                logs = self.step(batches[0]) if count == 1 else self.steps(batches[:count])[-1]
            except MemoryLimitError:  # nothing has run: another way may take these
                self.session.waiting = batches
                raise
            batches = batches[count:]
        return logs

    def experimental_get_tracing_count(self) -> int:
        """For how many kinds of batches steps were made."""
        return sum(step.experimental_get_tracing_count() for step in (self.step, self.steps))

    def _list_all_concrete_functions(self) -> list[Any]:
        return []
