"""Averages gradients over all ranks when optimizers apply them, unless they are already reduced.

Loss scaling, clipping, weight decay and accumulation come later, inside the optimizer, so that all ranks see
the same numbers and take the same branches.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_ooo.compat import func_graphs, keras_compiled, keras_variables, tf_functions
from tf_ooo.errors import BackendError
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.tracing.intercepting import GradientSlices, Update, intercepted, tensors_of, times
from tf_ooo.tracing.variables import optimizers_of

if TYPE_CHECKING:
    import keras


# Finds the gradients that a train step has already reduced over the ranks, by where their numbers come from.
# A value is *own* if this rank's data reach it without a collective, and *reduced* if a collective's result
# does. Weights, constants and random numbers are neither. A gradient that is reduced and not own is the same
# on all ranks, whatever stands between: reshaped, cast, clipped, cut out of a buffer, with a term for weight
# decay. A gradient that is both may come from a model that communicates, such as synchronized normalization,
# and is to be reduced; or something own was added to a reduced value, and nothing is right.

OWN, REDUCED = 1, 2

# All ranks get the same results from these ops.
_COLLECTIVES = (
    *("HorovodAllreduce", "HorovodGroupedAllreduce", "HorovodAllgather", "HorovodGroupedAllgather"),
    *("HorovodBroadcast", "CollectiveReduce", "CollectiveGather", "CollectiveBcast"),
)
# Each rank gets a part of these results, or another result than the others.
_PARTS = ("CollectiveReduceScatter",)
# These ops give data, or what only Python knows.
_OF_RANK = ("IteratorGetNext", "HorovodRank", "HorovodLocalRank", "PyFunc", "EagerPyFunc")
_CALLS = {
    "Case", "If", "PartitionedCall", "StatefulPartitionedCall", "StatelessCase", "StatelessIf",
}  # fmt: skip
_ASSIGNED = {"AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"}
_SIZES = {"Shape", "ShapeN", "Size", "Rank"}
# A gradient stays one through these ops: other shapes and types of the same numbers,
_RESHAPED = {
    "Cast", "Concat", "ConcatV2", "ExpandDims", "Identity", "IdentityN", "Pack", "Reshape", "Slice", "Split",
    "SplitV", "Squeeze", "StridedSlice", "Transpose", "Unpack",
}  # fmt: skip
_ADDED = {"Add", "AddN", "AddV2", "Select", "SelectV2", "Sub"}  # sums with others of its shape,
_SCALED = {"ClipByValue", "DivNoNan", "Maximum", "Minimum", "Mul", "MulNoNan", "RealDiv"}  # and scalars.


@dataclass(frozen=True, eq=False)
class _Call:
    """Tells calls of one function apart; ``around`` is the call whose function holds this call's op.

    None is the graph being traced.  ``given`` are the arguments, by the ``id`` of their placeholders.
    """

    op: tf.Operation
    around: _Call | None
    given: dict[int, Any]


@dataclass(frozen=True)
class _At:
    """Names a tensor and the call in which it is computed."""

    call: _Call | None
    tensor: Any

    @property
    def key(self) -> tuple[int, int]:
        return id(self.call), id(self.tensor)


class Origins:
    """Finds where the tensors of a graph being traced come from.

    A variable that adds up gradients comes from what was assigned to it before, in this graph or around it.

    Args:
        weights: variables that add up no gradients: what is trained, and what optimizers keep.
    """

    def __init__(self, weights: Iterable[Any] = ()) -> None:
        self._weights = list(weights)
        self._handles = {id(variable.handle) for variable in self._weights}
        self._captured: dict[int, dict[int, Any]] = {}  # what placeholders stand for, by graph
        # The values that ops of a graph assign, by the ``id`` of the variable's handle outside of all.
        self._assigned: dict[int, dict[int, list[Any]]] = {}
        self._known: dict[tuple[int, int], int] = {}
        self._kept: list[Any] = []  # an id is only valid while its tensor lives
        self._calls: dict[tuple[int, int], list[tuple[Any, _Call]]] = {}

    def of(self, tensor: tf.Tensor) -> int:
        """Return ``OWN``, ``REDUCED``, both or 0 for a tensor."""
        first, circles = _At(None, tensor), False
        waiting = [first]
        opened: dict[tuple[int, int], list[_At]] = {}  # sources
        closed: list[tuple[_At, list[_At]]] = []
        while waiting:
            here = waiting[-1]
            if here.key in self._known:
                waiting.pop()
            elif here.key in opened:
                waiting.pop()
                closed.append((here, opened[here.key]))
                self._known[here.key] = self._combined(*closed[-1])
            else:
                self._kept.append(here)
                sources = opened[here.key] = self._sources(here)
                unknown = [source for source in sources if source.key not in self._known]
                circles = circles or any(source.key in opened for source in unknown)
                waiting += [source for source in unknown if source.key not in opened]
        while circles:
            circles = sum(self._grows(here, sources) for here, sources in closed) > 0
        return self._known[first.key]

    def _grows(self, here: _At, sources: Sequence[_At]) -> bool:
        """Combine once more: what is assigned may come from what was read before, as a seed does."""
        before = self._known[here.key]
        self._known[here.key] = before | self._combined(here, sources)
        return self._known[here.key] != before

    def _sources(self, here: _At) -> list[_At]:
        call, tensor = here.call, here.tensor
        op = tensor.op
        if call is not None and id(tensor) in call.given:
            return [_At(call.around, call.given[id(tensor)])]
        if op.type in _SIZES or _is_collective(op):
            return []
        if op.type == "IdentityN":
            return [_At(call, op.inputs[tensor.value_index])]
        if op.type.startswith("Placeholder") and not op.inputs:
            captured = self._outside(tensor)
            return [_At(call, captured)] if tf.is_symbolic_tensor(captured) else []
        if op.type == "ReadVariableOp":
            return self._assigned_to(op.inputs[0], call)
        if op.type in _CALLS:
            return [_At(inside, body.outputs[tensor.value_index]) for body, inside in self._called(op, call)]
        return [_At(call, source) for source in op.inputs]

    def _assigned_to(self, handle: tf.Tensor, call: _Call | None) -> list[_At]:
        """Return the values that a variable was assigned so far; none for a weight."""
        graph, variable = handle.graph, self._outermost(handle)
        values: list[_At] = []
        while graph is not None and id(variable) not in self._handles:
            if id(graph) not in self._assigned:
                self._kept.append(graph)
                assigned = self._assigned[id(graph)] = {}
                for op in graph.get_operations():
                    if op.type in _ASSIGNED:
                        assigned.setdefault(id(self._outermost(op.inputs[0])), []).append(op.inputs[1])
            values += [_At(call, value) for value in self._assigned[id(graph)].get(id(variable), [])]
            graph = getattr(graph, "outer_graph", None) if call is None else call.op.graph
            call = None if call is None else call.around
        return values

    def _outermost(self, handle: tf.Tensor) -> Any:
        while tf.is_symbolic_tensor(handle) and (captured := self._outside(handle)) is not None:
            handle = captured
        return handle

    def _outside(self, tensor: tf.Tensor) -> Any:
        """Return what a placeholder stands for that its graph captures; None if it is no capture."""
        graph = tensor.graph
        if id(graph) not in self._captured:
            self._kept.append(graph)
            self._captured[id(graph)] = func_graphs.captured_by(graph)
        return self._captured[id(graph)].get(id(tensor))

    def _combined(self, here: _At, sources: Sequence[_At]) -> int:
        """Return the origin of a result; if one branch reduces, as Horovod's does, all count as reduced."""
        op = here.tensor.op
        if _is_collective(op):
            return REDUCED
        if op.type.startswith("Placeholder") and not op.inputs and not sources:
            # Variables are read through their resources.
            neutral = here.tensor.dtype == tf.resource or self._outside(here.tensor) is not None
            return 0 if neutral else OWN
        if op.type.startswith(_OF_RANK):
            return OWN
        origins = [self._known.get(source.key, 0) for source in sources]
        return REDUCED if op.type in _CALLS and REDUCED in origins else _all_of(origins)

    def _called(self, op: tf.Operation, around: _Call | None) -> list[tuple[Any, _Call]]:
        """Return the functions that an op calls, each with its call; the objects stay the same."""
        key = id(op), id(around)
        if key not in self._calls:
            self._kept.append(op)
            calls = self._calls[key] = []
            for body in func_graphs.bodies_of(op):
                given = op.inputs[len(op.inputs) - len(body.inputs) :]
                inner = map(id, body.inputs)
                calls.append((body, _Call(op, around, dict(zip(inner, given, strict=True)))))
        return self._calls[key]

    def gradient(self, gradient: tf.Tensor | tf.IndexedSlices) -> int:
        """Return a gradient's origin, from values and rows of IndexedSlices; 0 if the step runs eagerly."""
        return _all_of(self.of(part) for part in tensors_of(gradient) if tf.is_symbolic_tensor(part))

    def reduced_part(self, gradient: tf.Tensor | tf.IndexedSlices) -> str:
        """Return the op whose reduced result is part of an own gradient; else ""."""
        waiting = [part for part in tensors_of(gradient)[:1] if tf.is_symbolic_tensor(part)]
        seen = {*map(id, waiting)}
        while waiting:
            tensor = waiting.pop()
            if self.of(tensor) == REDUCED:
                return str(tensor.op.name)
            parts = [part for part in _parts(tensor) if id(part) not in seen]
            seen.update(map(id, parts))
            waiting += parts
        return ""


