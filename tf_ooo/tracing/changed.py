"""Checks what a ``train_step`` does with gradients between its tape and the optimizer, and whose they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_ooo.compat import func_graphs
from tf_ooo.tracing.intercepting import ops_so_far, tensors_of, values_of
from tf_ooo.tracing.micro_batches import StepRefused

# These make of the micro-batches' mean gradient the mean of what they make of each.
_LINEAR = {
    "AddN", "AddV2", "BroadcastTo", "Cast", "CheckNumerics", "ConcatV2", "ExpandDims", "GatherV2",
    "Identity", "IdentityN", "Mean", "Neg", "Pack", "Pad", "Reshape", "Slice", "Split", "SplitV",
    "Squeeze", "StridedSlice", "Sub", "Sum", "Tile", "Transpose", "Unpack", "UnsortedSegmentSum",
    "ZerosLike",
}  # fmt: skip
# Linear in one input, where the others are no gradients; the second of these divides.
_LINEAR_IN_ONE = {"BatchMatMulV2", "Einsum", "MatMul", "Mul", "MulNoNan", "SelectV2"}
_DIVISIONS = {"DivNoNan", "RealDiv"}
# These know how large a batch is, not what is in it.
_SIZES = {"Rank", "Shape", "ShapeN", "Size"}
_WRITES = ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp")
_RANDOM = ("Random", "StatelessRandom", "Multinomial", "StatelessTruncated", "TruncatedNormal")


class Taped:
    """Notes what ``tf.GradientTape.gradient`` was asked for, and has given, inside of :meth:`noted`.

    ``began_at``: how many ops the graph had when it was asked first; None before.  ``names``: what users call
    variables, by their handles' ``id``.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self._names = names or {}
        self.began_at: int | None = None
        self._targets: list[Any] = []  # of each call
        # By id: the tensor, held so that no other gets it; its call.
        self._given: dict[int, tuple[Any, int]] = {}
        self._of_rows: set[int] = set()  # of these, the numbers of an embedding's rows
        self._of_data: set[int] = set()  # and gradients of tensors, as of a batch's inputs

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        gradient = tf.GradientTape.gradient

        @functools.wraps(gradient)
        def noting(tape: object, target: object, sources: object, *args: Any, **kwargs: Any) -> Any:
            self.began_at = ops_so_far() if self.began_at is None else self.began_at
            grads = gradient(tape, target, sources, *args, **kwargs)
            flat = (tf.nest.flatten(each, expand_composites=False) for each in (sources, grads))
            for source, grad in zip(*flat, strict=True):
                tensor = values_of(grad)
                self._of_data |= {id(tensor)} if isinstance(source, tf.Tensor) else set()
                if tensor is not None:
                    self._given[id(tensor)] = tensor, len(self._targets)
                    self._of_rows |= set() if tensor is grad else {id(tensor)}
            self._targets.append(target)
            return grads

        tf.GradientTape.gradient = noting
        try:
            yield
        finally:
            tf.GradientTape.gradient = gradient

    def gave(self, tensor: tf.Tensor) -> bool:
        """Return whether a tape has given the tensor, as a gradient or as one's numbers."""
        return id(tensor) in self._given

    def gave_whole(self, tensor: tf.Tensor) -> bool:
        """Return whether it is the dense gradient of a weight, which parts of a batch add up."""
        return self.gave(tensor) and id(tensor) not in self._of_rows | self._of_data

    def gave_rows(self, tensor: tf.Tensor) -> bool:
        """Return whether it is the numbers of an embedding's rows: each part of a batch has other rows."""
        return id(tensor) in self._of_rows

    def losses_of(self, grads: Sequence[Any]) -> list[Any]:
        """The targets of the calls that these gradients come from, none twice."""
        calls, seen = set(), set()
        waiting = [tensor for tensor in map(values_of, grads) if tensor is not None]
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in self._given:
                calls.add(self._given[id(tensor)][1])
            elif id(tensor) not in seen:
                seen.add(id(tensor))
                waiting.extend(tensor.op.inputs)
        targets = tf.nest.flatten([self._targets[call] for call in sorted(calls)])
        return [target for target in targets if tf.is_tensor(target)]

    def changed_by(self, grads: Sequence[Any]) -> Any:
        """The op between a tape and these gradients that is not the same for parts of a batch; or None.

        Gradients that no tape seems to have given tell nothing.
        """
        reached: dict[int, bool] = {}
        for grad in map(values_of, grads):
            if grad is not None and hasattr(grad, "op"):
                op = self._first_of(grad, reached)
                if op is not None:
                    return op
        return None

    def kept_in(self, grads: Sequence[Any]) -> str:
        """The name of the variable that adds up gradients of this tape and gives these; or ""."""
        reached: dict[int, bool] = {}
        seen, waiting = set(), [grad for grad in map(values_of, grads) if hasattr(grad, "op")]
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen or id(tensor) in self._given:
                continue
            seen.add(id(tensor))
            waiting.extend(tensor.op.inputs)
            if tensor.dtype == tf.resource and any(
                op.type in _WRITES and self.reaches(op.inputs[1], reached) for op in tensor.consumers()
            ):
                outside = func_graphs.captured_by(tensor.graph).get(id(tensor))
                return self._names.get(id(outside)) or str(tensor.op.name)
        return ""

    def moved_by(self, grads: Sequence[Any]) -> str:
        """The op that changes, by a gradient, a variable that these gradients are computed from; or ""."""
        reached: dict[int, bool] = {}
        seen, waiting = set(), [grad for grad in map(values_of, grads) if hasattr(grad, "op")]
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            waiting.extend(tensor.op.inputs)
            for op in tensor.consumers() if tensor.dtype == tf.resource else ():
                if op.type in _WRITES and self.reaches(op.inputs[1], reached):
                    return str(op.name)
        return ""

    def _first_of(self, grad: tf.Tensor | tf.IndexedSlices, reached: dict[int, bool]) -> Any:
        seen, waiting = set(), [grad]
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen or not self.reaches(tensor, reached) or id(tensor) in self._given:
                continue
            seen.add(id(tensor))
            if not self._passes(tensor.op, reached):
                return tensor.op
            waiting.extend(tensor.op.inputs)
        return None

    def _passes(self, op: tf.Operation, reached: dict[int, bool]) -> bool:
        """Return whether the op makes of gradients' mean the mean of what it makes of each."""
        of_tape = [self.reaches(tensor, reached) for tensor in op.inputs]
        if op.type in _DIVISIONS:
            linear = not of_tape[1]
        elif op.type in _LINEAR_IN_ONE:
            linear = sum(of_tape) == 1
        else:
            linear = op.type in _LINEAR
        factors = [tensor for tensor, is_of_tape in zip(op.inputs, of_tape, strict=True) if not is_of_tape]
        return linear and not any(map(is_of_batch, factors))

    def reaches(self, tensor: tf.Tensor, reached: dict[int, bool]) -> bool:
        """Return whether it is computed from a tape's gradient; ``reached`` keeps what was asked before."""
        waiting = [tensor]
        while waiting:
            here = waiting[-1]
            if id(here) in reached:
                waiting.pop()
                continue
            if id(here) in self._given:
                reached[id(here)] = True
                continue
            unknown = [before for before in here.op.inputs if id(before) not in reached]
            if unknown:
                waiting.extend(unknown)
            else:
                reached[id(here)] = any(reached[id(before)] for before in here.op.inputs)
        return reached[id(tensor)]


