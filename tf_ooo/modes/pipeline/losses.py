"""Whether a step on a batch is the mean of the steps on its micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_ooo.compat import keras_layers, keras_losses, keras_variables
from tf_ooo.costs.places import first_of
from tf_ooo.errors import BackendError
from tf_ooo.modes.pipeline.looked_at import LookedAt, Seen, dense, forward_tensors
from tf_ooo.modes.pipeline.state_kinds import Assigned, StateKinds, moved, set_to, state_kinds
from tf_ooo.tracing.micro_batches import StepRefused, parts_of, rows_of, split_rows

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
# Kernels add up other shapes in another order; in half precision each row's loss has three digits.
_ROUNDING = 1e-3
_ROUNDING_OF_HALF = 3e-2
# A gradient's difference beside its norm: rounding alone makes 1e-7 to 1e-5 of it, and what the same rows in
# reverse order make is rounding, too.  A gradient this much smaller than the largest one is only rounding.
_GRADIENT_ROUNDING = 2e-5
_BEYOND_REVERSED = 8.0
_NEGLIGIBLE = 1e-3
# So many pairs of micro-batches must agree: one of them alone may meet the kink of a relu.
_PAIRS = 3
# Two micro-batches' loss over the mean of both, where rows are added up; other terms and masks blur it.
_SUM = 2.0
_NEAR = 0.3
# A weight whose elements are all alike (a gate or a kernel of zeros) is moved by this while it is looked at.
_MOVED = 0.05


@dataclass(frozen=True)
class _Compared:
    """Two micro-batches in one, and the mean of each one's: the losses, and how far gradients are apart."""

    together: float
    apart: float
    grads_off: np.ndarray
    outputs_off: float
    metrics_off: Mapping[str, float]

    def adds_up(self) -> bool:
        return abs(self.together - _SUM * self.apart) < _NEAR * abs(self.apart)

    def differ(self, tolerance: float) -> bool:
        return abs(self.together - self.apart) > tolerance * max(abs(self.together), abs(self.apart))


def check_loss(model: keras.Model, batch: Any, microbatches: int, gradients: bool = True) -> StateKinds:
    """How states follow from micro-batches.  StepRefused where a step adds up rows, or compares them.

    Looks at the loss and the gradients that the optimizers would be given, of neighbouring micro-batches,
    two in one and each by itself, without dropout and batch statistics, and with one number in the place of
    all random ones.  No variable is changed.  Where the loss is divided by masks the outputs are compared
    instead.  ``gradients=False`` compares losses and outputs alone.  Refused is also a step whose result
    depends on a state that does not follow from micro-batches.
    """
    rows = split_rows(rows_of(batch), microbatches)
    if len(rows) == 1:
        return StateKinds()
    try:
        with _no_weight_of_one_value(model):
            pairs, exact, states = _compare(model, batch, rows[-1], gradients)
    except BackendError:
        raise
    except Exception as error:  # the step that comes next raises it, if it is the user's
        _LOG.debug("a batch was not compared with its micro-batches: %s", error, exc_info=error)
        _refuse_if_whole_runs(model, batch, len(rows), error)
        return StateKinds()
    own = keras_losses.own_loss_code(model)
    said = first_of(own or [type(model).__name__], 3)
    if pairs and (own or exact) and all(pair.adds_up() for pair in pairs):
        raise StepRefused(
            f"the loss adds up rows (looked at: {said}): of two micro-batches in one it is "
            f"{pairs[0].together:.4g}, the mean of both {pairs[0].apart:.4g}; micro-batches are averaged, so "
            f"its gradients would be {len(rows)} times smaller: divide it by the number of rows and take a "
            "learning rate that is larger by it, or use microbatches=1; check_loss=False trains with the "
            "micro-batches' mean"
        )
    difference = _difference(model, pairs, exact)
    if difference:
        # A class of the user's that normalizes as Keras' does is not known to be exempt.
        whole = ", batch_norm='whole_batch'" if keras_layers.normalizing_in_training(model) else ""
        raise StepRefused(
            f"{difference} (looked at: {said}{_first_place(model, batch, rows[-1])}): the step compares rows "
            "with one another, or divides by something else than rows, and a pipeline does that for each "
            f"micro-batch; use microbatches=1{whole}, or check_loss=False to train with the micro-batches' "
            "mean"
        )
    if states.used:
        raise StepRefused(
            f"what the forward pass assigns to {first_of(states.used)} for two micro-batches in one is "
            "neither the mean of what it assigns for each, nor do their changes add up, and the loss or a "
            "gradient depends on it, in this step or a later one; use microbatches=1, or check_loss=False to "
            "train with the micro-batches' mean"
        )
    return dataclasses.replace(states, metrics=_differing_metrics(model, pairs) if exact else ())


