"""Stands between a step's gradients and its optimizers: scales losses for float16, slices large gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.compat import func_graphs, keras_compiled, keras_layers, tf_functions
from tf_ooo.errors import BackendError
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.tracing.micro_batches import StepRefused, computed_from

if TYPE_CHECKING:
    import keras

Named = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Update:
    """Describes one call of an optimizer's ``apply``; ``explicit``: the caller named the variables.

    ``grads`` holds one per variable, or None.  ``proceed`` applies other gradients in the same way.
    """

    optimizer: keras.optimizers.Optimizer
    grads: list[Any]
    variables: list[Any]
    explicit: bool
    proceed: Callable[[Sequence[Any]], Any]


class TurnsNeeded(Exception):
    """The updates of a step come in turns: each needs the result of the one before."""


class CopiesNeeded(Exception):
    """States change once a step, so that all micro-batches have to be copies of one."""


@contextlib.contextmanager
def intercepted(optimizers: Sequence[Any], on_update: Callable[[Update], Any]) -> Iterator[None]:
    """Call ``on_update`` in place of each optimizer's ``apply`` inside the block.

    Calls that an update makes while it proceeds are left alone: loss-scaling optimizers call another.
    """
    proceeding = False

    def instead_of(optimizer: keras.optimizers.Optimizer, apply: Callable[..., Any]) -> Callable[..., Any]:
        @tf_functions.left_as_written
        def intercepted_apply(grads: Any, trainable_variables: Any = None) -> Any:
            as_called = tf_functions.as_in_the_caller(apply)
            if proceeding:
                return as_called(grads, trainable_variables)
            explicit = trainable_variables is not None
            variables = keras_compiled.variables_to_apply(optimizer, trainable_variables)

            def proceed(changed: Sequence[Any]) -> Any:
                nonlocal proceeding
                proceeding = True
                try:
                    return as_called(changed, variables if explicit else None)
                finally:
                    proceeding = False

            return on_update(Update(optimizer, list(grads), variables, explicit, proceed))

        return intercepted_apply

    for optimizer in optimizers:
        keras_compiled.shadow_update(optimizer, functools.partial(instead_of, optimizer))
    try:
        yield
    finally:
        for optimizer in optimizers:
            keras_compiled.unshadow_update(optimizer)


def refuse_twice(optimizer: keras.optimizers.Optimizer, applied: Iterable[Any], instead: str) -> None:
    """Raise BackendError if the optimizer has already applied gradients in this step."""
    if any(before is optimizer for before in applied):
        raise BackendError(f"train_step applies gradients twice with one optimizer; {instead}")


def ops_so_far() -> int:
    """Count the ops of the graph that is being traced."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def values_of(gradient: tf.Tensor | tf.IndexedSlices) -> Any:
    """Return the numbers of a gradient; for an embedding's the numbers of its rows. None stays None."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def tensors_of(grad: tf.Tensor | tf.IndexedSlices) -> list[Any]:
    """Return the tensors of a gradient: values and rows of IndexedSlices; nothing for None."""
    if grad is None:
        return []
    return [grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad]


def times(grad: tf.Tensor | tf.IndexedSlices, factor: object) -> Any:
    """Return ``grad * factor`` (for slices: of their values); the gradient itself if ``factor`` is 1."""
    if isinstance(factor, float) and factor == 1.0:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(times(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


# Handles losses that an optimizer scales for float16, so that micro-batches overflow where the whole batch
# would. The mean over a micro-batch's rows has larger gradients per row than the mean over the batch's. They
# are multiplied by the micro-batch's share of the rows where the backward pass begins, not where it ends, so
# that all float16 numbers in between are stock's (Micikevicius et al. 2018, section 3.2).

_SUMS = ("AddN", "AddV2")


class Scaled:
    """Holds a micro-batch's scaled losses, whose gradients already count its ``share`` of the batch's rows.

    With ``share`` 1 nothing is changed.
    """

    def __init__(self, share: object = 1.0) -> None:
        self._share = share
        self._begins: list[Any] = []  # the first gradient of each scaled loss

    @contextlib.contextmanager
    def noted(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Make the gradients of losses that these optimizers scale count their share, inside the block."""
        with contextlib.ExitStack() as shadows:
            for optimizer in () if isinstance(self._share, float) and self._share == 1.0 else optimizers:
                method = keras_compiled.loss_scaling(optimizer)
                if method:
                    instead = self._instead_of(getattr(optimizer, method))
                    shadows.enter_context(keras_layers.shadowed(optimizer, method, instead))
            yield

    def _instead_of(self, scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(loss: object) -> Any:
            return tf.identity(loss), self._begin

        def scale_and_count(loss: object) -> Any:
            if callable(loss):  # Keras 2 returns another function then
                return lambda: scale_and_count(loss())
            return scale(tf.custom_gradient(counted)(tf.convert_to_tensor(loss)))

        return scale_and_count

    def _begin(self, upstream: Any) -> Any:
        """Multiply the gradient of a scaled loss by its share; the loss stays, since it may be logged."""
        self._begins.append(upstream * tf.cast(self._share, upstream.dtype))
        return self._begins[-1]

    def counts(self, grads: Sequence[Any]) -> bool:
        """Return whether these gradients are of scaled losses; StepRefused if only some of them are."""
        begins = {id(tensor) for tensor in self._begins}
        of_scaled = [begins and computed_from(values_of(grad), begins) for grad in grads if grad is not None]
        if any(of_scaled) and not all(of_scaled):
            raise StepRefused(
                "train_step gives an optimizer gradients of a loss that scale_loss has scaled, and of one "
                "that it has not; a pipeline weighs micro-batches before the one and behind the other: "
                "scale all losses, or use microbatches=1"
            )
        return any(of_scaled)


def by_hand(optimizer: Any) -> list[str]:
    """Say what changes if an optimizer that scales losses was given gradients of unscaled ones."""
    method = keras_compiled.loss_scaling(optimizer)
    if not method:
        return []
    return [
        f"train_step does not scale its loss by {method} of optimizer {optimizer.name!r}: float16 gradients "
        "of a micro-batch are as many times larger than the batch's as there are micro-batches, so that "
        f"updates may be skipped where stock applies them; scale by {method}, or use microbatches=1"
    ]


def terms_of(grad: tf.Tensor | tf.IndexedSlices) -> list[Any]:
    """Return the terms of a float32 gradient if one of them was float16; else the gradient itself."""
    terms, waiting = [], [grad]
    while waiting:
        tensor = waiting.pop()
        if isinstance(tensor, tf.Tensor) and tensor.op.type in _SUMS:
            waiting.extend(reversed(tensor.op.inputs))
        else:
            terms.append(tensor)
    return terms if any(map(is_of_half, terms)) else [grad]


def is_of_half(tensor: tf.Tensor) -> bool:
    """Return whether a tensor holds float16 numbers in a wider type."""
    return (
        isinstance(tensor, tf.Tensor) and tensor.op.type == "Cast" and tensor.op.inputs[0].dtype == tf.float16
    )


class GradientSlices:
    """Tells into how many slices each gradient is cut; every element is added up as without slices.

    ``sizes`` in bytes of what may be cut, by name, are filled in during a trace; ``counts`` are of slices.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.counts: Mapping[str, int] = {}

    def wrap(self, step: Callable[[Any], Any], counts: Mapping[str, int]) -> Callable[[Any], Any]:
        def sliced(data: object) -> Any:
            kept, self.counts = self.counts, counts
            try:
                return step(data)
            finally:
                self.counts = kept

        return sliced

    def allreduce(self, named: Named, reduce: Callable[[Named], list[Any]], may_slice: bool) -> list[Any]:
        """Apply ``reduce`` to all (name, gradient), slice by slice if a gradient is to be cut.

        ``may_slice``: the elements of a gradient are reduced one by one.
        """
        out = []
        for name, gradient in named:
            whole = not may_slice or isinstance(gradient, tf.IndexedSlices)
            elements = 0 if whole else gradient.shape.num_elements() or 0  # 0 also if it is open
            if elements:
                self.sizes[name] = elements * gradient.dtype.size
            count = min(self.counts.get(name, 1), elements)
            with func_graphs.named_message(name):
                cut = count > 1
                out += [_in_slices(name, gradient, count, reduce)] if cut else reduce([(name, gradient)])
        return out


def _in_slices(name: str, gradient: tf.Tensor, count: int, reduce: Callable[[Named], list[Any]]) -> Any:
    elements = gradient.shape.num_elements()
    ends = [elements * (number + 1) // count for number in range(count)]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    parts = []
    for number, part in enumerate(tf.split(tf.reshape(gradient, [-1]), sizes)):
        with func_graphs.numbered_part(number):
            parts += reduce([(f"{name}_part_{number}", part)])
    return tf.reshape(tf.concat(parts, 0), gradient.shape)


def counts_for(schedule: Schedule, graph: TrainingGraph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return slices by communication: a layer's larger gradients get as many as the layer has parts."""
    counts: dict[str, int] = {}
    for (kind, layer), shares in schedule.parts.items():
        if kind != "comm":
            continue
        names = {op.rsplit("/", 1)[-1] for op in graph.layers[layer].communication_ops} & sizes.keys()
        whole = sum(sizes[name] for name in names)
        counts |= {name: len(shares) for name in sorted(names) if sizes[name] * len(shares) > whole}
    return counts


def parts_of(graph_def: graph_pb2.GraphDef) -> dict[str, int]:
    """Return the slice of each communication, by the name of its op."""
    return {
        node.name: int(node.attr[func_graphs.PART_ATTR].i)
        for node in graph_def.node
        if func_graphs.PART_ATTR in node.attr
    }
