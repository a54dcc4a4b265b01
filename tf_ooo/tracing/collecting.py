"""Adds up gradients of micro-batches in a fixed order, then applies them once.

Loss scaling, clipping, weight decay and accumulation are inside the optimizers: they act once, on the sum.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from tf_ooo.compat import func_graphs, keras_compiled, keras_variables
from tf_ooo.tracing.changed import Replay, Taped, refuse_settings
from tf_ooo.tracing.intercepting import (
    Scaled,
    TurnsNeeded,
    Update,
    by_hand,
    intercepted,
    is_of_half,
    ops_so_far,
    terms_of,
    times,
)
from tf_ooo.tracing.micro_batches import StepRefused, behind, upstream

_IN_A_GRAPH_OF_ITS_OWN = (
    "train_step applies gradients inside a loop or a condition on tensors (a Python for or if over them under"
    " tf.function, tf.while_loop, tf.cond, tf.map_fn), or in a tf.function of its own; over several devices "
    "each step has one update of the whole batch, which is made where train_step itself calls the optimizer: "
    "loop over range(), take the tf.function off, leave gradients of several steps to the optimizer's "
    "gradient_accumulation_steps=, or train on one device"
)
# Computing rows of positions takes fewer ops: constants, a range, casts, reshapes, a wrap of negative rows.
_MOST_OPS = 64
# _ROWS_ONCE give rows that occur once each, _SAME_ROWS hand them on.
_ROWS_ONCE = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Where"}
_SAME_ROWS = {"Cast", "Identity", "PlaceholderWithDefault", "Reshape", "Squeeze"}


@dataclass
class _Applied:
    """Holds what one call of an optimizer's ``apply`` was given, for each micro-batch.

    ``terms`` says into how many summands each gradient is split; places count all summands.  ``halves`` are
    the places of float16 numbers.  ``counted`` tells that gradients already count their share of the batch.
    ``replay`` computes the update's gradients from the sums; None if they are the sums.  ``collected_at`` is
    how many ops the graph had when the first micro-batch's gradients were there.
    """

    update: Update
    terms: list[int]
    halves: set[int]
    counted: bool
    replay: Replay | None
    collected_at: int
    parts: dict[int, _Part] = field(default_factory=dict)


@dataclass
class _Part:
    """Holds the sums over the micro-batches of one replica, by the place of each term."""

    sums: dict[int, Any] = field(default_factory=dict)
    slices: dict[int, list[Any]] = field(default_factory=dict)
    fixed_rows: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """Holds what a call of an optimizer was given, and the numbers of the ops that add it up."""

    grads: list[Any]
    ops: range


class Collecting:
    """Adds up a step's gradients: each micro-batch's times its weight; the sum is multiplied by ``scale``.

    ``replicas`` gives each micro-batch's replica; their sums are added where the variable is; None: one
    replica.  ``open_rows``: the batch's rows are only known when the function runs.  ``in_turns``: an update
    is made as soon as its gradients are there; without it TurnsNeeded is raised if the step needs that.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        weights: Sequence[Any],
        scale: object,
        replicas: Sequence[int] | None = None,
        open_rows: bool = False,
        in_turns: bool = False,
    ) -> None:
        self.optimizers, self.weights, self.scale = list(optimizers), weights, scale
        self._replicas = [0] * len(weights) if replicas is None else replicas
        self.applied: list[_Applied] = []
        self._open_rows, self._in_turns = open_rows, in_turns
        self._graph: Any = None
        self._number = 0
        self._calls = 0
        self.notes: list[str] = []  # what differs from a step on the batch in one
        self._taped, self._scaled = Taped(), Scaled()
        self.given: list[Given] = []
        # This is called when an optimizer was given a micro-batch's gradients.
        self.on_given: Callable[[], None] = lambda: None
        self._applying = False

    @contextlib.contextmanager
    def micro_batch(self, number: int, share: object = 1.0) -> Iterator[None]:
        """Trace one micro-batch inside the block; :attr:`given` then holds what its optimizers were given.

        ``share`` replaces the micro-batch's weight for gradients of losses that an optimizer scales.
        """
        self._number, self._calls, self._taped, self.given = number, 0, Taped(), []
        self._scaled, self._graph = Scaled(share), tf.compat.v1.get_default_graph()
        with (
            intercepted(self.optimizers, self._collect),
            self._taped.noted(),
            self._scaled.noted(self.optimizers),
        ):
            yield
        if self._calls != len(self.applied):
            raise StepRefused(
                f"train_step applies gradients {len(self.applied)} times for the first micro-batch and "
                f"{self._calls} times for another"
            )

    def add_copied(self, number: int, grads: Sequence[Sequence[Any]], call: int = 0) -> None:
        """Add the gradients of each call of an optimizer, from ``call`` on, in a copied micro-batch."""
        for applied, copied in zip(self.applied[call:], grads, strict=True):
            self._add_all(number, applied, copied)

    def _collect(self, update: Update) -> Any:
        if self._applying:
            return update.proceed(update.grads)
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise StepRefused(_IN_A_GRAPH_OF_ITS_OWN)
        begin, call = ops_so_far(), self._calls
        self._calls += 1
        counted = self._scaled.counts(update.grads)
        replay = Replay(self._taped, update.grads) if len(self.weights) > 1 else None
        given = update.grads if replay is None else replay.collected
        terms = [terms_of(grad) if counted else [grad] for grad in given]
        counts, grads = [len(each) for each in terms], [term for each in terms for term in each]
        if self._number == 0:
            twice = any(update.optimizer is before.update.optimizer for before in self.applied)
            if twice and not self._in_turns:
                raise TurnsNeeded("train_step applies gradients twice with one optimizer")
            halves = {place for place, grad in enumerate(grads) if counted and is_of_half(grad)}
            self.applied.append(_Applied(update, counts, halves, counted, replay, ops_so_far()))
            if len(self.weights) > 1 and not counted:
                self.notes += by_hand(update.optimizer)
        if call >= len(self.applied) or self.applied[call].terms != counts:
            raise StepRefused("train_step applies other gradients for a later micro-batch than for the first")
        self._add_all(self._number, self.applied[call], grads)
        self.given.append(Given(grads, range(begin, ops_so_far())))
        return self.on_given()

    def _add_all(self, number: int, applied: _Applied, grads: Sequence[Any]) -> None:
        part = applied.parts.setdefault(self._replicas[number], _Part())
        weight = 1.0 if applied.counted else self.weights[number]
        for place, grad in enumerate(grads):
            weighted = None if grad is None else times(grad, weight)
            if isinstance(weighted, tf.IndexedSlices):
                self._add_slices(part, place, weighted)
            elif weighted is not None:
                add_to(part.sums, place, weighted)

    def _add_slices(self, into: _Part, place: int, slices: Any) -> None:
        """Add up the slices whose rows are the same as before; append the others."""
        rows = fixed_rows(slices.indices, self._open_rows)
        added = into.slices.setdefault(place, [])
        before = into.fixed_rows.get(place)
        if rows is not None and before is not None and np.array_equal(rows, before):
            with tf.name_scope("sum"), func_graphs.marked_sums():
                total = added[0].values + slices.values
            added[0] = tf.IndexedSlices(total, added[0].indices, slices.dense_shape)
            return
        if rows is not None and not added:
            into.fixed_rows[place] = rows
        # PlaceholderWithDefault keeps these rows to this micro-batch: graph optimizers join equal constants.
        # It also hides how many rows there are: for a fixed batch they would make one constant as long as all
        # micro-batches together, which does not fit a micro-batch that is looked at alone.
        own = tf.raw_ops.PlaceholderWithDefault(input=slices.indices, shape=[None])
        added.append(tf.IndexedSlices(slices.values, own, slices.dense_shape))

    def apply(self, call: int = 0) -> None:
        """Hand the sums to the optimizers, from this call on, in the order of the first micro-batch."""
        self._applying = True
        for applied in self.applied[call:]:
            grads, update = self._totals(applied), applied.update
            if applied.replay is not None:
                grads = applied.replay.of_batch(grads)
            begin = ops_so_far()
            with keras_variables.reads_on_own_device():
                variables = update.variables if update.explicit else None
                keras_compiled.update(update.optimizer, grads, variables)
            if len(self.weights) > 1:
                refuse_settings(update.optimizer, grads, begin)
        self._applying = False

    def _totals(self, applied: _Applied) -> list[Any]:
        totals, places = [], itertools.count()
        for number, count in enumerate(applied.terms):
            terms = [self._total(applied, next(places), number) for _ in range(count)]
            totals.append(terms[0] if count == 1 else tf.add_n(terms))
        return totals

    def _total(self, applied: _Applied, place: int, number: int) -> Any:
        """Return the sum of the term at ``place``, which belongs to the collected gradient ``number``."""
        parts = [part for _, part in sorted(applied.parts.items())]
        sums = [part.sums[place] for part in parts if place in part.sums]
        slices = [each for part in parts for each in part.slices.get(place, ())]
        place_of = range(len(applied.terms)) if applied.replay is None else applied.replay.places
        variable = applied.update.variables[place_of[number]]
        total = added_up(sums, keras_variables.value_of(variable).device) if sums else None
        if slices:
            rows = _joined(slices)  # dense for some micro-batches, slices for others
            total = rows if total is None else tf.convert_to_tensor(rows) + total
        if total is None:
            return None
        total = times(total, 1.0 if applied.counted else self.scale)
        # The sum is rounded to what one float16 number can hold: infinite if it overflows.
        return tf.cast(tf.cast(total, tf.float16), total.dtype) if place in applied.halves else total