def _differing_metrics(model: keras.Model, pairs: list[_Compared]) -> tuple[str, ...]:
    """Names of metrics that say something else of two micro-batches than of both in one."""
    tolerance = _ROUNDING_OF_HALF if _is_half(model) else _ROUNDING
    names = pairs[0].metrics_off if pairs else ()
    return tuple(n for n in names if min(pair.metrics_off.get(n, 0.0) for pair in pairs) > tolerance)


def _is_half(model: keras.Model) -> bool:
    return model.compute_dtype in ("float16", "bfloat16")


def _refuse_if_whole_runs(model: keras.Model, batch: Any, microbatches: int, error: Exception) -> None:
    """StepRefused where the step fails on parts of a batch, with ``error``, and does not on all of it."""
    try:
        LookedAt(model, batch, gradients=False)(batch)
    except Exception:  # the model's own fault
        return
    plain = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    # Keras says on the first line where it was; what was wrong comes behind.
    said = " ".join(lines[:2] if lines[:1] and "Exception encountered" in lines[0] else lines[:1])
    raise StepRefused(
        f"the step runs on a batch and fails on one of its {microbatches} micro-batches "
        f"({type(error).__name__}: {said}): something in it needs the whole batch, or an input has no "
        "row for each example, as the matrix of a graph's edges; use microbatches=1"
    ) from None


def _difference(model: keras.Model, pairs: list[_Compared], exact: bool) -> str:
    """Say in words how batches differ from their micro-batches; empty: they do not."""
    half = _is_half(model)
    if pairs and min(pair.outputs_off for pair in pairs) > (_ROUNDING_OF_HALF if half else _ROUNDING):
        return "the outputs for two micro-batches in one are not those for each by itself"
    if not exact or not pairs:
        return ""
    differing = [pair for pair in pairs if pair.differ(_ROUNDING_OF_HALF if half else _ROUNDING)]
    if differing:
        return (
            f"the loss of two micro-batches in one is {differing[0].together:.4g}, the mean of both "
            f"{differing[0].apart:.4g}"
        )
    off = np.min([pair.grads_off for pair in pairs], axis=0, initial=np.inf)
    largest = float(off.max()) if off.size else 0.0
    if np.isfinite(largest) and largest > (_ROUNDING_OF_HALF if half else _GRADIENT_ROUNDING):
        return (
            "the gradients of two micro-batches in one are not the mean of each one's: they differ by "
            f"{largest:.2g} of their size"
        )
    return ""


