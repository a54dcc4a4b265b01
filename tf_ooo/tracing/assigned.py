"""The variables that a step assigns by ops of its graph, beside its updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from tf_ooo.compat import func_graphs, keras_optimizers
from tf_ooo.tracing.adding import feeds_random_numbers
from tf_ooo.tracing.held import names_of_held
from tf_ooo.tracing.micro_batches import StepRefused
from tf_ooo.tracing.of_data import OfData
from tf_ooo.tracing.optimizers import optimizers_of
from tf_ooo.tracing.variables import all_variables, names_by_handle

if TYPE_CHECKING:
    import keras


class Assigned:
    """Weights, optimizers' variables, and variables that Keras does not know, by their handles' ``id``.

    Left out are the states that each micro-batch changes by intent: metrics and seeds.
    """

    def __init__(self, model: keras.Model) -> None:
        graph = tf.compat.v1.get_default_graph()
        weights = names_by_handle(model.weights)
        states = [state for each in optimizers_of(model) for state in keras_optimizers.state_of(each)]
        self.of_optimizers = names_by_handle(states)
        held, captured = names_of_held(model), func_graphs.captured_by(graph)
        own = {inside: held[id(outside)] for inside, outside in captured.items() if id(outside) in held}
        self._names = {**own, **weights, **self.of_optimizers}
        known = names_by_handle(all_variables(model)).keys()
        self._left_out = known - weights.keys() - self.of_optimizers.keys()

    def written_by(self, op: tf.Operation) -> dict[int, str]:
        """Return the names of those that an op, or a function that it calls, assigns."""
        return {
            id(tensor): self._names.get(id(tensor), f"a variable of its own (op {op.name})")
            for tensor in func_graphs.written_by_op(op)
            if id(tensor) not in self._left_out and tensor.op.type == "Placeholder"
            if not feeds_random_numbers(tensor)
        }


def refuse_rates(model: keras.Model, part: object, begin: int) -> None:
    """StepRefused: an op, from this number on, assigns an optimizer's variable by what it computes of data.

    ``part``: the rows of the micro-batch.
    """
    assigned, of_data = Assigned(model), OfData(part)
    for op in tf.compat.v1.get_default_graph().get_operations()[begin:]:
        written = assigned.written_by(op)
        names = [name for handle, name in written.items() if handle in assigned.of_optimizers]
        if names and op in of_data:
            raise StepRefused(
                f"train_step assigns {names[0]}, of an optimizer, by what it computes from the batch (op "
                f"{op.name}); each micro-batch would assign another value, by its own rows: do so in a "
                "callback's on_train_batch_end, whose logs are the whole batch's, or use microbatches=1"
            )
