"""Repeats what ``train_step`` makes of gradients between tape and optimizer on those of the whole batch.

Clipping, signs, or a guard against numbers that are not finite, are not the same for parts of a batch:
micro-batches add up what the tape has given, and the ops behind it are made again, of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_ooo.compat import func_graphs
from tf_ooo.tracing.changed import Taped, is_of_batch, refuse_kept, refused_change

_CHECKS = "CheckNumerics"  # is stateful only so that it runs


class Replay:
    """The gradients that an optimizer was given, as ops of those that the tape has given.

    StepRefused where ops read more of the batch than its gradients, draw random numbers, or change a state.

    Attributes:
        collected: what each micro-batch adds up: the gradients that are the same for parts of a batch, None
            in the place of others, and behind them the sources of these.
        places: of each of these a gradient's place: its own, or that of one which it is a source of.
    """

    def __init__(self, taped: Taped, grads: Sequence[Any]) -> None:
        refuse_kept(taped, grads)
        self._taped, self._reached = taped, dict[int, bool]()
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
        """Return the tape's results from which the gradient is computed; notes what else is."""
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
        """Return whether the tape has given it: for an embedding, the sum of all its rows' numbers."""
        op = tensor.op
        if op.type == "UnsortedSegmentSum" and self._taped.gave_rows(op.inputs[0]):
            return not self._taped.reaches(op.inputs[1], self._reached)
        return self._taped.gave_whole(tensor)

    def _may_be_made_again(self, op: tf.Operation) -> bool:
        others = [tensor for tensor in op.inputs if not self._taped.reaches(tensor, self._reached)]
        keeps_nothing = not op.op_def.is_stateful or op.type == _CHECKS
        alone = keeps_nothing and not op.control_inputs and not any(map(self._taped.gave, op.outputs))
        return alone and bool(op.inputs) and not any(map(is_of_batch, others))

    def of_batch(self, totals: Sequence[Any]) -> list[Any]:
        """Return the gradients of the batch, of the totals of what was :attr:`collected`."""
        count = len(self._grads)
        given = zip(self._sources, totals[count:], strict=True)
        known = {**self._outside, **{id(source): total for source, total in given}}
        return [
            _made_again(self._grads[place], known) if place in self._changed else total
            for place, total in enumerate(totals[:count])
        ]


def _made_again(tensor: tf.Tensor, known: dict[int, Any]) -> Any:
    """The tensor, made of what is ``known`` in the place of others, by their ``id``; notes what it makes."""
    waiting = [tensor]
    while waiting:
        here = waiting[-1]
        unknown = [given for given in here.op.inputs if id(given) not in known]
        if id(here) in known:
            waiting.pop()
        elif unknown:
            waiting.extend(unknown)
        else:
            made = func_graphs.made_again(here.op, [known[id(given)] for given in here.op.inputs])
            known.update((id(old), new) for old, new in zip(here.op.outputs, made, strict=True))
    return known[id(tensor)]
