"""A step whose updates come in turns: gradients of one are those of weights that another has just changed.

A critic is updated, then the generator by what the critic says now (Goodfellow et al. 2014, algorithm 1).
All micro-batches take each turn before its update, so that an update is that of the batch, and the next turn
sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from grappler_passes.graph.effects import has_side_effects, only_reads
from tf_ooo.compat import nests, op_marks, train_function
from tf_ooo.tracing.assigned import changed_by_each, ranges_of
from tf_ooo.tracing.copied import TracedPart
from tf_ooo.tracing.micro_batches import StepRefused
from tf_ooo.tracing.of_data import DRAWN, upstream
from tf_ooo.tracing.one_by_one import MicroBatches
from tf_ooo.tracing.variables import names_by_handle


class InTurns:
    """Traces a step; its first micro-batch is traced, the others are copies of it, turn by turn.

    ``applying``: entered around each update.  StepRefused: micro-batches that are no copies of the first.
    """

    def __init__(self, parts: MicroBatches, applying: Callable[[], AbstractContextManager[Any]]) -> None:
        self._parts, self._applying = parts, applying
        self._turn = 0
        self.changed: list[str] = []  # names of the states that each micro-batch assigns
        if parts.split.count > 1 and not parts.may_be_copies:
            keras_2 = train_function.counts_steps(parts.model)
            raise _no_copies("Keras 2" if keras_2 else "micro-batches of different numbers of rows")

    def run(self, batch: object) -> list[Any]:
        parts, split = self._parts, self._parts.split
        shares = [split.share(number) for number in range(split.count)]
        self._given = [[split.part(batch, number), share] for number, share in enumerate(shares)]
        parts.collecting.on_given = self._end_turn
        with contextlib.ExitStack() as self._mark:
            self._mark.enter_context(op_marks.numbered_turn(0))
            with parts.numbered(0):
                self._traced = TracedPart(0, self._given[0], draws_anew=True)
                logs = parts.trace(0, self._given[0])
                self._end_part([])
            first = logs, parts.states.values
            results = [first, *self._copies(first)]
            for number, (_, states) in enumerate(results):
                with parts.numbered(number):
                    parts.states.add(number, states)
            return [logs for logs, _ in results]

    def _end_turn(self) -> None:
        """The first micro-batch has given an optimizer its gradients: so do the others, then it updates."""
        parts, collecting = self._parts, self._parts.collecting
        given = collecting.given[-1]
        self._end_part([given.ops])
        for number, grads in enumerate(self._copies(given.grads), 1):
            with parts.numbered(number):
                collecting.add_copied(number, [grads], self._turn)
        with parts.numbered(parts.split.count), self._applying():
            collecting.apply(self._turn)
        self._turn += 1
        self._mark.close()
        self._mark.enter_context(op_marks.numbered_turn(self._turn))
        self._traced.go_on()

    def _end_part(self, left_out: Sequence[tuple[int, int]]) -> None:
        if self._parts.split.count == 1:
            return
        once = self._parts.changed_once(self._traced)
        if self._turn:  # before, nothing has been updated
            once.update(self._of_updated_weights())
        more = changed_by_each(self._parts.model, self._traced.begin, once)
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
            for update in self._parts.collecting.applied[: self._turn]
            for handle in names_by_handle(update.variables)
        }
        data = {id(tensor) for tensor in nests.Packed(self._given[0][0]).tensors}
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
        for number, given in enumerate(self._given[1:], 1):
            with self._parts.numbered(number):
                copies.append(packed.unpack(self._traced.copy(number, given, packed.tensors)))
        return copies


def _no_copies(why: str) -> StepRefused:
    return StepRefused(
        "train_step reads weights again after it has applied their gradients, so all micro-batches take each "
        f"turn before the next, as copies of the first one; they cannot be ({why}): use batches that are a "
        "multiple of microbatches= (drop_remainder=True), microbatches=1, or one device"
    )


def _is_of_weights_alone(op: tf.Operation, updated: Collection[int], data: Collection[int]) -> bool:
    """Return whether an op's inputs come from updated weights, and from no data or random numbers."""
    tensors = list(upstream(op.inputs))
    if any(id(tensor) in data or DRAWN.search(tensor.op.type) for tensor in tensors):
        return False
    reads = (tensor.op for tensor in tensors if tensor.op.type == "ReadVariableOp")
    return any(id(read.inputs[0]) in updated for read in reads)
