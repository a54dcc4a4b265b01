"""States that follow weights and no data: they change once a step, not with each micro-batch.

Spectral normalization assigns a kernel and the vector of its power iteration in the forward pass (Miyato et
al. 2018, algorithm 1); a layer may count its calls, and ``train_step`` let its learning rate fall.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import tensorflow as tf

from tf_ooo.compat import func_graphs
from tf_ooo.tracing.assigned import Assigned
from tf_ooo.tracing.of_data import DRAWN, OfData, rows_of_part
from tf_ooo.tracing.variables import names_by_handle

if TYPE_CHECKING:
    import keras


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ranges from each op's number up to the next."""
    return [(number, number + 1) for number in sorted(numbers)]


def changed_once(model: keras.Model, part: object, begin: int, each: Collection[str] = ()) -> set[int]:
    """The ops that assign states and depend on no data, and what was computed from these before, by number.

    The first micro-batch runs them for all.  ``part``: its rows; ``begin``: its first op.  Left out are the
    states that ``each`` micro-batch is known to change.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    of_data, writes, rows = OfData(part), _written(model, begin), rows_of_part(part)
    weights = names_by_handle(model.weights).keys()
    by_each = {n for n in writes if operations[n] in of_data or not set(writes[n].values()).isdisjoint(each)}
    # Additions to weights are known already.
    added = {n for n in writes if writes[n].keys().isdisjoint(weights) and _may_add_rows(operations[n], rows)}
    mixed = _all_with(by_each | added, writes)
    last = {handle: number for number in writes if number not in mixed for handle in writes[number]}
    shared = set(writes) - mixed
    inside = {id(operations[number]) for number in shared}
    for number, op in enumerate(operations[begin:], begin):
        reads = op.type == "ReadVariableOp" and number < last.get(id(op.inputs[0]), -1)
        if reads or (op not in of_data and any(id(tensor.op) in inside for tensor in op.inputs)):
            inside.add(id(op))
            shared.add(number)
    return shared


def _all_with(numbers: set[int], writes: dict[int, dict[int, str]]) -> set[int]:
    """These ops, and all that assign a variable which one of them assigns."""
    while True:
        handles = {handle for number in numbers for handle in writes[number]}
        more = {number for number, written in writes.items() if handles & written.keys()}
        if more == numbers:
            return numbers
        numbers = more


def changed_by_each(model: keras.Model, begin: int, once: Collection[int]) -> list[str]:
    """Return names of states that each micro-batch assigns by ops from this number on, but those ``once``."""
    writes = _written(model, begin)
    names = (name for number, written in writes.items() if number not in once for name in written.values())
    return list(dict.fromkeys(names))


def first_drawn() -> str:
    """Return the name of the first op of the trace so far that draws random numbers; empty: there is none."""
    graph = tf.compat.v1.get_default_graph()
    return next((name for name, kind in func_graphs.ops_reached_from(graph) if DRAWN.search(kind)), "")


def _written(model: keras.Model, begin: int) -> dict[int, dict[int, str]]:
    """Return the states that ops assign, names by handle, by the ops' numbers from ``begin``."""
    assigned, operations = Assigned(model), tf.compat.v1.get_default_graph().get_operations()
    written = ((number, assigned.written_by(op)) for number, op in enumerate(operations[begin:], begin))
    return {number: names for number, names in written if names}


def _may_add_rows(op: tf.Operation, rows: int | None) -> bool:
    """Return whether it adds a constant that a trace with known rows may have made of their number."""
    if op.type not in ("AssignAddVariableOp", "AssignSubVariableOp"):
        return False
    value = tf.get_static_value(op.inputs[1])
    return value is not None and rows not in (None, 1) and bool((abs(value) == rows).any())