def add_to(sums: dict[int, Any], key: int, value: object) -> None:
    """Add a value to the sum of that key, by an op that passes recognize; the first value is the sum."""
    if key not in sums:
        sums[key] = value
        return
    with tf.name_scope("sum"), func_graphs.marked_sums():
        sums[key] = sums[key] + value


def added_up(sums: Sequence[Any], device: str) -> Any:
    """Return the sums of all replicas added up, in order, on the variable's device."""
    total = sums[0]
    if len(sums) > 1:
        with tf.device(device), tf.name_scope("total"), func_graphs.marked_sums():
            for part in sums[1:]:
                total = total + part
    return total


def _joined(slices: Sequence[Any]) -> Any:
    if len(slices) == 1:
        return slices[0]
    with tf.name_scope("sum"), func_graphs.marked_sums():
        values = tf.concat([part.values for part in slices], 0)
        indices = tf.concat([part.indices for part in slices], 0)
        # Each row occurs once in a micro-batch, whatever the data are, and so it would in the batch: Keras'
        # optimizers square and clip slice by slice, although the sum over a row's occurrences is meant.
        if all(behind(part.indices, _SAME_ROWS).op.type in _ROWS_ONCE for part in slices):
            indices, places = tf.unique(indices, indices.dtype)
            values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)


