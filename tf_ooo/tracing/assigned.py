"""Finds the variables that ops of a train step use outside of its updates, and their names.

States that follow weights, but no data, change once a step, not with each micro-batch.  Spectral
normalization assigns a kernel and the vector of its power iteration in the forward pass (Miyato et al. 2018,
algorithm 1); a layer may count its calls, and ``train_step`` may lower its learning rate.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.graph.dependencies import reached
from tf_ooo.compat import func_graphs, keras_compiled, keras_layers, keras_variables
from tf_ooo.errors import BackendError
from tf_ooo.tracing.micro_batches import DRAWN, OfData, StepRefused, behind, rows_of_part
from tf_ooo.tracing.variables import all_variables, names_by_handle, optimizers_of

if TYPE_CHECKING:
    import keras

# These ops hand on their input.
_PASSES_ON = ("Cast", "Identity", "Reshape")
_ADDS = ("Add", "AddV2", "Sub")
# These ops only read a variable; _CALLS call a function that may do so.
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_CALLS = ("Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While")


def names_of_held(model: keras.Model) -> dict[int, str]:
    """Return names of variables, all different, by the ``id`` of the variable's handle.

    An attribute is called ``layer.counter``, an item of one ``layer.counters[0]``; what ``train_step`` or a
    ``call`` finds outside of itself keeps its name there.
    """
    names: dict[int, str] = {}
    for name, variable in _held_in(model):
        handle = keras_variables.handle_of(variable)
        taken = sum(name == other.partition("#")[0] for other in names.values())
        names.setdefault(id(handle), f"{name}#{taken}" if taken else name)
    return names


def _held_in(model: keras.Model) -> Iterator[tuple[str, Any]]:
    parts = keras_layers.parts_of(model)
    for part in parts:
        for name, value in keras_layers.named_attributes_of(part).items():
            yield from _variables_in(f"{part.name}.{name}", value)
    for function in (model.train_step, *(part.call for part in parts)):
        for name, value in _found_outside(function).items():
            yield from _variables_in(name, value)


def _found_outside(function: Any) -> Mapping[str, Any]:
    """Return what the function finds in its module and in the functions around it, by name."""
    function = getattr(function, "python_function", function)  # a tf.function wraps one
    try:
        names = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # it is no Python function, or a cell is empty
        return {}
    return {**names.globals, **names.nonlocals}


def _variables_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tf.Variable):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _variables_in(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _variables_in(f"{name}[{number}]", item)


class Writes:
    """Finds what a micro-batch's ops assign, from op number ``begin`` on; ``part`` holds its rows.

    The variables are weights, optimizers' variables, and variables that Keras does not know.  States that
    each micro-batch changes on purpose are left out: metrics and seeds.

    Raises StepRefused if an op assigns to an optimizer's variable a value computed from data.
    """

    def __init__(self, model: keras.Model, part: object, begin: int) -> None:
        graph = tf.compat.v1.get_default_graph()
        self._operations, self._begin = graph.get_operations(), begin
        self._of_data, self._rows = OfData(part), rows_of_part(part)
        weights = names_by_handle(model.weights)
        states = [state for each in optimizers_of(model) for state in keras_compiled.state_of(each)]
        of_optimizers = names_by_handle(states)
        held, captured = names_of_held(model), func_graphs.captured_by(graph)
        own = {inside: held[id(outside)] for inside, outside in captured.items() if id(outside) in held}
        self._weights, self._names = weights.keys(), {**own, **weights, **of_optimizers}
        known = names_by_handle(all_variables(model)).keys()
        self._left_out = known - weights.keys() - of_optimizers.keys()
        self._writes: dict[int, dict[int, str]] = {}  # names by handle, by the ops' numbers
        for number, op in enumerate(self._operations[begin:], begin):
            written = self._written_by(op)
            names = [name for handle, name in written.items() if handle in of_optimizers]
            if names and op in self._of_data:
                raise StepRefused(
                    f"train_step assigns {names[0]}, of an optimizer, by what it computes from the batch (op "
                    f"{op.name}); each micro-batch would assign another value, by its own rows: do so in a "
                    "callback's on_train_batch_end, whose logs are the whole batch's, or use microbatches=1"
                )
            if written:
                self._writes[number] = written

    def _written_by(self, op: tf.Operation) -> dict[int, str]:
        return {
            id(tensor): self._names.get(id(tensor), f"a variable of its own (op {op.name})")
            for tensor in func_graphs.written_by_op(op)
            if id(tensor) not in self._left_out and tensor.op.type == "Placeholder"
            if not feeds_random_numbers(tensor)
        }

    def once(self, each: Collection[str]) -> set[int]:
        """Return the ops that assign states and depend on no data, and the ops computed from these before.

        The first micro-batch runs these ops for all.  States that ``each`` micro-batch changes are left out.
        """
        operations, of_data, writes = self._operations, self._of_data, self._writes
        by_each = {
            number
            for number, names in writes.items()
            if operations[number] in of_data
            or not set(names.values()).isdisjoint(each)
            # Additions to weights are known already.
            or (names.keys().isdisjoint(self._weights) and _may_add_rows(operations[number], self._rows))
        }
        mixed = reached(
            by_each, lambda number: [n for n in writes if writes[n].keys() & writes[number].keys()]
        )
        last = {handle: number for number in writes if number not in mixed for handle in writes[number]}
        shared = set(writes) - mixed
        inside = {id(operations[number]) for number in shared}
        for number, op in enumerate(operations[self._begin :], self._begin):
            reads = op.type == "ReadVariableOp" and number < last.get(id(op.inputs[0]), -1)
            if reads or (op not in of_data and any(id(tensor.op) in inside for tensor in op.inputs)):
                inside.add(id(op))
                shared.add(number)
        return shared

    def by_each(self, once: Collection[int]) -> list[str]:
        """Return the names of what each micro-batch assigns, by ops other than ``once``."""
        return list(
            dict.fromkeys(
                name
                for number, names in self._writes.items()
                if number not in once
                for name in names.values()
            )
        )


def first_drawn() -> str:
    """Return the name of the trace's first op so far that draws random numbers; empty if there is none."""
    graph = tf.compat.v1.get_default_graph()
    return next((name for name, kind in func_graphs.ops_reached_from(graph) if DRAWN.search(kind)), "")


