"""The flat function of one step: all micro-batches, then the updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE
from tf_ooo.compat import keras_losses, keras_variables, nests, op_marks, tf_functions, train_function
from tf_ooo.errors import BackendError
from tf_ooo.planning.model.task import replica_of_part
from tf_ooo.tracing.collecting import Collecting
from tf_ooo.tracing.copied import TracedPart
from tf_ooo.tracing.micro_batches import (
    part_of,
    relative_weights,
    rows_of,
    split_rows,
)
from tf_ooo.tracing.optimizers import optimizers_of

# What leaves a variable as it is.
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class StepFunctions:
    """Callable with a batch: trains on its micro-batches in one function, one for each shape of a batch.

    ``tracing`` is entered around calls, ``applying``, given the batch, where the updates are traced: what
    averages over replicas.  ``check_captures`` is given what a function captures, before it runs for the
    first time; ``around_traces`` is entered around that, and tracing it.  ``untraced`` holds functions that
    were made in another way, by the signatures of their batches.  The gradients of each of so many
    ``replicas`` are added up by themselves.
    """

    def __init__(
        self,
        model: Any,
        microbatches: int,
        tracing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        applying: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
        replicas: int = 1,
    ) -> None:
        self.model, self.microbatches, self._tracing = model, microbatches, tracing
        self._replicas = replicas
        self._applying = applying
        self.check_captures: Callable[[Iterable[Any]], None] = lambda captures: None
        self.around_traces: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._functions: dict[Any, Any] = {}
        self._concrete: dict[Any, Any] = {}
        self.untraced: dict[Any, Callable[[Any], Any]] = {}

    def __call__(self, batch: Any) -> Any:
        key = nests.signature(batch)
        if key in self.untraced:
            return self.untraced[key](batch)
        if key in self._functions:
            with self._tracing():
                return self._functions[key](batch)
        with self.around_traces(), self._tracing():
            function = self._make(batch)
            traced = self._concrete[key] = function.get_concrete_function(batch)
            self.check_captures(traced.captured_inputs)
            self._functions[key] = function
            return function(batch)

    def concrete_of(self, signature: Any) -> Any:
        """The traced function for batches of this signature, which have been trained on."""
        return self._concrete[signature]

    @property
    def traced(self) -> int:
        return len(self._functions)

    def concrete(self, batch: Any) -> Any:
        """The traced function for a batch; nothing runs."""
        with self._tracing():
            return self._make(batch).get_concrete_function(batch)

    def _make(self, batch: Any) -> Any:
        rows = split_rows(rows_of(batch), self.microbatches)
        model = self.model
        # Never more than one micro-batch: nothing to tell apart by name, and the bits of Keras' own step.
        scope = STEP_SCOPE if self.microbatches > 1 else ""

        def step(batch: Any) -> Any:
            weights, scale = relative_weights(rows)
            replicas = replica_of_part(len(rows), self._replicas)
            collecting = Collecting(optimizers_of(model), weights, scale, replicas)
            micro_batches = _MicroBatches(model, rows, collecting)
            logs = []
            for number in range(len(rows)):
                with op_marks.numbered_step(number, STEP_ATTR, scope):
                    logs.append(micro_batches.run(number, part_of(batch, rows, number)))
                if not number:
                    variables = [update.variables for update in collecting.applied]
                    refuse_reads_after(zip(variables, collecting.collected_after, strict=True))
            refuse_no_gradient(collecting.applied)
            with op_marks.numbered_step(len(rows), STEP_ATTR, scope):
                metrics = [variable for metric in model.metrics for variable in metric.variables]
                out = _whole(logs, rows, _handles(metrics))
                with self._applying(batch):
                    collecting.apply()
            return out

        def traced_once(batch: Any) -> Any:
            with tf_functions.variables_made_at_once():
                return step(batch)

        return tf_functions.plain_function(traced_once)


class _MicroBatches:
    """The train step of each micro-batch in the function that is being traced.

    Traced is the first of as many rows; the others are copies of it, unless those would do something else.
    """

    def __init__(self, model: Any, rows: Sequence[int], collecting: Collecting) -> None:
        self._model, self._rows, self._collecting = model, rows, collecting
        # Traced within the step: gradients of a function of its own could not be added up outside.
        self._train_step = tf_functions.undecorated(model.train_step)
        self._traced: dict[Any, tuple[TracedPart, nests.Packed]] = {}

    def run(self, number: int, part: Any) -> Any:
        """The logs of a micro-batch; its gradients are collected."""
        if self._kind(number) in self._traced:
            ops, results = self._traced[self._kind(number)]
            logs, *grads = results.unpack(ops.copy(number, part, results.tensors))
            self._collecting.add_copied(number, grads)
            return logs
        collecting, share = self._collecting, self._rows[number] / sum(self._rows)
        ops = TracedPart(number, part)
        with collecting.micro_batch(number), keras_losses.weighted_means(self._model, share):
            counts = number == len(self._rows) - 1
            logs = train_function.step_on_data(self._model, self._train_step, counts)(part)
        if self._kind(number) in map(self._kind, range(number + 1, len(self._rows))):
            ops.end([given.ops for given in collecting.given])
            if not ops.why_not:
                results = nests.Packed([logs, *(given.grads for given in collecting.given)])
                self._traced[self._kind(number)] = ops, results
        return logs

    def _kind(self, number: int) -> tuple[int, bool]:
        """The same for micro-batches that are traced alike: the last may count the step."""
        return self._rows[number], train_function.counts_steps(self._model) and number == len(self._rows) - 1


def refuse_no_gradient(updates: Sequence[Any]) -> None:
    """Raises BackendError where no optimizer has been called."""
    if not updates:
        raise BackendError(
            "train_step applies no gradient through a Keras optimizer that is an attribute of the model; "
            "use optimizer.apply_gradients or optimizer.apply"
        )


def refuse_reads_after(updates: Iterable[tuple[Sequence[Any], int]]) -> None:
    """Weights that are read after their update would be read before it over several devices: BackendError.

    ``updates``: the variables of each, and how many ops the graph that is traced had then.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    for variables, begin in updates:
        handles = _handles(variables)
        for op in operations[begin:]:
            if op.type in READS and id(op.inputs[0]) in handles:
                raise BackendError(
                    f"train_step reads {handles[id(op.inputs[0])]} again after it has applied its gradient "
                    f"(op {op.name}); over several devices updates come later than in one step, so it would "
                    "not see this one: train such a model on one device"
                )


def _handles(variables: Iterable[Any]) -> dict[int, str]:
    """Names of variables by the id of their handle in the graph that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    inside = {id(external): placeholder for external, placeholder in graph.captures}
    names = {}
    for variable in variables:
        handle = keras_variables.handle_of(variable)
        if handle is not None and id(handle) in inside:
            names[id(inside[id(handle)])] = keras_variables.path_of(variable)
    return names


def _whole(logs: Sequence[Any], rows: Sequence[int], metrics: dict[int, str]) -> Any:
    """Logs of the whole batch: a metric's result after the last micro-batch; of other numbers the mean."""
    if len(logs) == 1:
        return logs[0]

    def of_batch(*values: Any) -> Any:
        last = values[-1]
        floating = tf.is_tensor(last) and last.dtype.is_floating
        if not floating or last.shape.rank != 0 or _depends_on(last, metrics):
            return last
        total = sum(rows)
        return tf.add_n([v * tf.cast(r / total, v.dtype) for v, r in zip(values, rows, strict=True)])

    return tf.nest.map_structure(of_batch, *logs)


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
