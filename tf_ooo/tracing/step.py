"""The flat function of one step: all micro-batches, then the updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE
from tf_ooo.compat import (
    keras_loops,
    keras_losses,
    keras_optimizers,
    nests,
    op_marks,
    tf_functions,
    train_function,
)
from tf_ooo.errors import BackendError
from tf_ooo.planning.model.task import replica_of_part
from tf_ooo.tracing.collecting import Collecting
from tf_ooo.tracing.copied import TracedPart
from tf_ooo.tracing.in_turns import InTurns
from tf_ooo.tracing.intercepting import TurnsNeeded
from tf_ooo.tracing.logs import whole_logs
from tf_ooo.tracing.micro_batches import Division, StepRefused, rows_of
from tf_ooo.tracing.once import Once, changed_by_each, changed_once, first_drawn
from tf_ooo.tracing.optimizers import optimizers_of
from tf_ooo.tracing.splitting import BatchesSeen, FixedRows, OpenBatch, OpenRows, Split, open_batch
from tf_ooo.tracing.traces import traced_anew
from tf_ooo.tracing.variables import names_by_handle

_LOG = logging.getLogger("tf_ooo")
# What leaves a variable as it is, and what calls a function that may read it.
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_CALLS = ("Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While")


class StepFunctions:
    """Callable with a batch: trains on its micro-batches in one function, one for each shape of a batch.

    ``tracing`` is entered around calls, ``applying``, given the batch, where the updates are traced: what
    averages over replicas.  ``check_captures`` is given what a function captures, before it runs for the
    first time; ``around_traces`` is entered around that, and tracing it.  ``untraced`` holds functions that
    were made in another way, by the signatures of their batches.  The gradients of each of so many
    ``replicas`` are added up by themselves.  Batches that ``seen`` says have no trace of their own share one,
    for any number of rows; None: each has its own.  Recurrent layers run their time steps in ``loops``.
    """

    def __init__(
        self,
        model: Any,
        division: Division,
        tracing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        applying: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
        replicas: int = 1,
        loops: int = 1,
    ) -> None:
        self.model, self.division, self._tracing = model, division, tracing
        self._replicas, self._loops = replicas, loops
        self._applying = applying
        self.check_captures: Callable[[Iterable[Any]], None] = lambda captures: None
        self.around_traces: Callable[[], AbstractContextManager[Any]] = nullcontext
        # Given the names of weights that each micro-batch changes.
        self.note_changed: Callable[[list[str]], None] = lambda names: None
        # Given the name of an op that draws other random numbers for each micro-batch.
        self.note_drawn: Callable[[str], None] = lambda name: None
        # Given a line on each log that is not the batch's own.
        self.note: Callable[[str], None] = lambda text: None
        self._functions: dict[Any, Any] = {}
        self._concrete: dict[Any, Any] = {}
        self.seen: BatchesSeen | None = None
        self._open: set[Hashable] = set()
        self.untraced: dict[Any, Callable[[Any], Any]] = {}
        self._in_turns = False

    def __call__(self, batch: Any) -> Any:
        try:
            return self._run(batch)
        except TurnsNeeded as error:  # of a trace
            _LOG.debug("updates are traced in turns: %s", error)
            self._in_turns = True
            return self._run(batch)

    def _run(self, batch: Any) -> Any:
        key = nests.signature(batch)
        if key in self.untraced:
            return self.untraced[key](batch)
        if key in self._functions:
            with self._tracing():
                return self._functions[key](batch)
        opened = self._opened(batch, key)
        if opened is not None and opened.key in self._functions:
            with self._tracing():
                return self._functions[opened.key](batch)
        with self.around_traces(), self._tracing(), traced_anew(self.model):
            if opened is not None and self._traced_open(opened, batch):
                return self._functions[opened.key](batch)
            function = self._make(batch)
            traced = self._concrete[key] = function.get_concrete_function(batch)
            self.check_captures(traced.captured_inputs)
            self._functions[key] = function
            return function(batch)

    def forget_open(self) -> bool:
        """Whether the latest trace was one for any number of rows; from now on there is none."""
        latest = next(reversed(self._functions), None)
        if self.seen is None or latest not in self._open:
            return False
        del self._functions[latest]
        self.seen = None
        return True

    def _opened(self, batch: Any, signature: Any) -> OpenBatch | None:
        """The batch as one of any number of rows; None: it is to be traced with its own."""
        # In turns all micro-batches are copies of one.
        copies = self._in_turns and len(set(self.division.split(rows_of(batch)))) > 1
        if not copies and (self.seen is None or self.seen.has_own_trace(signature)):
            return None
        return open_batch(batch, self.division)

    def _traced_open(self, opened: OpenBatch, batch: Any) -> bool:
        """Traces the step for any number of rows; False: it has to know it."""
        function = self._make(batch, [opened.spec])
        try:
            self.check_captures(function.get_concrete_function().captured_inputs)
        except TurnsNeeded:
            raise
        except Exception as error:  # user's code may need the number, too; what else is wrong is raised again
            _LOG.debug("each number of rows is traced by itself", exc_info=error)
            self.seen = None
            return False
        self._functions[opened.key] = function
        self._open.add(opened.key)
        return True

    def concrete_of(self, signature: Any) -> Any:
        """The traced function for batches of this signature alone, if there is one."""
        return self._concrete.get(signature)

    @property
    def traced(self) -> int:
        return len(self._functions)

    def concrete(self, batch: Any) -> Any:
        """The traced function for a batch; nothing runs."""
        with self._tracing(), traced_anew(self.model):
            return self._make(batch).get_concrete_function(batch)

    def _make(self, batch: Any, specs: Sequence[Any] | None = None) -> Any:
        """``specs``: of a batch whose rows are open."""
        rows = self.division.split(rows_of(batch))
        model, loops, in_turns = self.model, self._loops, self._in_turns
        # Never more than one micro-batch: nothing to tell apart by name, and the bits of Keras' own step.
        scope = STEP_SCOPE if self.division.most > 1 else ""

        def step(batch: Any) -> Any:
            split = FixedRows(rows) if specs is None else OpenRows(batch, len(rows))
            replicas = replica_of_part(split.count, self._replicas)
            collecting = Collecting(
                optimizers_of(model), split.weights, split.scale, replicas, specs is not None, in_turns
            )
            if in_turns:
                logs = InTurns(model, split, collecting, scope, lambda: self._applying(batch)).run(batch)
                refuse_no_gradient(model, collecting.applied)
                with op_marks.numbered_step(split.count, STEP_ATTR, scope):
                    logs = self._whole(logs, split)
                    return nests.with_variables_read(logs)
            micro_batches = _MicroBatches(model, split, collecting)
            logs = []
            for number in range(split.count):
                with op_marks.numbered_step(number, STEP_ATTR, scope):
                    logs.append(micro_batches.run(number, split.part(batch, number)))
                if not number:
                    variables = [
                        [*update.variables, *keras_optimizers.state_of(update.optimizer)]
                        for update in collecting.applied
                    ]
                    again = read_after(zip(variables, collecting.collected_after, strict=True))
                    if again:
                        raise TurnsNeeded(again)
                    if split.count > 1:
                        self.note_changed(changed_by_each(model, micro_batches.once))
                        self.note_drawn(first_drawn())
            refuse_no_gradient(model, collecting.applied)
            with op_marks.numbered_step(split.count, STEP_ATTR, scope):
                out = self._whole(logs, split)
                with self._applying(batch):
                    collecting.apply()
                return nests.with_variables_read(out)

        def traced_once(batch: Any) -> Any:
            with tf_functions.variables_made_at_once(), keras_loops.in_parts(loops):
                return step(batch)

        return tf_functions.plain_function(traced_once, specs)

    def _whole(self, logs: Sequence[Any], split: Split) -> Any:
        """Logs of the whole batch: a metric's result after the last micro-batch; see :func:`whole_logs`."""
        metrics = names_by_handle(_metrics_of(self.model))
        return whole_logs(logs, split, lambda value: _depends_on(value, metrics), self.note)


