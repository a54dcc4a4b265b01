"""The micro-batches of a step one after the other, before its updates."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from grappler_passes.analysis.steps import STEP_ATTR
from tf_ooo.compat import keras_losses, keras_optimizers, nests, op_marks, tf_functions, train_function
from tf_ooo.tracing.assigned import refuse_rates
from tf_ooo.tracing.collecting import Collecting
from tf_ooo.tracing.copied import TracedPart
from tf_ooo.tracing.intercepting import CopiesNeeded, TurnsNeeded
from tf_ooo.tracing.once import changed_by_each, changed_once, ranges_of
from tf_ooo.tracing.reads_after import read_after
from tf_ooo.tracing.splitting import Split
from tf_ooo.tracing.states import States

if TYPE_CHECKING:
    import keras


class OneByOne:
    """The train step of each micro-batch in the function that is being traced.

    Traced is the first of as many rows; the others are copies of it, unless those would do something else.
    ``scope``: of a micro-batch's ops, before its number, if any.  CopiesNeeded where they are not, and should
    be, if they ``may_be_copies`` in another trace.

    Attributes:
        changed: names of the states that each micro-batch assigns.
    """

    def __init__(
        self,
        model: keras.Model,
        split: Split,
        collecting: Collecting,
        states: States,
        scope: str,
        may_be_copies: bool,
    ) -> None:
        self._model, self._split, self._collecting, self._states = model, split, collecting, states
        self._scope, self._may_be_copies = scope, may_be_copies
        # Traced within the step: gradients of a function of its own could not be added up outside.
        self._train_step = tf_functions.undecorated(model.train_step)
        self._traced: dict[Any, tuple[TracedPart, nests.Packed]] = {}
        self.changed: list[str] = []

    def run(self, batch: object) -> list[Any]:
        """Return the logs of each micro-batch.  TurnsNeeded: weights are read after their update."""
        logs = []
        for number in range(self._split.count):
            with op_marks.numbered_step(number, STEP_ATTR, self._scope):
                logs.append(self._run(number, self._split.part(batch, number)))
            if not number:
                self._refuse_reads_after()
        return logs

    def _refuse_reads_after(self) -> None:
        collecting = self._collecting
        variables = [
            [*update.variables, *keras_optimizers.state_of(update.optimizer)] for update in collecting.applied
        ]
        again = read_after(zip(variables, collecting.collected_after, strict=True))
        if again:
            raise TurnsNeeded(again)

    def _run(self, number: int, part: object) -> Any:
        """Return the logs of a micro-batch; its gradients and states are collected."""
        share = self._split.share(number)
        if self._kind(number) in self._traced:
            ops, results = self._traced[self._kind(number)]
            logs, states, *grads = results.unpack(ops.copy(number, [part, share], results.tensors))
            self._collecting.add_copied(number, grads)
            self._states.add(number, states)
            return logs
        collecting, ops = self._collecting, TracedPart(number, [part, share])
        with (
            self._states.micro_batch(number, [part, share]),
            collecting.micro_batch(number, share),
            keras_losses.weighted_means(self._model, share),
        ):
            counts = number == self._split.count - 1
            logs = train_function.step_on_data(self._model, self._train_step, counts)(part)
            logs = nests.with_variables_held(logs)
        first = not number and self._split.count > 1
        once = self._once(ops) if first else set()
        kept = self._kept_for_copies(number, ops, logs, once)
        if first:
            self.changed = changed_by_each(self._model, ops.begin, once if kept else ())
        self._states.add(number, self._states.values)
        return logs

    def _once(self, ops: TracedPart) -> set[int]:
        """Return the ops of the first micro-batch, by number, that it runs for all."""
        refuse_rates(self._model, ops.part, ops.begin)
        once = changed_once(self._model, ops.part, ops.begin, self._states.each)
        if once and not self._all_copies and self._may_be_copies:
            raise CopiesNeeded("a state that depends on no data changes")
        return once if self._all_copies else set()

    def _kept_for_copies(self, number: int, ops: TracedPart, logs: object, once: set[int]) -> bool:
        """Keeps a micro-batch for those that are copies of it, without the ops ``once``; False: none is."""
        if self._kind(number) not in map(self._kind, range(number + 1, self._split.count)):
            return False
        given = self._collecting.given
        ops.end([*(each.ops for each in given), *ranges_of(once)])
        if ops.why_not:
            return False
        results = nests.Packed([logs, self._states.values, *(each.grads for each in given)])
        self._traced[self._kind(number)] = ops, results
        return True

    @property
    def _all_copies(self) -> bool:
        """Return whether one micro-batch is traced for all."""
        return len(set(map(self._kind, range(self._split.count)))) == 1

    def _kind(self, number: int) -> tuple[Hashable, int]:
        """Return the same for micro-batches that are copies of one another; with Keras 2 none is.

        Its last one counts the step, and TensorFlow's optimizers treat copies otherwise there: sums of
        gradients were taken to be another layer's (2.15).
        """
        return self._split.kind(number), number if train_function.counts_steps(self._model) else 0
