"""Checks what a ``train_step`` does with gradients between its tape and the optimizer, and to which weights.

Clipping, signs, or a guard against numbers that are not finite, give other results for parts of a batch:
micro-batches add up the tape's gradients, and :class:`Replay` repeats the later ops on the sum.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_ooo.compat import func_graphs
from tf_ooo.tracing.intercepting import ops_so_far, tensors_of, values_of
from tf_ooo.tracing.micro_batches import StepRefused, upstream

# These ops turn the mean of micro-batches' gradients into the mean of their results.
_LINEAR = {
    "AddN", "AddV2", "BroadcastTo", "Cast", "CheckNumerics", "ConcatV2", "ExpandDims", "GatherV2",
    "Identity", "IdentityN", "Mean", "Neg", "Pack", "Pad", "Reshape", "Slice", "Split", "SplitV",
    "Squeeze", "StridedSlice", "Sub", "Sum", "Tile", "Transpose", "Unpack", "UnsortedSegmentSum",
    "ZerosLike",
}  # fmt: skip
# The first are linear in one input if the others are no gradients; divisions only in the first input.
_LINEAR_IN_ONE = {"BatchMatMulV2", "Einsum", "MatMul", "Mul", "MulNoNan", "SelectV2"}
_DIVISIONS = {"DivNoNan", "RealDiv"}
# These ops know how large a batch is, not what is in it.
_SIZES = {"Rank", "Shape", "ShapeN", "Size"}
_WRITES = ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp")
_RANDOM = ("Random", "StatelessRandom", "Multinomial", "StatelessTruncated", "TruncatedNormal")
_CHECKS = "CheckNumerics"  # is stateful only so that it runs


class Taped:
    """Notes what ``tf.GradientTape.gradient`` was asked for and has returned inside of :meth:`noted`.

    ``began_at`` is how many ops the graph had at the first call; None before.  ``names`` are the users' names
    of variables, by their handles' ``id``.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self._names = names or {}
        self.began_at: int | None = None
        self._targets: list[Any] = []  # the targets of each call
        # By id: the tensor, held so that no other gets the same id, and the number of its call.
        self._given: dict[int, tuple[Any, int]] = {}
        # These hold the rows' numbers of an embedding's gradient: each part of a batch has other rows.
        self.of_rows: set[int] = set()
        self._of_data: set[int] = set()  # gradients of tensors, such as a batch's inputs

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
                    self.of_rows |= set() if tensor is grad else {id(tensor)}
            self._targets.append(target)
            return grads

        tf.GradientTape.gradient = noting
        try:
            yield
        finally:
            tf.GradientTape.gradient = gradient

    def gave(self, tensor: tf.Tensor) -> bool:
        """Return whether a tape has returned the tensor, as a gradient or as the numbers of a sparse one."""
        return id(tensor) in self._given

    def gave_whole(self, tensor: tf.Tensor) -> bool:
        """Return whether a tensor is the dense gradient of a weight, which parts of a batch add up."""
        return self.gave(tensor) and id(tensor) not in self.of_rows | self._of_data

    def losses_of(self, grads: Sequence[Any]) -> list[Any]:
        """Return the targets of the tape calls that these gradients come from, each once."""
        tensors = [tensor for tensor in map(values_of, grads) if tensor is not None]
        calls = {self._given[id(each)][1] for each in upstream(tensors, self.gave) if self.gave(each)}
        targets = tf.nest.flatten([self._targets[call] for call in sorted(calls)])
        return [target for target in targets if tf.is_tensor(target)]

    def changed_by(self, grads: Sequence[Any]) -> Any:
        """Return the first op between a tape and these gradients that parts of a batch change, or None.

        Gradients that do not seem to come from a tape tell nothing.
        """
        reached = self.known()

        def ends(tensor: tf.Tensor) -> bool:
            return self.gave(tensor) or not self.reaches(tensor, reached)

        tensors = [grad for grad in map(values_of, grads) if hasattr(grad, "op")]
        between = (tensor.op for tensor in upstream(reversed(tensors), ends) if not ends(tensor))
        return next((op for op in between if not self._passes(op, reached)), None)

    def kept_in(self, grads: Sequence[Any]) -> str:
        """Return the name of the variable that adds up this tape's gradients and returns these; else ""."""
        for handle, _ in self._written(grads, self.gave):
            outside = func_graphs.captured_by(handle.graph).get(id(handle))
            return self._names.get(id(outside)) or str(handle.op.name)
        return ""

    def moved_by(self, grads: Sequence[Any]) -> str:
        """Return the op that writes a gradient to a variable which these gradients depend on; else ""."""
        return next((str(op.name) for _, op in self._written(grads, lambda tensor: False)), "")

    def _written(
        self, grads: Sequence[Any], ends: Callable[[Any], bool]
    ) -> Iterator[tuple[tf.Tensor, tf.Operation]]:
        """Yield handles that gradients are computed from, each with an op that writes a gradient there."""
        reached = self.known()
        tensors = (grad for grad in map(values_of, grads) if hasattr(grad, "op"))
        for handle in (tensor for tensor in upstream(tensors, ends) if tensor.dtype == tf.resource):
            for op in handle.consumers():
                if op.type in _WRITES and self.reaches(op.inputs[1], reached):
                    yield handle, op

    def _passes(self, op: tf.Operation, reached: dict[int, bool]) -> bool:
        """Return whether the op turns the mean of gradients into the mean of its results."""
        of_tape = [self.reaches(tensor, reached) for tensor in op.inputs]
        if op.type in _DIVISIONS:
            linear = not of_tape[1]
        elif op.type in _LINEAR_IN_ONE:
            linear = sum(of_tape) == 1
        else:
            linear = op.type in _LINEAR
        factors = [tensor for tensor, is_of_tape in zip(op.inputs, of_tape, strict=True) if not is_of_tape]
        return linear and not any(map(is_of_batch, factors))

    def known(self) -> dict[int, bool]:
        """Return the tensors with which :meth:`reaches` begins."""
        return dict.fromkeys(self._given, True)

    def reaches(self, tensor: tf.Tensor, reached: dict[int, bool]) -> bool:
        """Return whether a tensor is computed from a tape's gradient; ``reached`` keeps earlier answers."""
        for here in _inputs_first(tensor, reached):
            reached[id(here)] = any(reached[id(before)] for before in here.op.inputs)
        return reached[id(tensor)]


