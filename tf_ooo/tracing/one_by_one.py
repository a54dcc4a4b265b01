"""The micro-batches of a step one after the other, before its updates."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grappler_passes.analysis.steps import STEP_ATTR
from tf_ooo.compat import keras_losses, keras_optimizers, nests, op_marks, tf_functions, train_function
from tf_ooo.tracing.assigned import changed_by_each, changed_once, ranges_of, read_after, refuse_rates
from tf_ooo.tracing.collecting import Collecting
from tf_ooo.tracing.copied import TracedPart
from tf_ooo.tracing.intercepting import CopiesNeeded, TurnsNeeded
from tf_ooo.tracing.micro_batches import Split
from tf_ooo.tracing.states import States

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class MicroBatches:
    """Holds what the micro-batches of a step are traced with; ``scope``: of their ops, before the number."""

    model: keras.Model
    split: Split
    collecting: Collecting
    states: States
    scope: str

    @cached_property
    def may_be_copies(self) -> bool:
        """Return whether one micro-batch can be traced for all; with Keras 2, whose last one counts, none."""
        kinds = {self.split.kind(number) for number in range(self.split.count)}
        return len(kinds) == 1 and not train_function.counts_steps(self.model)

    @cached_property
    def _train_step(self) -> Any:
        # Traced within the step: gradients of a function of its own could not be added up outside.
        return tf_functions.undecorated(self.model.train_step)

    def numbered(self, number: int) -> AbstractContextManager[None]:
        return op_marks.numbered_step(number, STEP_ATTR, self.scope)

    def trace(self, number: int, given: list[Any], counts: bool = True) -> Any:
        """Return the logs of a micro-batch; its gradients and states are collected.

        ``given``: its rows, and their share of the batch's; ``counts``: Keras 2 counts the step.
        """
        rows, share = given
        with (
            self.states.micro_batch(number, given),
            self.collecting.micro_batch(number, share),
            keras_losses.weighted_means(self.model, share),
        ):
            logs = train_function.step_on_data(self.model, self._train_step, counts)(rows)
            return nests.with_variables_held(logs)

    def changed_once(self, ops: TracedPart) -> set[int]:
        """Return the ops of the first micro-batch, by number, that it runs for all."""
        refuse_rates(self.model, ops.part, ops.begin)
        return changed_once(self.model, ops.part, ops.begin, self.states.each)


class OneByOne:
    """The train step of each micro-batch in the function that is being traced.

    Traced is the first of as many rows; the others are copies of it, unless those would do something else.
    CopiesNeeded where they are not, and should be, if they ``may_be_copies`` in another trace.

    Attributes:
        changed: names of the states that each micro-batch assigns.
    """

    def __init__(self, parts: MicroBatches, may_be_copies: bool) -> None:
        self._parts, self._may_be_copies = parts, may_be_copies
        self._traced: dict[Any, tuple[TracedPart, nests.Packed]] = {}
        self.changed: list[str] = []

    def run(self, batch: object) -> list[Any]:
        """Return the logs of each micro-batch.  TurnsNeeded: weights are read after their update."""
        logs, split = [], self._parts.split
        for number in range(split.count):
            with self._parts.numbered(number):
                logs.append(self._run(number, split.part(batch, number)))
            if not number:
                self._refuse_reads_after()
        return logs

    def _refuse_reads_after(self) -> None:
        collecting = self._parts.collecting
        variables = [
            [*update.variables, *keras_optimizers.state_of(update.optimizer)] for update in collecting.applied
        ]
        again = read_after(zip(variables, collecting.collected_after, strict=True))
        if again:
            raise TurnsNeeded(again)

    def _run(self, number: int, part: object) -> Any:
        parts, count = self._parts, self._parts.split.count
        given = [part, parts.split.share(number)]
        if self._kind(number) in self._traced:
            ops, results = self._traced[self._kind(number)]
            logs, states, *grads = results.unpack(ops.copy(number, given, results.tensors))
            parts.collecting.add_copied(number, grads)
            parts.states.add(number, states)
            return logs
        ops = TracedPart(number, given)
        logs = parts.trace(number, given, counts=number == count - 1)
        first = not number and count > 1
        once = self._once(ops) if first else set()
        kept = self._kept_for_copies(number, ops, logs, once)
        if first:
            self.changed = changed_by_each(parts.model, ops.begin, once if kept else ())
        parts.states.add(number, parts.states.values)
        return logs

    def _once(self, ops: TracedPart) -> set[int]:
        once = self._parts.changed_once(ops)
        if once and not self._parts.may_be_copies and self._may_be_copies:
            raise CopiesNeeded("a state that depends on no data changes")
        return once if self._parts.may_be_copies else set()

    def _kept_for_copies(self, number: int, ops: TracedPart, logs: object, once: set[int]) -> bool:
        """Keeps a micro-batch for those that are copies of it, without the ops ``once``; False: none is."""
        if self._kind(number) not in map(self._kind, range(number + 1, self._parts.split.count)):
            return False
        given = self._parts.collecting.given
        ops.end([*(each.ops for each in given), *ranges_of(once)])
        if ops.why_not:
            return False
        results = nests.Packed([logs, self._parts.states.values, *(each.grads for each in given)])
        self._traced[self._kind(number)] = ops, results
        return True

    def _kind(self, number: int) -> tuple[Hashable, int]:
        """Return the same for micro-batches that are copies of one another; with Keras 2 none is.

        Its last one counts the step, and TensorFlow's optimizers treat copies otherwise there: sums of
        gradients were taken to be another layer's (2.15).
        """
        alone = train_function.counts_steps(self._parts.model)
        return self._parts.split.kind(number), number if alone else 0
