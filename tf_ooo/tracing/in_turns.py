"""A step whose updates come in turns: gradients of one are those of weights that another has just changed.

A critic is updated, then the generator by what the critic says now (Goodfellow et al. 2014, algorithm 1).
All micro-batches take each turn before its update, so that an update is that of the batch, and the next turn
sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.analysis.steps import STEP_ATTR
from grappler_passes.graph.effects import has_side_effects, only_reads
from tf_ooo.compat import keras_losses, nests, op_marks, tf_functions, train_function
from tf_ooo.tracing.assigned import refuse_rates
from tf_ooo.tracing.collecting import Collecting
from tf_ooo.tracing.copied import TracedPart
from tf_ooo.tracing.micro_batches import StepRefused
from tf_ooo.tracing.of_data import DRAWN
from tf_ooo.tracing.once import changed_by_each, changed_once, ranges_of
from tf_ooo.tracing.splitting import Split
from tf_ooo.tracing.states import States
from tf_ooo.tracing.variables import names_by_handle

if TYPE_CHECKING:
    import keras


class InTurns:
    """Traces a step; its first micro-batch is traced, the others are copies of it, turn by turn.

    ``scope``: of a micro-batch's ops, before its number, if any; ``applying``: entered around each update.
    StepRefused: micro-batches that are no copies of the first.
    """

    def __init__(
        self,
        model: keras.Model,
        split: Split,
        collecting: Collecting,
        states: States,
        scope: str,
        applying: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model, self._split, self._collecting, self._states = model, split, collecting, states
        self._scope, self._applying = scope, applying
        self._turn = 0
        self.changed: list[str] = []  # names of the states that each micro-batch assigns
        if len({split.kind(number) for number in range(split.count)}) > 1:
            raise _no_copies("micro-batches of different numbers of rows")
        if split.count > 1 and train_function.counts_steps(model):
            raise _no_copies("Keras 2")

    def run(self, batch: object) -> list[Any]:
        """Return the logs of each micro-batch."""
        shares = [self._split.share(number) for number in range(self._split.count)]
        self._parts = [[self._split.part(batch, number), share] for number, share in enumerate(shares)]
        self._collecting.on_given = self._end_turn
        train_step = tf_functions.undecorated(self._model.train_step)
        with contextlib.ExitStack() as self._mark:
            self._mark.enter_context(op_marks.numbered_turn(0))
            with self._numbered(0):
                self._traced = TracedPart(0, self._parts[0], draws_anew=True)
                with (
                    self._states.micro_batch(0, self._parts[0]),
                    self._collecting.micro_batch(0, shares[0]),
                    keras_losses.weighted_means(self._model, shares[0]),
                ):
                    logs = train_function.step_on_data(self._model, train_step)(self._parts[0][0])
                    logs = nests.with_variables_held(logs)
                self._end_part([])
            results = [(logs, self._states.values), *self._copies((logs, self._states.values))]
            for number, (_, states) in enumerate(results):
                with self._numbered(number):
                    self._states.add(number, states)
            return [logs for logs, _ in results]

    def _numbered(self, number: int) -> AbstractContextManager[None]:
        return op_marks.numbered_step(number, STEP_ATTR, self._scope)

    def _end_turn(self) -> None:
        """The first micro-batch has given an optimizer its gradients: so do the others, then it updates."""
        given = self._collecting.given[-1]
        self._end_part([given.ops])
        for number, grads in enumerate(self._copies(given.grads), 1):
            with self._numbered(number):
                self._collecting.add_copied(number, [grads], self._turn)
        with self._numbered(self._split.count), self._applying():
            self._collecting.apply(self._turn)
        self._turn += 1
        self._mark.close()
        self._mark.enter_context(op_marks.numbered_turn(self._turn))
        self._traced.go_on()

    def _end_part(self, left_out: Sequence[tuple[int, int]]) -> None:
        if self._split.count == 1:
            return
        begin, part = self._traced.begin, self._traced.part
        refuse_rates(self._model, part, begin)
        once = changed_once(self._model, part, begin, self._states.each)
        if self._turn:  # before, nothing has been updated
            once.update(self._of_updated_weights())
        more = changed_by_each(self._model, begin, once)
        self.changed.extend(name for name in more if name not in self.changed)
        self._traced.end([*left_out, *ranges_of(once)])
        if self._traced.why_not:
            raise _no_copies(self._traced.why_not)

    def _of_updated_weights(self) -> Iterator[int]:
        """The numbers of ops of this part that change a state by updated weights alone.

        A moving average of weights, or their clipping: no other micro-batch does so again.
        """
        updated = {
            handle
            for update in self._collecting.applied[: self._turn]
            for handle in names_by_handle(update.variables)
        }
        data = {id(tensor) for tensor in nests.Packed(self._parts[0][0]).tensors}
        operations = tf.compat.v1.get_default_graph().get_operations()
        for number in range(self._traced.begin, len(operations)):
            op = operations[number]
            writes = has_side_effects(op.type) and not only_reads(op.type)
            if writes and _is_of_weights_alone(op, updated, data):
                yield number

    def _copies(self, values: object) -> list[Any]:
        """Return the counterparts in the other micro-batches; the latest part of these is copied."""
        packed = nests.Packed(values)
        copies = []
        for number, part in enumerate(self._parts[1:], 1):
            with self._numbered(number):
                copies.append(packed.unpack(self._traced.copy(number, part, packed.tensors)))
        return copies


def _no_copies(why: str) -> StepRefused:
    return StepRefused(
        "train_step reads weights again after it has applied their gradients, so all micro-batches take each "
        f"turn before the next, as copies of the first one; they cannot be ({why}): use batches that are a "
        "multiple of microbatches= (drop_remainder=True), microbatches=1, or one device"
    )


def _is_of_weights_alone(op: tf.Operation, updated: Collection[int], data: Collection[int]) -> bool:
    """Return whether an op's inputs come from updated weights, and from no data or random numbers."""
    reads_updated, seen, waiting = False, set[int](), list(op.inputs)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in data or DRAWN.search(tensor.op.type):
            return False
        if id(tensor.op) in seen:
            continue
        seen.add(id(tensor.op))
        if tensor.op.type == "ReadVariableOp" and id(tensor.op.inputs[0]) in updated:
            reads_updated = True
        waiting.extend(tensor.op.inputs)
    return reads_updated