def _may_add_rows(op: tf.Operation, rows: int | None) -> bool:
    """Return whether an op adds a constant that a trace with known rows may have made from their number."""
    if op.type not in ("AssignAddVariableOp", "AssignSubVariableOp"):
        return False
    value = tf.get_static_value(op.inputs[1])
    return value is not None and rows not in (None, 1) and bool((abs(value) == rows).any())


def what_is_added(value: Any, sign: int, handle: tf.Tensor) -> list[Any]:
    """Return what is added to a variable or subtracted; [] if its value is computed in another way.

    ``value`` and ``sign`` are those of an intercepted assignment; ``handle`` is the variable's.
    """
    if sign:
        return [value]
    if value.op.type not in _ADDS:
        return []
    first, second = (behind(tensor, _PASSES_ON) for tensor in value.op.inputs)
    pairs = [(first, second)] if value.op.type == "Sub" else [(first, second), (second, first)]
    return [
        added
        for before, added in pairs
        if before.op.type == "ReadVariableOp" and before.op.inputs[0] is handle
    ]


def feeds_random_numbers(state: Any) -> bool:
    """Return whether random numbers are drawn from whole numbers computed from a tensor or a handle."""
    seen, waiting = set[int](), [] if state is None else [state]
    while waiting:
        for op in waiting.pop().consumers():
            if DRAWN.search(op.type):
                return True
            if id(op) not in seen:
                seen.add(id(op))
                waiting.extend(output for output in op.outputs if output.dtype.is_integer)
    return False


def refuse_reads_after(updates: Iterable[tuple[Sequence[Any], int]]) -> None:
    """Raise BackendError for what :func:`read_after` finds."""
    again = read_after(updates)
    if again:
        raise BackendError(
            f"train_step {again}; over several devices updates come later than in one step, and "
            "so would this one: train such a model on one device"
        )


def read_after(updates: Iterable[tuple[Sequence[Any], int]]) -> str:
    """Name a weight that is read or assigned after its update, and say so; empty if there is none.

    ``updates`` holds, for each update, its variables and the number of ops in the traced graph at that time.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    for variables, begin in updates:
        handles = names_by_handle(variables)
        for op in operations[begin:]:
            given = op.inputs[:1] if op.type in READS else op.inputs if op.type in _CALLS else ()
            uses = {"reads": given, "assigns": list(func_graphs.written_by_op(op))}
            for use, tensors in uses.items():
                names = [handles[id(tensor)] for tensor in tensors if id(tensor) in handles]
                if names:
                    return f"{use} {names[0]} again after it has applied its gradient (op {op.name})"
    return ""