class _MicroBatches:
    """The train step of each micro-batch in the function that is being traced.

    Traced is the first of as many rows; the others are copies of it, unless those would do something else.
    """

    def __init__(self, model: Any, split: Split, collecting: Collecting) -> None:
        self._model, self._split, self._collecting = model, split, collecting
        # Traced within the step: gradients of a function of its own could not be added up outside.
        self._train_step = tf_functions.undecorated(model.train_step)
        self._traced: dict[Any, tuple[TracedPart, nests.Packed]] = {}
        self.once = Once()

    def run(self, number: int, part: Any) -> Any:
        """The logs of a micro-batch; its gradients are collected."""
        share = self._split.share(number)
        if self._kind(number) in self._traced:
            ops, results = self._traced[self._kind(number)]
            logs, *grads = results.unpack(ops.copy(number, [part, share], results.tensors))
            self._collecting.add_copied(number, grads)
            return logs
        collecting, ops = self._collecting, TracedPart(number, [part, share])
        with collecting.micro_batch(number, share), keras_losses.weighted_means(self._model, share):
            counts = number == self._split.count - 1
            logs = train_function.step_on_data(self._model, self._train_step, counts)(part)
            logs = nests.with_variables_held(logs)
        if self._kind(number) in map(self._kind, range(number + 1, self._split.count)):
            once = changed_once(self._model, [part, share], ops.begin) if self._all_copies else Once()
            ops.end([*(given.ops for given in collecting.given), *once.ranges])
            self.once = Once() if ops.why_not else once
            if not ops.why_not:
                results = nests.Packed([logs, *(given.grads for given in collecting.given)])
                self._traced[self._kind(number)] = ops, results
        return logs

    @property
    def _all_copies(self) -> bool:
        """Whether one micro-batch is traced for all."""
        return len(set(map(self._kind, range(self._split.count)))) == 1

    def _kind(self, number: int) -> tuple[Hashable, int]:
        """The same for micro-batches that are copies of one another; with Keras 2 none is.

        Its last one counts the step, and TensorFlow's optimizers treat copies otherwise there: sums of
        gradients were taken to be another layer's (2.15).
        """
        return self._split.kind(number), number if train_function.counts_steps(self._model) else 0