class RowsNeeded(Exception):
    """The step has to be traced with the number of rows in its batch."""


def fixed_rows(indices: Any, open_rows: bool = False) -> np.ndarray | None:
    """Return the rows that an embedding reads if constants and known shapes give them (positions); else None.

    Keras 3's Adam squares each slice of a sparse gradient by itself: a row that is in every micro-batch must
    occur once with a sum, as in an unsplit step.  Raises RowsNeeded if known rows might tell.
    """
    ops, name = dict[str, Any](), indices.op.name
    for tensor in upstream([indices], lambda tensor: tensor.op.type == "Shape"):
        op = ops[tensor.op.name] = tensor.op
        called = any(value.HasField("func") or value.list.func for value in op.node_def.attr.values())
        fed = op.type.startswith("Placeholder")
        if op.control_inputs or op.op_def.is_stateful or called or fed:
            return None
        if len(ops) > _MOST_OPS:
            if open_rows:
                raise RowsNeeded(f"{name} is computed by more ops than there may be with known rows")
            return None
    if not all(op.type != "Shape" or op.inputs[0].shape.is_fully_defined() for op in ops.values()):
        if open_rows:
            raise RowsNeeded(f"which rows {name} reads may depend on how many a batch has")
        return None
    with tf.Graph().as_default() as graph:
        graph_def = graph.as_graph_def()
        graph_def.node.extend(map(_evaluable, ops.values()))
        (inside,) = tf.import_graph_def(graph_def, return_elements=[indices.name], name="")
        config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            rows = session.run(inside)
    return rows if len(np.unique(rows)) == rows.size else None


def _evaluable(op: tf.Operation) -> node_def_pb2.NodeDef:
    """Return the op without its device; a known shape becomes a constant."""
    node = node_def_pb2.NodeDef()
    node.CopyFrom(op.node_def)
    if op.type == "Shape":
        dtype, shape = op.outputs[0].dtype, op.inputs[0].shape.as_list()
        node = node_def_pb2.NodeDef(name=op.name, op="Const")
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(shape, dtype))
    node.device = ""
    node.attr.pop("_class", None)  # stands beside an op that is not here
    return node
