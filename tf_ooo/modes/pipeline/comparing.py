"""Compares steps on two joined micro-batches with the mean of the steps on each, now and later."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_ooo.compat import keras_compiled, keras_layers, nests
from tf_ooo.fit import timing
from tf_ooo.modes.pipeline.looked_at import LookedAt, Seen, dense
from tf_ooo.tracing.micro_batches import parts_of, rows_of
from tf_ooo.tracing.states import Assigned, StateKinds, in_steps, moved, set_to, state_kinds
from tf_ooo.tracing.step import MEAN
from tf_ooo.units import first_of

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
# Kernels add up other shapes in another order; in half precision each row's loss has three digits.
ROUNDING = 1e-3
_ROUNDING_OF_HALF = 3e-2
# Differences of gradients relative to their norm: rounding alone makes 1e-7 to 1e-5. The difference made by
# the same rows in reverse order, or by rounded weights, is rounding, too.  A gradient this much smaller than
# the largest one is only rounding.
_GRADIENT_ROUNDING = 2e-5
_BEYOND_ROUNDING = 8.0
# A wide network has units on the edge of a relu, which rounding in another shape turns on or off; each of
# them changes gradients by a thousandth.  Weights that are moved by rounding show how large that is.
_ROUNDED = 1e-6
_NEGLIGIBLE = 1e-3
# So many pairs of micro-batches must agree: one of them alone may meet the kink of a relu.
_PAIRS = 3
# Two micro-batches' loss over the mean of both, where rows are added up; other terms and masks blur it.
_SUM = 2.0
# How the batch's log is made of micro-batches', by the op.
_MADE: Mapping[str, Callable[[Sequence[float]], Any]] = {
    MEAN: np.mean,
    "Sum": sum,
    "Max": max,
    "Min": min,
    "Any": max,
    "All": min,
}
_NEAR = 0.3
# So many steps later a gate may be open: round numbers and those before, for what is done every so many.
_LATER_STEPS = (1, 3, 10, 31, 99, 1_000, 9_999, 100_000)


@dataclass(frozen=True)
class Compared:
    """Compares two joined micro-batches with the mean of both: losses, gradients and outputs.

    Attributes:
        together, apart: the losses.
        grads_off: how far each gradient is from the mean of both parts'; 0 if it may be rounding.
        norms: the norms of the gradients.
        outputs_off: the largest difference of an output, relative to the largest output.
        metrics_off: how far each metric's result is off, by name; ``logs_off``: how far each log is.
        twice_off: how far the gradients are from the sum of both parts', relative to their size.
    """

    together: float
    apart: float
    grads_off: np.ndarray
    norms: np.ndarray
    outputs_off: float
    metrics_off: Mapping[str, float]
    logs_off: Mapping[str, float] = dataclasses.field(default_factory=dict)
    twice_off: float = 0.0

    def adds_up(self, exact: bool) -> bool:
        """Return whether the loss is a sum over rows; without noise in them, also the gradients."""
        loss_is_sum = abs(self.together - _SUM * self.apart) < _NEAR * abs(self.apart)
        return loss_is_sum and (self.twice_off < _NEAR or not exact)

    @property
    def agrees(self) -> bool:
        """Return whether the gradients are the mean of both parts'; if not, it may still be rounding."""
        return bool(self.gradients_off(0.0).max(initial=0.0) <= _GRADIENT_ROUNDING)

    def loss_off(self, least: float) -> float:
        """Return the loss's difference relative to the larger one, or to ``least`` if that is more."""
        size = max(abs(self.together), abs(self.apart), least)
        return abs(self.together - self.apart) / size if size else 0.0

    def gradients_off(self, least: np.ndarray | float) -> np.ndarray:
        """Return each gradient's difference relative to its norm, or to ``least`` if that is more."""
        norms = np.maximum(self.norms, least)
        scales = np.maximum(norms, _NEGLIGIBLE * norms.max(initial=0.0))
        beside: np.ndarray = np.divide(self.grads_off, scales, out=np.zeros(len(scales)), where=scales > 0)
        return beside


