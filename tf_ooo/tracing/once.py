"""States that follow weights and no data: they change once a step, not with each micro-batch.

Spectral normalization assigns a kernel and the vector of its power iteration in the forward pass (Miyato et
al. 2018, algorithm 1); a layer may count its calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import func_graphs, keras_layers, keras_variables
from tf_ooo.tracing.adding import feeds_random_numbers
from tf_ooo.tracing.of_data import DRAWN, OfData
from tf_ooo.tracing.variables import names_by_handle

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Once:
    """Ops, by number in the graph, that the first micro-batch runs for all, and weights that they assign."""

    ops: tuple[int, ...] = ()
    names: frozenset[str] = frozenset()

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """From each op up to the next."""
        return [(number, number + 1) for number in self.ops]


def changed_once(model: keras.Model, part: Any, begin: int, each: Collection[str] = ()) -> Once:
    """The assignments of weights that depend on no data, and what was computed from these weights before.

    ``part``: the rows of the micro-batch whose ops, from number ``begin``, were traced.  Batch
    normalization's states are left out, seeds, and weights that ``each`` micro-batch is known to change.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    of_data = OfData(part)
    names = _weights_by_handle(model)
    assigns = _assigned(operations, names, begin)
    mixed = {
        handle
        for number, handle in assigns.items()
        if names[handle] in each
        or operations[number] in of_data
        or feeds_random_numbers(operations[number].inputs[0])
    }
    last = {handle: number for number, handle in assigns.items() if handle not in mixed}
    shared = {number for number, handle in assigns.items() if handle in last}
    inside = {id(operations[number]) for number in shared}
    for number, op in _from(operations, begin):
        reads = op.type == "ReadVariableOp" and number < last.get(id(op.inputs[0]), -1)
        if reads or (op not in of_data and any(id(tensor.op) in inside for tensor in op.inputs)):
            inside.add(id(op))
            shared.add(number)
    return Once(tuple(sorted(shared)), frozenset(names[handle] for handle in last))


def changed_by_each(model: keras.Model, once: Once) -> list[str]:
    """Names of the weights that each micro-batch assigns in the trace so far, also in functions it calls."""
    written = func_graphs.written_by(tf.compat.v1.get_default_graph())
    paths = [keras_variables.path_of(v) for v in model.weights if id(keras_variables.handle_of(v)) in written]
    return [path for path in dict.fromkeys(paths) if path not in once.names]


def first_drawn() -> str:
    """The name of the first op of the trace so far that draws random numbers; empty: there is none."""
    graph = tf.compat.v1.get_default_graph()
    return next((name for name, kind in func_graphs.ops_reached_from(graph) if DRAWN.search(kind)), "")


def _assigned(operations: Any, names: dict[int, str], begin: int) -> dict[int, int]:
    """The handles of weights that ops assign, by the ops' numbers from ``begin``."""
    return {
        number: id(op.inputs[0])
        for number, op in _from(operations, begin)
        if op.type.startswith("Assign") and op.inputs and id(op.inputs[0]) in names
    }


def _weights_by_handle(model: keras.Model) -> dict[int, str]:
    known = keras_layers.batch_normalizations(model)
    named = names_by_handle(model.weights).items()
    return {handle: name for handle, name in named if not any(name.startswith(f"{t}/") for t in known)}


def _from(operations: Any, begin: int) -> Iterator[tuple[int, Any]]:
    return enumerate(operations[begin:], begin)