def refused_change(op: tf.Operation) -> StepRefused:
    """Return the error for an op between tape and optimizer that treats parts of a batch differently."""
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
    """Raise StepRefused: ``train_step`` computes these gradients at weights that another gradient has moved.

    In a step that takes turns an optimizer also moves them; that is no reason to refuse.
    """
    if moved := taped.moved_by(grads):
        raise StepRefused(
            "train_step moves weights by a gradient and computes another one there, as SAM does "
            f"(op {moved}); a pipeline would move them by each micro-batch's gradient, not by the batch's: "
            "use microbatches=1"
        )


def refuse_settings(optimizer: Any, grads: Sequence[Any], begin: int) -> None:
    """Raise StepRefused if the ops of an update, from number ``begin``, read the batch beside its gradients.

    ``train_step`` has then set the optimizer's momentum, decay or another number to a computed value.
    """
    given = {id(tensor) for grad in grads for tensor in tensors_of(grad)}
    update = tf.compat.v1.get_default_graph().get_operations()[begin:]
    inside = {id(op) for op in update}
    read = {id(tensor): tensor for op in update for tensor in op.inputs if id(tensor.op) not in inside}
    for number, tensor in read.items():
        if number not in given and is_of_batch(tensor):
            raise StepRefused(
                f"train_step sets a number of optimizer {optimizer.name!r} by what it computes of the batch "
                f"(op {tensor.op.name}); each micro-batch would set another one, by its own rows: do so in a "
                "callback's on_train_batch_end, whose logs are the whole batch's, or use microbatches=1"
            )


