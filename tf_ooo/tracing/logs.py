"""Logs of a batch from those of its micro-batches, decided by the op that computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_ooo.tracing.micro_batches import Split, behind, upstream

_PASSES_ON = {"Cast", "Identity", "Reshape", "Squeeze"}
_REDUCES = {
    "All": tf.reduce_all,
    "Any": tf.reduce_any,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
    "Sum": tf.reduce_sum,
}
# A mean over rows, or a sum of such, is the mean of micro-batches.
_MEANS = {"AddN", "AddV2", "DivNoNan", "Mean", "Mul", "MulNoNan", "Neg", "RealDiv", "Sub", "Sum"}

MEAN = "Mean"
_WAY_OUT = "use microbatches=1 where it matters"


def whole_logs(
    logs: Sequence[Any], split: Split, depends: Callable[[Any], bool], note: Callable[[str], None]
) -> Any:
    """Logs of the whole batch; ``depends``: whether a tensor is a metric's result, which the last one has.

    Counts and other sums over rows are added up, extremes are those of all, other numbers are averaged by
    rows.  Whole numbers and arrays that are computed from rows otherwise are the last micro-batch's.
    ``note`` is given a line for each that is not the batch's own.
    """
    if len(logs) == 1:
        return logs[0]

    def of_batch(name: str, *values: Any) -> Any:
        last = values[-1]
        if not isinstance(last, tf.Tensor) or depends(last):
            return last
        how = _reducing(values, split) if last.shape.rank == 0 else ""
        if how:
            return _REDUCES[how](tf.stack(values), 0)
        if not _reads_data(last):  # of weights, constants, what all micro-batches have counted
            if _may_count_rows(last, split.kind(split.count - 1)):
                note(
                    f"the log {name or last.op.name} may be of the last micro-batch's rows alone; {_WAY_OUT}"
                )
            return last
        if last.shape.rank != 0 or not last.dtype.is_floating:
            note(f"the log {name or last.op.name} is the last micro-batch's, not the batch's own; {_WAY_OUT}")
            return last
        if not _may_be_mean(last):
            note(
                f"the log {name or last.op.name} is the mean of its micro-batches' values, not the batch's "
                f"own; {_WAY_OUT}"
            )
        shares = map(split.share, range(split.count))
        return tf.add_n([v * tf.cast(share, v.dtype) for v, share in zip(values, shares, strict=True)])

    if not isinstance(logs[0], Mapping):
        return tf.nest.map_structure(functools.partial(of_batch, ""), *logs)
    named = ((name, [each[name] for each in logs]) for name in logs[0])
    return {name: tf.nest.map_structure(functools.partial(of_batch, name), *each) for name, each in named}


def silent_logs(logs: Any, split: Split, depends: Callable[[Any], bool]) -> dict[str, tuple[Any, str]]:
    """Return numbers that :func:`whole_logs` makes of micro-batches' without a word, and how, by name.

    ``logs`` are the first micro-batch's; the op that reduces them is named here, or :data:`MEAN`.
    """
    silent = {}
    for key, values in logs.items() if isinstance(logs, Mapping) else ():
        for place, value in enumerate(tf.nest.flatten(values)):
            name = f"{key}[{place}]" if place else key
            traced = isinstance(value, tf.Tensor) and hasattr(value, "graph")  # else it is a number already
            if not traced or value.shape.rank != 0 or depends(value):
                continue
            how = _reducing([value], split)
            if not how and value.dtype.is_floating and _reads_data(value) and _may_be_mean(value):
                how = MEAN
            if how:
                silent[name] = value, how
    return silent


def _may_be_mean(value: Any) -> bool:
    return behind(value, _PASSES_ON).op.type in (*_MEANS, "Placeholder")


def _reducing(values: Sequence[Any], split: Split) -> str:
    """Return the op that makes the batch's value of the micro-batches' values; empty: none is known."""
    sources = [behind(value, _PASSES_ON) for value in values]
    if all(_counts_rows(source, split, number) for number, source in enumerate(sources)):
        return "Sum"
    first = sources[0].op
    if first.type not in _REDUCES or any(source.op.type != first.type for source in sources):
        return ""
    inside = first.inputs[0]
    of_rows = inside.shape.rank and inside.op.type not in (*_REDUCES, "Mean")
    of_rows = of_rows and inside.shape[0] == split.kind(0) and _reads_data(inside)
    return str(first.type) if of_rows else ""


def _reads_data(tensor: tf.Tensor) -> bool:
    """Return whether it is computed from what the step is given, not from variables alone."""
    return any(each.op.type == "Placeholder" and each.dtype != tf.resource for each in upstream([tensor]))


def _may_count_rows(tensor: tf.Tensor, rows: object) -> bool:
    """Say whether it is a constant that a trace may have made of the number of rows, as ``tf.size`` is."""
    known = tf.get_static_value(tensor)
    if known is None or not isinstance(rows, int) or rows < 2 or known.dtype.kind not in "fiu":
        return False
    return bool(((known != 0) & (known % rows == 0)).any())


def _counts_rows(source: Any, split: Split, number: int) -> bool:
    """Return whether it is the number of a micro-batch's rows: a constant, if the trace knows it."""
    if source.op.type != "StridedSlice" or source.shape.rank != 0 or not source.dtype.is_integer:
        return False
    begin, shape = tf.get_static_value(source.op.inputs[1]), source.op.inputs[0]
    if begin is None or begin.size != 1 or int(begin[0]) != 0:
        return False
    known = tf.get_static_value(shape)
    return shape.op.type == "Shape" or known is not None and int(known[0]) == split.kind(number)