def _compare(
    model: keras.Model, batch: Any, rows: int, gradients: bool
) -> tuple[list[_Compared], bool, StateKinds]:
    """Neighbours of so many rows that have a finite loss; whether the numbers are exact; what states do."""
    whole = rows_of(batch)
    pairs = parts_of(batch, [2 * rows] * (whole // (2 * rows)) + [whole % (2 * rows)])
    pairs = [pair for pair in pairs if rows_of(pair) == 2 * rows][:_PAIRS]
    of_part = LookedAt(model, parts_of(pairs[0], (rows, rows))[0], gradients)
    of_both = LookedAt(model, pairs[0], gradients)
    compared, finite = [], []
    for pair in pairs:
        with _set_to_one(of_both.closed_gates):
            part, other = parts_of(pair, (rows, rows))
            first = of_part(part)
            second = of_part(other, after=first)
            both, reversed_rows = of_both(pair), of_both(_reversed(pair))
        if all(seen.is_finite for seen in (first, second, both, reversed_rows)):
            compared.append(_compared(both, first, second, reversed_rows))
            finite.append(pair)
    told = of_both.states and not of_part.random
    states = _states_of(of_both, of_part, finite, rows) if told else StateKinds()
    exact = not of_part.random and not keras_losses.masks(model)
    return compared, exact, states


def _states_of(of_both: LookedAt, of_part: LookedAt, pairs: list[Any], rows: int) -> StateKinds:
    """What states do as they are, and moved a little; each step is taken once more for that."""

    def assigned(pair: Any) -> Assigned:
        before, both, parts = of_both.values, of_both(pair).states, parts_of(pair, (rows, rows))
        first, second = (of_part(part).states for part in parts)

        def in_turn(name: str) -> np.ndarray:
            with set_to(of_both.states, {**before, name: first[name]}):
                return of_part(parts[1]).states[name]

        return Assigned(before, both, first, second, in_turn)

    as_they_are = [assigned(pair) for pair in pairs]
    with set_to(of_both.states, moved(of_both.values)):
        return state_kinds([*as_they_are, *map(assigned, pairs[:1])], of_both.used)


def _compared(both: Seen, first: Seen, second: Seen, reversed_rows: Seen) -> _Compared:
    of_parts = [np.concatenate(parts) for parts in zip(first.outputs, second.outputs, strict=True)]
    outputs = zip(both.outputs, of_parts, strict=True)
    return _Compared(
        both.loss,
        (first.loss + second.loss) / 2,
        _gradients_off(both, first, second, reversed_rows),
        max((_off(a, b) for a, b in outputs), default=0.0),
        {name: _off(both.results[name], said) for name, said in second.results.items()},
    )


def _gradients_off(both: Seen, first: Seen, second: Seen, reversed_rows: Seen) -> np.ndarray:
    """How far each gradient is from the mean of both parts', beside its norm; 0 where it may be rounding."""
    off, norms = [], []
    for grads in zip(both.grads, first.grads, second.grads, reversed_rows.grads, strict=True):
        together, of_first, of_second, of_reversed = dense(grads)
        difference = float(np.linalg.norm(together - (of_first + of_second) / 2))
        rounding = float(np.linalg.norm(together - of_reversed))
        norms.append(max(float(np.linalg.norm(grad)) for grad in (together, of_first, of_second)))
        # Rows that count by their place differ in reverse as well: that much is no rounding.
        small = rounding < _ROUNDING_OF_HALF * norms[-1] and difference < _BEYOND_REVERSED * rounding
        off.append(0.0 if small else difference)
    if not norms:
        return np.zeros(0)
    scales = np.maximum(norms, _NEGLIGIBLE * max(norms))
    return np.divide(off, scales, out=np.zeros(len(off)), where=scales > 0)


def _off(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        return 0.0  # it has no row for each of the batch
    size = float(np.abs(a).max(initial=0.0))
    return float(np.abs(a - b).max(initial=0.0)) / size if size and np.isfinite(size) else 0.0


def _reversed(batch: Any) -> Any:
    """The batch with its rows in reverse order; what is not dense stays as it is."""
    parts = tf.nest.flatten(batch)
    if not all(isinstance(part, tf.Tensor) for part in parts):
        return batch
    return tf.nest.map_structure(lambda part: part[::-1] if part.shape.rank else part, batch)


def _first_place(model: keras.Model, batch: Any, rows: int) -> str:
    """Name the layer and the op at which rows first differ from those of each part; empty: nowhere."""
    try:
        pair = parts_of(batch, [2 * rows, rows_of(batch) - 2 * rows])[0]
        (both,) = forward_tensors(model, [pair])
        first, second = forward_tensors(model, parts_of(pair, (rows, rows)))
    except Exception as error:  # it is looked for only to be named
        _LOG.debug("the layer is not known: %s", error)
        return ""
    for name, whole in both.items():
        parts = [part[name] for part in (first, second) if name in part]
        if len(parts) < 2 or len(whole) != 2 * rows or len(parts[0]) != rows:
            continue
        if parts[0].shape[1:] != whole.shape[1:] or _off(whole, np.concatenate(parts)) > _ROUNDING:
            return f"; rows first meet at {_title(model, name)}"
    return ""


def _title(model: keras.Model, tensor: str) -> str:
    """The layer in whose scope a tensor is, and its op."""
    op = tensor.split(":")[0]
    titles = {
        layer.name: keras_layers.title_of(layer) for layer in keras_layers.parts_of(model, itself=False)
    }
    # Scopes that came before have a number: dense_1 for the layer dense.
    scopes = [scope if scope in titles else scope.rpartition("_")[0] for scope in op.split("/")]
    inner = [titles[scope] for scope in scopes if scope in titles]
    return f"layer {inner[-1]!r}, op {op}" if inner else f"op {op}"


@contextlib.contextmanager
def _no_weight_of_one_value(model: keras.Model) -> Iterator[None]:
    """Inside the block weights whose elements are all alike are a little off.

    A gate or a kernel of zeros hides what stands behind it in the first step.
    """
    numbers, before = np.random.default_rng(0), []
    try:
        for variable in model.trainable_variables:
            value = keras_variables.value_of(variable)
            if value is None or not value.dtype.is_floating or not _is_of_one_value(value):
                continue
            old = value.numpy()
            before.append((value, old))
            value.assign(old + (_MOVED * numbers.standard_normal(old.shape)).astype(old.dtype))
        yield
    finally:
        for value, old in before:
            value.assign(old)


@contextlib.contextmanager
def _set_to_one(gates: list[Any]) -> Iterator[None]:
    """Inside the block they are open: a term that a callback lets in later is there already."""
    try:
        for gate in gates:
            gate.assign(tf.ones_like(gate))
        yield
    finally:
        for gate in gates:
            gate.assign(tf.zeros_like(gate))


def _is_of_one_value(value: Any) -> bool:
    flat = tf.reshape(value, [-1])
    return bool(tf.size(flat)) and bool(tf.reduce_all(flat == flat[0]))