class Comparison:
    """Compares a step on two joined micro-batches of ``rows`` each with the steps on each, by two traces.

    ``gradients=False``: losses and outputs alone.  No variable is changed.
    ``say_seconds`` is told the seconds of all. ``exact``: whether losses and gradients are free of random
    numbers and masks. ``of_both``: the step on two micro-batches.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: object,
        rows: int,
        gradients: bool,
        say_seconds: Callable[[float], None],
    ) -> None:
        self.model, self.rows = model, rows
        pair = self.pairs_of(batch)[0]
        self._of_part = LookedAt(model, parts_of(pair, (rows, rows))[0], gradients)
        say_seconds(timing.look_s(self._of_part.trace_s))
        self.of_both = LookedAt(model, pair, gradients)
        self.exact = not self._of_part.random and not keras_compiled.masks(model)
        self._signature, half = nests.signature(pair), keras_layers.computes_in_half(model)
        self._rounding = _ROUNDING_OF_HALF if half else ROUNDING
        self._gradient_rounding = _ROUNDING_OF_HALF if half else _GRADIENT_ROUNDING

    def pairs_of(self, batch: object) -> list[Any]:
        """Return the first pairs of neighbouring micro-batches of a batch."""
        together, whole = 2 * self.rows, rows_of(batch)
        pairs = parts_of(batch, [together] * (whole // together) + [whole % together])
        return [pair for pair in pairs if rows_of(pair) == together][:_PAIRS]

    def fits(self, batch: object) -> bool:
        """Return whether a batch has such pairs as the step was traced for."""
        return [nests.signature(pair) for pair in self.pairs_of(batch)[:1]] == [self._signature]

    def compare(self, batches: Sequence[Any]) -> tuple[list[Any], list[Compared]]:
        """Return the pairs whose losses and gradients are finite, and the comparison of each."""
        gates = self.of_both.closed_gates  # a term that a callback lets in later is there already
        with set_to(gates, {name: np.ones_like(gate.numpy()) for name, gate in gates.items()}):
            pairs = [(pair, each) for pair in batches if (each := self._compared(pair)) is not None]
        return [pair for pair, _ in pairs], [each for _, each in pairs]

    def difference(self, compared: Sequence[Compared], earlier: Sequence[Compared] = ()) -> str:
        """Say how batches differ from their micro-batches, beyond ``earlier`` ones; empty: not at all."""
        if compared and min(pair.outputs_off for pair in compared) > self._rounding:
            return "the outputs for two micro-batches in one are not those for each by itself"
        if not self.exact or not compared:
            return ""
        # Earlier losses and gradients tell how large rounding is once they have become small.
        least = max((abs(pair.together) for pair in earlier), default=0.0)
        differing = [pair for pair in compared if pair.loss_off(least) > self._rounding]
        if differing:
            return (
                f"the loss of two micro-batches in one is {differing[0].together:.4g}, the mean of both "
                f"{differing[0].apart:.4g}"
            )
        norms = np.max([pair.norms for pair in earlier], axis=0) if earlier else 0.0
        off = np.min([pair.gradients_off(norms) for pair in compared], axis=0)
        largest = float(off.max(initial=0.0))
        if largest > self._gradient_rounding:
            return (
                "the gradients of two micro-batches in one are not the mean of each one's: they differ by "
                f"{largest:.2g} of their size"
            )
        return ""

    def differing_metrics(self, compared: Sequence[Compared]) -> tuple[str, ...]:
        """Return names of metrics and logs that differ between both joined and each alone."""
        if not compared or not self.exact:
            return ()
        # A metric's threshold may lie on the edge of rounding in one of them.
        off = {
            name: min(each.metrics_off.get(name, 0.0) for each in compared)
            for name in compared[0].metrics_off
        }
        off |= {name: max(each.logs_off.get(name, 0.0) for each in compared) for name in compared[0].logs_off}
        return tuple(name for name in off if off[name] > self._rounding)

    def states(self, batches: Sequence[Any]) -> StateKinds:
        """Find how states follow, as they are and moved a little; each step runs once more for that."""
        of_both = self.of_both
        if not of_both.states or self._of_part.random:
            return StateKinds()
        as_they_are = [self._assigned(pair) for pair in batches]
        with set_to(of_both.states, moved(of_both.values)):
            return state_kinds([*as_they_are, *map(self._assigned, batches[:1])], of_both.used)

    def later_difference(self, batches: Sequence[Any]) -> str:
        """Say how batches differ with counts of steps, and states, as they will be some steps later."""
        states = {name: state for name, state in self.of_both.states.items() if name in self.of_both.used}
        clocks = states | self.of_both.counters
        if not clocks or not batches:
            return ""
        now = {name: clock.numpy() for name, clock in clocks.items()}
        once = self._stepped(batches[0], now)
        twice = self._stepped(batches[0], once)
        for steps in _LATER_STEPS:
            then = {name: in_steps(steps, now[name], once[name], twice[name]) for name in clocks}
            with set_to(clocks, then):
                try:
                    difference = self.difference_of(batches)
                except tf.errors.OpError as error:  # a number that no step would see
                    _LOG.debug("%d steps later nothing was compared: %s", steps, error)
                    continue
            if difference:
                return f"with {first_of(sorted(clocks))} as {steps} steps later, {difference}"
        return ""

    def difference_of(self, batches: Sequence[Any], earlier: Sequence[Compared] = ()) -> str:
        """Compare as :meth:`difference`; mostly the first pair shows that there is none."""
        first = self.difference(self.compare(batches[:1])[1], earlier)
        return first and self.difference(self.compare(batches)[1], earlier)

    def _stepped(self, pair: object, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return states after a step from these values, and counters that have counted the step."""
        states = self.of_both.states
        with set_to(states, {name: value for name, value in values.items() if name in states}):
            after = self.of_both(pair).states
        return {name: after[name] if name in states else value + 1 for name, value in values.items()}

    def _assigned(self, pair: object) -> Assigned:
        of_both, of_part = self.of_both, self._of_part
        before, both, parts = of_both.values, of_both(pair).states, parts_of(pair, (self.rows,) * 2)
        first, second = (of_part(part).states for part in parts)

        def in_turn(name: str) -> np.ndarray:
            with set_to(of_both.states, {**before, name: first[name]}):
                return of_part(parts[1]).states[name]

        return Assigned(before, both, first, second, in_turn)

    def _compared(self, pair: object) -> Compared | None:
        part, other = parts_of(pair, (self.rows, self.rows))
        first = self._of_part(part)
        second = self._of_part(other, after=first)
        both = self.of_both(pair)
        steps = [both, first, second]
        if not all(seen.is_finite for seen in steps):
            return None
        of_parts = [np.concatenate(parts) for parts in zip(first.outputs, second.outputs, strict=True)]
        outputs, grads = zip(both.outputs, of_parts, strict=True), _dense(steps)
        compared = Compared(
            both.loss,
            (first.loss + second.loss) / 2,
            *_gradients_off(grads),
            max((off(a, b) for a, b in outputs), default=0.0),
            {name: off(both.results[name], said) for name, said in second.results.items()},
            self._logs_off(both, first, second),
            _twice_off(grads),
        )
        if compared.agrees:
            return compared
        steps.append(self.of_both(_reversed(pair)))
        if not steps[-1].is_finite:
            return None
        compared = dataclasses.replace(compared, grads_off=_gradients_off(_dense(steps))[0])
        if compared.agrees:
            return compared
        steps += [self._with_rounded_weights(pair, seed) for seed in (0, 1)]
        return dataclasses.replace(compared, grads_off=_gradients_off(_dense(steps))[0])

    def _logs_off(self, both: Seen, first: Seen, second: Seen) -> dict[str, float]:
        logs_off = {}
        for name in self._of_part.made.keys() & both.logs.keys():
            of_parts = _MADE[self._of_part.made[name]]((first.logs[name], second.logs[name]))
            difference, size = abs(of_parts - both.logs[name]), abs(both.logs[name])
            # Rounding is left where terms cancel, and nothing by nothing is no number.
            beside = difference / max(size, _NEGLIGIBLE) if math.isfinite(size) else 0.0
            logs_off[name] = math.inf if math.isnan(beside) else beside
        return logs_off

    def _with_rounded_weights(self, pair: object, seed: int) -> Seen:
        """Return the step with its inputs moved by as much as a layer's rounding moves them."""
        numbers = np.random.default_rng(seed)
        read = {
            str(place): variable
            for place, variable in enumerate(self.of_both.variables)
            if variable.dtype.is_floating and variable.shape.rank
        }

        def rounded(value: np.ndarray) -> np.ndarray:
            return (value * (1 + _ROUNDED * numbers.standard_normal(value.shape))).astype(value.dtype)

        with set_to(read, {name: rounded(variable.numpy()) for name, variable in read.items()}):
            return self.of_both(pair)