def _parts(tensor: tf.Tensor) -> Iterator[Any]:
    """Yield the terms of a gradient that is a sum, or the tensor that it reshapes or scales."""
    op = tensor.op
    floats = [source for source in op.inputs if source.dtype.is_floating]
    if op.type == "IdentityN":
        yield op.inputs[tensor.value_index]
    elif op.type in _RESHAPED:
        yield from floats
    elif op.type in _ADDED or op.type in _SCALED:
        alike = [part for part in floats if part.shape.is_compatible_with(tensor.shape)]
        scalars = [part for part in floats if part.shape.rank == 0]
        if op.type in _ADDED or (len(alike) == 1 and len(scalars) == len(floats) - 1):
            yield from alike


def _is_collective(op: tf.Operation) -> bool:
    return op.type.startswith(_COLLECTIVES) and not op.type.startswith(_PARTS)


def _all_of(origins: Iterable[int]) -> int:
    return functools.reduce(operator.or_, origins, 0)


_LOG = logging.getLogger("tf_ooo")


class Averaging:
    """Averages the gradients that the optimizers of a model are given.

    With ``gradient_accumulation_steps`` each micro-batch's gradient is averaged: ``Adasum`` then combines
    micro-batches, not their sums.  With ``weighting="samples"`` every sample counts the same, as in one
    process on all ranks' batches together; with ``"ranks"`` every rank does, as in Horovod.
    """

    def __init__(self, engine: Engine, op: str, compression: str, weighting: str = "ranks") -> None:
        self.engine, self.op, self.compression, self.weighting = engine, op, compression, weighting
        self.averaged: set[str] = set()
        self.left_alone: set[str] = set()
        self.slices = GradientSlices()
        self._factor: Any = 1.0
        self._weights: list[Any] = []
        self._seen_eagerly = False

    def wrap(self, model: keras.Model) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapper(train_step: Callable[..., Any]) -> Callable[..., Any]:
            # A tf.function would keep averaging, or not averaging, as in its first trace.
            train_step = tf_functions.undecorated(train_step)

            def averaging_train_step(data: object) -> Any:
                with self.active(optimizers_of(model), data, model.trainable_weights):
                    return train_step(data)

            return averaging_train_step

        return wrapper

    @contextlib.contextmanager
    def active(
        self, optimizers: Sequence[Any], data: object = None, weights: Sequence[Any] = ()
    ) -> Iterator[None]:
        """Average the gradients that these optimizers are given inside the block.

        Args:
            optimizers: Keras' optimizers.
            data: the batch; its rows count with ``weighting="samples"``.
            weights: all trained variables.
        """
        self._factor = self._weight_of(data) if self.weighting == "samples" else 1.0
        states = [state for optimizer in optimizers for state in keras_compiled.state_of(optimizer)]
        self._weights = [keras_variables.value_of(variable) for variable in (*weights, *states)]
        try:
            with intercepted(optimizers, self._average_first):
                yield
        finally:
            self._factor = 1.0

    def _average_first(self, update: Update) -> Any:
        if keras_compiled.horovod_averages(update.optimizer):
            self.left_alone.update(map(keras_variables.path_of, update.variables))
            return update.proceed(update.grads)
        if tf.executing_eagerly() and self.op != "Average" and not self._seen_eagerly:
            self._seen_eagerly = True
            self._refuse_equal(update.grads)
        return update.proceed(self.average(update.grads, update.variables))

    def _refuse_equal(self, grads: Sequence[Any]) -> None:
        """Raise BackendError for gradients already reduced by a step that runs eagerly: no graph shows it."""
        arrays = [np.asarray(part) for grad in grads for part in tensors_of(grad)]
        mine = zlib.crc32(b"".join(array.tobytes() for array in arrays))
        everyone = self.engine.gather(mine)
        if len(everyone) > 1 and len(set(everyone)) == 1 and any(array.any() for array in arrays):
            raise BackendError(
                f"gradients are the same on all ranks before OOOBackprop(op={self.op!r}) reduces them: "
                "train_step does so by itself, which run_eagerly=True does not show, or all ranks have the "
                "same data: compile with run_eagerly=False, or reduce nothing in train_step"
            )

    def average(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients to apply; None stays None, and what the user has averaged stays as it is.

        Raises BackendError if the user has averaged only a part of one.
        """
        out, origins = list(grads), Origins(self._weights)
        by_op: dict[str, list[int]] = {}
        for place, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is None:
                continue
            if self._is_reduced(origins, grad, variable):
                self.left_alone.add(keras_variables.path_of(variable))
                continue
            self.averaged.add(keras_variables.path_of(variable))
            # The "gradient" of such a variable (a scale of float8 training) is its next value.
            is_next = keras_variables.is_overwritten_with_gradient(variable)
            by_op.setdefault("Average" if is_next else self.op, []).append(place)
        if self.left_alone and not by_op:
            _LOG.info("the train step averages its gradients itself; they are not averaged again")
        for op, places in by_op.items():
            named = [(_name(variables[i], i), times(grads[i], self._factor)) for i in places]
            reduce = functools.partial(self.engine.allreduce, op=op, compression=self.compression)
            reduced = self.slices.allreduce(named, reduce, may_slice=op != "Adasum")
            for i, averaged in zip(places, reduced, strict=True):
                out[i] = averaged
        return out

    def _is_reduced(
        self, origins: Origins, grad: tf.Tensor | tf.IndexedSlices, variable: keras.Variable
    ) -> bool:
        """Say whether the step has reduced a gradient; False if eager. BackendError: only in part."""
        origin = origins.gradient(grad)
        part = origins.reduced_part(grad) if origin == OWN | REDUCED else ""
        if part:
            raise BackendError(
                f"train_step reduces the gradient of {keras_variables.path_of(variable)} over the ranks by "
                f"itself ({part}) and then adds what this rank has computed of its own data: add that before "
                f"the gradient is reduced, or leave it to OOOBackprop(op={self.op!r}) to reduce the sum"
            )
        return origin == REDUCED

    def _weight_of(self, data: object) -> Any:
        """Return this rank's samples over the mean of all ranks'; exactly 1 if all have equally many."""
        first = next(t for t in tf.nest.flatten(data) if hasattr(t, "shape") and t.shape.rank != 0)
        count = tf.cast(tf.shape(first)[0], tf.float32)
        # No constant, even for batches of a known size: graph optimizers would send it only once.
        count = tf.raw_ops.PlaceholderWithDefault(input=count, shape=[])
        total = self.engine.sum(count, "tf_ooo_samples")
        return count * (float(self.engine.size) / total)


def _name(variable: keras.Variable, place: int) -> str:
    """Return a name for a variable that is the same on all ranks.

    The path would not be: Keras numbers layers within a process, and a rank would wait for ever for another's
    "dense_7".
    """
    short = unnumbered(keras_variables.path_of(variable))
    return f"tf_ooo_{place}_" + "".join(c if c.isalnum() else "_" for c in short)


def unnumbered(path: str) -> str:
    """Return the last part of a variable's name, without the number that Keras counts per process."""
    return re.sub(r"_\d+$", "", path.rsplit("/", 1)[-1])
