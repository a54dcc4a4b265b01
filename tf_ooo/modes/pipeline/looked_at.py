"""Runs a train step only to look at its loss, gradients and outputs, without an update."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from grappler_passes.compat import runtime
from tf_ooo.compat import func_graphs, keras_fits, keras_layers, keras_variables, tf_functions, train_function
from tf_ooo.tracing.assigned import names_of_held
from tf_ooo.tracing.changed import Replay, Taped, refuse_moved
from tf_ooo.tracing.intercepting import Update, intercepted
from tf_ooo.tracing.micro_batches import FixedRows, computed_from, rows_of
from tf_ooo.tracing.step import metric_variables, silent_logs
from tf_ooo.tracing.traces import RestoringFunction
from tf_ooo.tracing.variables import all_variables, key_of, names_by_handle, optimizers_of, values_of

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")


@dataclass(frozen=True)
class Slices:
    """Holds the gradient of an embedding: values for rows, which may occur several times."""

    rows: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Seen:
    """Holds the loss of one batch, a gradient for each place of each update, the model's outputs and states.

    ``metrics``: the variables of all metrics after it; ``results``: the metrics' results, by name; ``logs``:
    numbers that :func:`silent_logs` finds in the step's outputs.
    """

    loss: float
    grads: tuple[np.ndarray | Slices, ...]
    outputs: tuple[np.ndarray, ...]
    states: Mapping[str, np.ndarray]
    metrics: tuple[np.ndarray, ...]
    results: Mapping[str, np.ndarray]
    logs: Mapping[str, float]

    @property
    def is_finite(self) -> bool:
        grads = [grad.values if isinstance(grad, Slices) else grad for grad in self.grads]
        return bool(np.isfinite(self.loss)) and all(np.isfinite(grad).all() for grad in grads)


class LookedAt:
    """Runs ``train_step`` as in inference, with one constant for all random numbers; no variable changes.

    ``gradients=False`` leaves the gradients out, if memory is too small for them.

    Attributes:
        trace_s: seconds of tracing it.
        random: whether random numbers are left in functions that it calls.
        states: untrained variables that the step assigns, by path.
        used: names of those on which the loss or a gradient depends, in this step or a later one.
        made: how the batch's logs follow from micro-batches' logs, by name.
    """

    def __init__(self, model: keras.Model, batch: Any, gradients: bool = True) -> None:
        self._model, self._gradients, self._as_traced = model, gradients, True
        self.made: dict[str, str] = {}
        started = time.perf_counter()
        self._restoring = RestoringFunction(tf_functions.concrete_function(self._step, [batch]))
        self.trace_s = time.perf_counter() - started
        called = func_graphs.ops_called_from(self._restoring.concrete.graph)
        self.random = any("Random" in kind for _, kind in called)
        self.states = _states(model, self._restoring.changed)

    def __call__(self, batch: object, after: Seen | None = None) -> Seen:
        """Run it on a batch; ``after`` has metrics continue from their values then."""
        # To optimize the graph would take longer than the few steps that are looked at.
        if self._as_traced:
            try:
                with runtime.calls_not_optimized():
                    return self._seen(batch, after)
            except tf.errors.OpError as error:  # there are ops that only an optimized graph can run
                _LOG.debug("looked at as it is optimized: %s", error)
                self._as_traced = False
        return self._seen(batch, after)

    def _seen(self, batch: object, after: Seen | None) -> Seen:
        with self._restoring:
            variables = [v for v in values_of(metric_variables(self._model)) if v is not None]
            if after is not None:
                for variable, value in zip(variables, after.metrics, strict=True):
                    variable.assign(value)
            loss, grads, outputs, logs = self._restoring(batch)
            states, metrics = self.values, tuple(variable.numpy() for variable in variables)
            results = _results(self._model)
        grads, outputs = tuple(map(_value_of, grads)), tuple(out.numpy() for out in outputs)
        numbers = {name: float(log) for name, log in logs.items()}
        return Seen(float(loss), grads, outputs, states, metrics, results, numbers)

    @property
    def variables(self) -> list[Any]:
        """Return all variables that the trace reads or changes."""
        return list(self._restoring.concrete.graph.variables)

    @property
    def closed_gates(self) -> dict[str, Any]:
        """Return scalar variables of value zero that the step only reads, such as a factor of a term."""
        changed = {id(variable.handle) for variable in self._restoring.changed}
        read = [variable for variable in self.variables if id(variable.handle) not in changed]
        gates = [v for v in read if v.dtype.is_floating and v.shape.rank == 0 and float(v) == 0.0]
        return {keras_variables.unique_name_of(gate): gate for gate in gates}

    @property
    def counters(self) -> dict[str, Any]:
        """Return scalar integers, no states, on which loss or gradients depend, as a count of steps."""
        states, paths = set(map(id, self.states.values())), _paths_of(all_variables(self._model))
        counters = {
            paths.get(id(number.handle)) or keras_variables.unique_name_of(number): number
            for number in self.variables
            if number.dtype.is_integer and number.shape.num_elements() == 1 and id(number) not in states
        }
        return {name: counters[name] for name in self._read_of(counters)}

    @property
    def values(self) -> dict[str, np.ndarray]:
        """Return the present values of the states."""
        return {path: variable.numpy() for path, variable in self.states.items()}

    @property
    def used(self) -> set[str]:
        return self._read_of(self.states)

    def _read_of(self, variables: Mapping[str, Any]) -> set[str]:
        """Return names of these variables on which results, or assignments to such variables, depend."""
        concrete = self._restoring.concrete
        inside = {id(outer): inner for outer, inner in concrete.graph.captures}
        names = {id(inside[id(variable.handle)]): name for name, variable in variables.items()}
        seen, waiting, read = set[int](), list(concrete.outputs), set[str]()
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in names and names[id(tensor)] not in read:
                read.add(names[id(tensor)])
                waiting.extend(given for op in tensor.consumers() for given in op.inputs[1:])
            if id(tensor.op) not in seen:
                seen.add(id(tensor.op))
                waiting.extend(tensor.op.inputs)
        return read

    def _step(self, batch: object) -> Any:
        losses, grads, outputs, returned, _ = _traced_step(self._model, batch)
        func_graphs.set_random_numbers(tf.compat.v1.get_default_graph())
        loss = tf.add_n([tf.cast(tf.reduce_sum(loss), tf.float32) for loss in losses])
        handles, split = names_by_handle(metric_variables(self._model)), FixedRows((rows_of(batch),) * 2)
        logs = silent_logs(returned, split, lambda value: computed_from(value, handles))
        self.made = {name: how for name, (_, how) in logs.items()}
        numbers = {name: tf.cast(value, tf.float32) for name, (value, _) in logs.items()}
        return loss, grads if self._gradients else [], outputs, numbers


def _states(model: keras.Model, changed: Sequence[Any]) -> dict[str, Any]:
    """Return by name the untrained ones that belong to no metric, optimizer or seed."""
    paths = _paths_of(model.weights)
    trained = set(map(key_of, keras_fits.trained_variables(model)))
    no_states = set(map(key_of, all_variables(model))) - paths.keys() | trained
    paths = {**names_of_held(model), **paths}
    return {
        paths.get(id(variable.handle)) or keras_variables.unique_name_of(variable): variable
        for variable in changed
        if id(variable.handle) not in no_states
    }


def _results(model: keras.Model) -> dict[str, np.ndarray]:
    """Return the metrics' results by name, without those that have no value yet, or no numbers."""
    results = {}
    for metric in model.metrics:
        with contextlib.suppress(Exception):  # a class of the user's
            said = metric.result()
            by_name = said if isinstance(said, Mapping) else {metric.name: said}
            results.update({name: np.asarray(value, np.float64) for name, value in by_name.items()})
    return results


