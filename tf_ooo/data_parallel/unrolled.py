"""Several steps in one flat function, so that no step waits for all of the step before.

The forward pass of a layer waits for what its own variables wait for: their update.  Between two
calls of a function everything is done, so that a checkpoint taken there holds every update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from grappler_passes.steps import STEP_ATTR, STEP_SCOPE
from tf_ooo import compat

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class Unrolled:
    """Runs batches of data through the model's train step, several steps in one function.

    Args:
        model: built, with built optimizers.
        wrap: makes of the model's ``train_step`` the one to run.
        element_spec: of a batch.
        steps: of one function; what is left over runs step by step.
        tracing: entered around calls; functions may be traced there.
    """

    def __init__(
        self,
        model: Any,
        wrap: Wrapper,
        element_spec: Any,
        steps: int,
        tracing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.steps, self.element_spec = model, steps, element_spec
        self._wrap, self._tracing = wrap, tracing
        self._functions: dict[int, Any] = {}

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Trains on all batches; the logs of the last step."""
        outputs = None
        begin = 0
        while begin < len(batches):
            count = self.steps if len(batches) - begin >= self.steps else 1
            outputs = self.run(list(batches[begin : begin + count]))
            begin += count
        return outputs

    def run(self, batches: list[Any]) -> Any:
        """Trains on as many batches in one function; the logs of the last step."""
        with self._tracing():
            return self.function(len(batches))(batches)[-1]

    @property
    def traced(self) -> int:
        """How many functions have been made."""
        return len(self._functions)

    def function(self, count: int) -> Any:
        """The ``tf.function`` of so many steps."""
        if count not in self._functions:
            self._functions[count] = self._make(count)
        return self._functions[count]

    def _make(self, count: int) -> Any:
        step = compat.step_on_data(self.model, self._wrap(self.model.train_step))

        return compat.traced_once(numbered_steps(step), [[self.element_spec] * count])


def numbered_steps(step: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """``step`` on one batch after the other, each marked so that the passes can tell them apart."""

    def steps(batches: Any) -> list[Any]:
        logs = []
        for number, batch in enumerate(batches):
            with compat.numbered_step(number, STEP_ATTR, STEP_SCOPE):
                logs.append(step(batch))
        # All of them: what a step returns tells its forward pass from its backward pass.
        return logs

    return steps


def steps_together(steps_per_execution: int, most: int) -> int:
    """How many steps of an execution go into one function: at most ``most``, equal parts if possible."""
    if steps_per_execution <= most:
        return steps_per_execution
    parts = [count for count in range(most, most // 2, -1) if steps_per_execution % count == 0]
    return parts[0] if parts else most