def refuse_kept(taped: Taped, grads: Sequence[Any]) -> None:
    """StepRefused: ``train_step`` adds up gradients of several steps."""
    variable = taped.kept_in(grads)
    if variable:
        raise StepRefused(
            f"train_step adds up gradients of several steps by hand, in a variable of its own ({variable}); "
            "a pipeline would add to it once for each micro-batch: give the optimizer "
            "gradient_accumulation_steps=, or use microbatches=1"
        )


def refused_change(op: tf.Operation) -> StepRefused:
    """Return the error for an op between tape and optimizer that parts of a batch do otherwise."""
    did = "changes gradients between its tape and the optimizer"
    if op.type in _LINEAR_IN_ONE | _DIVISIONS:
        did += ", or multiplies gradients by a number of the batch"
    return StepRefused(
        f"train_step {did} ({op.type}, op {op.name}) by more than gradients, weights and constants, or of an "
        "embedding's rows; a pipeline would do that to the gradients of each micro-batch, not to the "
        "batch's: give the optimizer clipnorm=, global_clipnorm= or clipvalue=, which act once, or use "
        "microbatches=1"
    )


def refuse_moved(taped: Taped, grads: Sequence[Any]) -> None:
    """StepRefused: ``train_step`` computes these gradients at weights that another gradient has moved.

    In a step that takes turns an optimizer moves them so as well, and that is no reason.
    """
    moved = taped.moved_by(grads)
    if moved:
        raise StepRefused(
            "train_step moves weights by a gradient and computes another one there, as SAM does "
            f"(op {moved}); a pipeline would move them by each micro-batch's gradient, not by the batch's: "
            "use microbatches=1"
        )


def refuse_settings(optimizer: Any, grads: Sequence[Any], begin: int) -> None:
    """StepRefused: the ops of an update, from number ``begin``, read more of the batch than its gradients.

    ``train_step`` has set the optimizer's momentum, decay or another number by what it computes.
    """
    given = {id(tensor) for grad in grads for tensor in tensors_of(grad)}
    update = tf.compat.v1.get_default_graph().get_operations()[begin:]
    inside = {id(op) for op in update}
    read = {id(tensor): tensor for op in update for tensor in op.inputs if id(tensor.op) not in inside}
    for tensor in (read[number] for number in read if number not in given):
        if is_of_batch(tensor):
            raise StepRefused(
                f"train_step sets a number of optimizer {optimizer.name!r} by what it computes of the batch "
                f"(op {tensor.op.name}); each micro-batch would set another one, by its own rows: do so in a "
                "callback's on_train_batch_end, whose logs are the whole batch's, or use microbatches=1"
            )


def is_of_batch(tensor: tf.Tensor) -> bool:
    """Return whether it is computed from a batch, or drawn at random: each micro-batch has another."""
    captured = func_graphs.captured_by(tensor.graph)
    seen, waiting = set(), [tensor.op]
    while waiting:
        op = waiting.pop()
        fed = op.type == "Placeholder" and id(op.outputs[0]) not in captured
        if fed or op.type.startswith(_RANDOM):
            return True
        if id(op) not in seen and op.type not in _SIZES:
            seen.add(id(op))
            waiting.extend(before.op for before in op.inputs)
    return False