def _dense(steps: Sequence[Seen]) -> list[list[np.ndarray]]:
    """Return each gradient in each of these steps."""
    return [dense(grads) for grads in zip(*(seen.grads for seen in steps), strict=True)]


def _twice_off(of_each: Sequence[Sequence[np.ndarray]]) -> float:
    """Return the gradients' difference from the sum of both parts', relative to their size."""
    size = math.hypot(*(_norm(together) for together, *_ in of_each))
    differences = (_norm(together - first - second) for together, first, second, *_ in of_each)
    return math.hypot(*differences) / size if size else 0.0


def _gradients_off(of_each: Sequence[Sequence[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return how far each gradient is from the mean of both parts', 0 for rounding; and the norms.

    Each item has the gradients of both parts together, of the first and of the second, then of optional steps
    that differ from both by rounding alone; the first of these has its rows in reverse.
    """
    norms = [max(map(_norm, grads[:3])) for grads in of_each]
    # Nothing but rounding is left of a gradient whose terms cancel, as a bias' does before normalization.
    cancelled = _NEGLIGIBLE * max(norms, default=0.0)
    differences = []
    for (together, of_first, of_second, *of_rounded), norm in zip(of_each, norms, strict=True):
        difference = _norm(together - (of_first + of_second) / 2)
        # Rows that count by their place differ in reverse as well: that much is no rounding.
        roundings = [_norm(together - grad) for grad in of_rounded]
        few = _ROUNDING_OF_HALF * norm
        most = math.inf if norm < cancelled else few
        likely = [each for place, each in enumerate(roundings) if each < (most if place else few)]
        rounding = max(likely, default=0.0)
        differences.append(0.0 if difference < _BEYOND_ROUNDING * rounding else difference)
    return np.array(differences), np.array(norms)


def _norm(values: np.ndarray) -> float:
    """Compute a norm without a matrix library: its threads would wait for TensorFlow's (100 times longer)."""
    return float(np.sqrt(np.square(values).sum()))


def off(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference relative to the largest number of ``a``; 0 if shapes differ."""
    if a.shape != b.shape:
        return 0.0  # it has no row for each of the batch
    size = float(np.abs(a).max(initial=0.0))
    return float(np.abs(a - b).max(initial=0.0)) / size if size and np.isfinite(size) else 0.0


def _reversed(batch: object) -> Any:
    """Return the batch with its rows in reverse order; a batch with sparse parts stays as it is."""
    parts = tf.nest.flatten(batch)
    if not all(isinstance(part, tf.Tensor) for part in parts):
        return batch
    return tf.nest.map_structure(lambda part: part[::-1] if part.shape.rank else part, batch)