def refuse_no_gradient(model: Any, updates: Sequence[Any]) -> None:
    """Raises StepRefused where no optimizer has been called."""
    if not updates and not model.trainable_weights:
        raise StepRefused(
            "the model has no trainable weights: there is no layer to cut it at; fit it as it is"
        )
    if not updates:
        raise StepRefused(
            "train_step applies no gradient through a Keras optimizer that is an attribute of the model; "
            "use optimizer.apply_gradients or optimizer.apply"
        )


def _metrics_of(model: Any) -> list[Any]:
    return [variable for metric in model.metrics for variable in metric.variables]


def refuse_reads_after(updates: Iterable[tuple[Sequence[Any], int]]) -> None:
    """BackendError for what :func:`read_after` finds."""
    again = read_after(updates)
    if again:
        raise BackendError(
            f"train_step reads {again}; over several devices updates come later than in one step, so it "
            "would not see this one: train such a model on one device"
        )


def read_after(updates: Iterable[tuple[Sequence[Any], int]]) -> str:
    """A weight that is read after its update, in words; empty: there is none.

    ``updates``: the variables of each, and how many ops the graph that is traced had then.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    for variables, begin in updates:
        handles = names_by_handle(variables)
        for op in operations[begin:]:
            given = op.inputs[:1] if op.type in READS else op.inputs if op.type in _CALLS else ()
            read = [handles[id(tensor)] for tensor in given if id(tensor) in handles]
            if read:
                return f"{read[0]} again after it has applied its gradient (op {op.name})"
    return ""


def _depends_on(tensor: Any, handles: dict[int, str]) -> bool:
    seen, stack = set(), [tensor]
    while stack:
        current = stack.pop()
        if id(current) in handles:
            return True
        if id(current.op) not in seen:
            seen.add(id(current.op))
            stack.extend(current.op.inputs)
    return False