def _paths_of(variables: Sequence[Any]) -> dict[int, str]:
    return {key_of(variable): path for path, variable in keras_variables.named(variables).items()}


def _traced_step(
    model: keras.Model, batch: object
) -> tuple[list[Any], list[Any], list[Any], Any, int | None]:
    """Trace losses, gradients, outputs and logs; return them, and how many ops precede any gradient.

    BackendError: ``train_step`` changes gradients.
    """
    train_step = tf_functions.undecorated(model.train_step)
    taped = Taped(names_of_held(model))
    losses, grads, outputs = list[Any](), list[Any](), list[Any]()

    def note(update: Update) -> None:
        collected = Replay(taped, update.grads).collected
        refuse_moved(taped, update.grads)
        losses.extend(taped.losses_of(update.grads))
        grads.extend(grad for grad in collected if grad is not None)

    call = model.call

    def noted_call(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        outputs.extend(tensor for tensor in tf.nest.flatten(result) if _is_of_rows(tensor))
        return result

    with (
        intercepted(optimizers_of(model), note),
        taped.noted(),
        keras_layers.inference_only(model),
        keras_layers.shadowed(model, "call", noted_call),
    ):
        logs = train_function.step_on_data(model, train_step, counts=False)(batch)
    graph = tf.compat.v1.get_default_graph()
    return losses, grads, [out for out in outputs if out.graph is graph], logs, taped.began_at


def forward_tensors(model: keras.Model, batches: Sequence[Any]) -> list[dict[str, np.ndarray]]:
    """Return all tensors but scalars of the forward pass of batches of one shape, by :func:`_key`."""

    def step(batch: object) -> Any:
        *_, forward = _traced_step(model, batch)
        graph = tf.compat.v1.get_default_graph()
        func_graphs.set_random_numbers(graph)
        ops = [op for op in graph.get_operations()[:forward] if "Random" not in op.type]
        outputs = [tensor for op in ops for tensor in op.outputs]
        return {tensor.name: tensor for tensor in outputs if _is_of_rows(tensor)}

    restoring = RestoringFunction(tf_functions.concrete_function(step, [batches[0]]))
    tensors = [tensor for op in restoring.concrete.graph.get_operations() for tensor in op.outputs]
    with restoring:
        values = [restoring(batch) for batch in batches]
    return [{_key(t): each[t.name].numpy() for t in tensors if t.name in each} for each in values]


def _key(tensor: tf.Tensor) -> str:
    """Return the tensor's name with the names of its inputs.

    Keras computes ``a + b`` of one row by another op than of several, so a name alone may be another sum's.
    """
    return " ".join([tensor.name, *(given.name for given in tensor.op.inputs)])


def _is_of_rows(tensor: tf.Tensor) -> bool:
    """Return whether it is a dense tensor of numbers with at least one dimension."""
    return isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating and tensor.shape.rank not in (None, 0)


def _value_of(grad: tf.Tensor | tf.IndexedSlices) -> np.ndarray | Slices:
    if isinstance(grad, tf.IndexedSlices):
        return Slices(grad.indices.numpy(), grad.values.numpy())
    return np.asarray(grad.numpy())


def dense(grads: Sequence[np.ndarray | Slices]) -> list[np.ndarray]:
    """Return one variable's gradients from several batches as arrays of the rows that any has."""
    if not any(isinstance(grad, Slices) for grad in grads):
        return [np.asarray(grad, np.float64) for grad in grads]
    rows = np.unique(np.concatenate([grad.rows for grad in grads if isinstance(grad, Slices)]))
    return [_at_rows(grad, rows) for grad in grads]


def _at_rows(grad: np.ndarray | Slices, rows: np.ndarray) -> np.ndarray:
    if not isinstance(grad, Slices):
        return np.asarray(grad[rows], np.float64)
    total = np.zeros((len(rows), *grad.values.shape[1:]))
    np.add.at(total, np.searchsorted(rows, grad.rows), grad.values)
    return total