def is_of_batch(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is computed from a batch or drawn at random, so that micro-batches differ."""
    captured = func_graphs.captured_by(tensor.graph)
    ops = (each.op for each in upstream([tensor], lambda each: each.op.type in _SIZES))
    return any(
        op.type.startswith(_RANDOM) or (op.type == "Placeholder" and id(op.outputs[0]) not in captured)
        for op in ops
    )


class Replay:
    """Repeats, on the batch's sums, the ops between the tape's gradients and those given to an optimizer.

    Raises StepRefused if ops read the batch beside its gradients, draw random numbers, or change a state.

    Attributes:
        collected: what micro-batches add up: gradients that parts of a batch do not change, None in place of
            the others, and behind all of them the sources from which the others are computed.
        places: for each entry of ``collected`` the place of its gradient, or of the one it is a source of.
    """

    def __init__(self, taped: Taped, grads: Sequence[Any]) -> None:
        if variable := taped.kept_in(grads):
            raise StepRefused(
                "train_step adds up gradients of several steps by hand, in a variable of its own "
                f"({variable}); a pipeline would add to it once for each micro-batch: give the optimizer "
                "gradient_accumulation_steps=, or use microbatches=1"
            )
        self._taped, self._reached = taped, taped.known()
        self._grads, self._outside = list(grads), dict[int, Any]()
        self._changed = {place: taped.changed_by([grad]) for place, grad in enumerate(grads)}
        self._changed = {place: op for place, op in self._changed.items() if op is not None}
        sources: dict[int, tuple[Any, int]] = {}
        for place, op in self._changed.items():
            if isinstance(grads[place], tf.IndexedSlices):
                raise refused_change(op)
            for source in self._sources_of(grads[place]):
                sources.setdefault(id(source), (source, place))
        self._sources = [source for source, _ in sources.values()]
        kept = [None if place in self._changed else grad for place, grad in enumerate(grads)]
        self.collected = [*kept, *self._sources]
        self.places = [*range(len(grads)), *(place for _, place in sources.values())]

    def _sources_of(self, grad: tf.Tensor | tf.IndexedSlices) -> list[Any]:
        """Return the tape's results from which the gradient is computed; note what else it depends on."""
        sources, seen, waiting = [], set[int](), [grad]
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if not self._taped.reaches(tensor, self._reached):
                self._outside[id(tensor)] = tensor
            elif self._is_source(tensor):
                sources.append(tensor)
            elif self._may_be_made_again(tensor.op):
                waiting.extend(reversed(tensor.op.inputs))
            else:
                raise refused_change(tensor.op)
        return sources

    def _is_source(self, tensor: tf.Tensor) -> bool:
        """Return whether the tape has returned the tensor; an embedding's sums all its rows' numbers."""
        op = tensor.op
        if op.type == "UnsortedSegmentSum" and id(op.inputs[0]) in self._taped.of_rows:
            return not self._taped.reaches(op.inputs[1], self._reached)
        return self._taped.gave_whole(tensor)

    def _may_be_made_again(self, op: tf.Operation) -> bool:
        unreached = [tensor for tensor in op.inputs if not self._taped.reaches(tensor, self._reached)]
        keeps_nothing = not op.op_def.is_stateful or op.type == _CHECKS
        alone = keeps_nothing and not op.control_inputs and not any(map(self._taped.gave, op.outputs))
        return alone and bool(op.inputs) and not any(map(is_of_batch, unreached))

    def of_batch(self, totals: Sequence[Any]) -> list[Any]:
        """Return the gradients of the batch, given the totals of :attr:`collected`."""
        count = len(self._grads)
        given = zip(self._sources, totals[count:], strict=True)
        known = {**self._outside, **{id(source): total for source, total in given}}
        return [
            _made_again(self._grads[place], known) if place in self._changed else total
            for place, total in enumerate(totals[:count])
        ]


def _made_again(tensor: tf.Tensor, known: dict[int, Any]) -> Any:
    """Compute the tensor again from the ``known`` tensors, by the originals' ``id``; note it there."""
    for here in _inputs_first(tensor, known):
        outputs = func_graphs.made_again(here.op, [known[id(given)] for given in here.op.inputs])
        known.update((id(old), new) for old, new in zip(here.op.outputs, outputs, strict=True))
    return known[id(tensor)]


def _inputs_first(tensor: tf.Tensor, known: Mapping[int, Any]) -> Iterator[tf.Tensor]:
    """Yield what a tensor is computed from, then itself, but nothing ``known``; the caller adds to it."""
    waiting = [tensor]
    while waiting:
        here = waiting[-1]
        unknown = [] if id(here) in known else [each for each in here.op.inputs if id(each) not in known]
        if id(here) in known:
            waiting.pop()
        elif unknown:
            waiting.extend(unknown)
        else:
            yield here
