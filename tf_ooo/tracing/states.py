"""Handles states that the forward pass assigns from data once a step; comparisons tell how they follow.

Examples are batch normalization's moving averages, a layer's own average of what it sees, a count of rows.
Each micro-batch computes a new value from the state before the step, and sees that value if it reads the
state again.  After the last micro-batch the state gets the value that these values give for the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_ooo.compat import func_graphs, keras_fits, keras_layers, keras_variables, train_function
from tf_ooo.tracing.assigned import feeds_random_numbers, names_of_held, what_is_added
from tf_ooo.tracing.collecting import add_to, added_up
from tf_ooo.tracing.intercepting import ops_so_far, times
from tf_ooo.tracing.micro_batches import OfData, Split, StepRefused, computed_from, rows_of_part
from tf_ooo.tracing.variables import all_variables, key_of

if TYPE_CHECKING:
    import keras

# The batch's value follows from those of its micro-batches: all are equal; it is their mean by rows; their
# changes add up; or one micro-batch changes what the one before has left.
ONCE, MEAN, SUM, IN_TURN = "once", "mean", "sum", "in turn"
# Each micro-batch in turn keeps the largest, or smallest, value of the batch.
_EXTREMES = ("Maximum", "Minimum")
# A difference up to this share of a state's change is rounding, which makes 1e-7 to 1e-5 of it.
_ROUNDING = 1e-3
# States are moved upwards by this much to see their effect: many begin as zeros.
_MOVED = 0.05

_KINDS = (ONCE, MEAN, SUM, IN_TURN)

StateValues = Mapping[str, np.ndarray]


class NotHeld(Exception):
    """The step has to be traced with these states assigned by each micro-batch; ``paths`` are their names."""

    def __init__(self, paths: Collection[str]) -> None:
        super().__init__(", ".join(paths))
        self.paths = tuple(paths)


@dataclass
class _AssignedState:
    """Holds a state of the micro-batch being traced: its new value, and what is added to it if it is a sum.

    ``at`` is how many ops the graph had at the first assignment, ``read`` whether the state was read
    afterwards, ``times`` how often it was assigned.
    """

    value: Any = None
    added: Any = None
    at: int = 0
    read: bool = False
    times: int = 0


class States:
    """Follows what micro-batches do to a model's states; none is assigned while they are traced.

    Args:
        kinds: how states follow from micro-batches, by path, if a comparison has told; others are guessed.
        each: paths of further states that each micro-batch assigns, beside those with that kind.
        replicas: the replica of each micro-batch.
    """

    def __init__(
        self,
        model: keras.Model,
        split: Split,
        replicas: Sequence[int],
        kinds: Mapping[str, str],
        each: Collection[str] = (),
    ) -> None:
        self._trained = set(map(key_of, keras_fits.trained_variables(model)))
        self._paths = {key_of(v): path for path, v in keras_variables.named(model.weights).items()}
        self._weights = set(self._paths)
        self._model, self._held_names = model, names_of_held(model)
        # Keras 2 has further variables that no list holds.
        self._others = not train_function.counts_steps(model)
        self._no_states: set[int] = set()
        self.each = {*each, *(path for path, kind in kinds.items() if kind == IN_TURN)}
        self._normalizing = keras_layers.batch_normalizations(model)
        # Each kept variance has its mean here, and the share of both that is new in each step.
        self._mean_of = {
            key_of(variance): (key_of(mean), 1.0 - momentum)
            for mean, variance, momentum in keras_layers.moving_averages(model)
            if momentum < 1.0
        }
        self._split, self._replicas, self._known = split, replicas, kinds
        # One micro-batch can be traced for all, with ops that read no data run once; not with Keras 2, whose
        # last micro-batch counts the step.
        self.may_be_copies = len({*map(split.kind, range(split.count))}) == 1 and self._others
        self._kinds: dict[int, str] = {}
        self._variables: dict[int, Any] = {}
        self._assigned: dict[int, _AssignedState] = {}
        self._sums: dict[int, dict[int, Any]] = {}  # the sums of each replica
        self._graph: Any = None
        # These are the new values of the held states from the micro-batch that was traced last.
        self.values: list[Any] = []

    @contextlib.contextmanager
    def micro_batch(self, part: object) -> Iterator[None]:
        """Trace a micro-batch inside the block; ``part`` holds its rows.  Raises NotHeld."""
        if self._split.count == 1:
            yield
            return
        self._graph, self._of_data, self._assigned = tf.compat.v1.get_default_graph(), OfData(part), {}
        begin = ops_so_far()
        self._rows = rows_of_part(part)
        with keras_variables.intercepted(self._read, self._assign):
            yield
        if again := self._mixed(begin):
            raise NotHeld([self._paths[key] for key in again])
        if self._assigned.keys() != self._kinds.keys():
            differing = [self._paths[key] for key in self._assigned.keys() ^ self._kinds.keys()]
            raise StepRefused(
                f"a later micro-batch assigns other states than the first one: {', '.join(sorted(differing))}"
            )
        self.values = self._results()

    def _read(self, variable: tf.Variable) -> Any:
        key = id(variable.handle)
        state = self._assigned.get(key)
        if state is None or tf.compat.v1.get_default_graph() is not self._graph:
            return None
        state.read = True
        if key not in self._trained:
            return state.value
        # The gradient of a weight's new value is that of the weight, which is read unchanged meanwhile.
        del self._assigned[key]
        before = tf.convert_to_tensor(variable)
        self._assigned[key] = state
        return _with_gradient_of(before, state.value)

    def _assign(self, variable: tf.Variable, value: Any, sign: int) -> bool:
        key = id(variable.handle)
        if tf.compat.v1.get_default_graph() is not self._graph or not self._is_state(variable):
            return False
        kind = self._kinds.get(key) or self._kind(variable, value, sign)
        if not kind:
            return False
        change = -value if sign < 0 else value
        state = self._assigned.get(key) or _AssignedState()
        if sign or kind == SUM:
            now = tf.convert_to_tensor(variable) if state.value is None else state.value
            added = change if sign else value - now
            state.added = added if state.added is None else state.added + added
            value = now + change if sign else value
        state.value, state.at, state.times = value, state.at or ops_so_far(), state.times + 1
        self._assigned[key], self._kinds[key], self._variables[key] = state, kind, variable
        return True

    def _is_state(self, variable: tf.Variable) -> bool:
        """Return whether a variable is a weight, or one that a layer or the model has beside its weights."""
        key = id(variable.handle)
        if key not in self._paths and self._others:
            # Left out are metrics, seeds and what optimizers keep; some are made while the step is traced.
            if key not in self._no_states:
                self._no_states.update(map(key_of, all_variables(self._model)))
            if key in self._no_states or feeds_random_numbers(self._handle(variable)):
                return False
            self._paths[key] = self._held_names.get(key) or keras_variables.unique_name_of(variable)
        return key in self._paths and self._paths[key] not in self.each

    def _kind(self, variable: tf.Variable, value: Any, sign: int) -> str:
        """Return how the state follows from micro-batches; empty if it is assigned where that stands."""
        known = self._known.get(self._paths[id(variable.handle)], "")
        trained = id(variable.handle) in self._trained
        if trained and (self.may_be_copies or value.op in self._of_data):
            return ""
        if known == IN_TURN or not (value.dtype.is_floating or value.dtype.is_integer):
            return ""
        if not self._of_data.reads_data(value.op):
            if known == SUM or (not known and self._adds_rows(variable, value, sign)):
                return SUM
            shared = self.may_be_copies and id(variable.handle) in self._weights
            return "" if shared and not self._of_data.is_drawn(value.op) else ONCE
        if known and not (known == ONCE and value.dtype.is_floating):
            return known
        if not known and value.op.type in _EXTREMES:
            return ""
        if known or (value.dtype.is_floating and not self._accumulates(variable, value, sign)):
            return MEAN
        return SUM

    def _accumulates(self, variable: tf.Variable, value: object, sign: int) -> bool:
        """Return whether the assigned value adds to the state something that does not depend on it."""
        handle = self._handle(variable)
        return any(not computed_from(added, {id(handle)}) for added in what_is_added(value, sign, handle))

    def _adds_rows(self, variable: tf.Variable, value: object, sign: int) -> bool:
        """Say whether the added constant may have been made from the number of rows; 1 counts steps."""
        numbers = map(tf.get_static_value, what_is_added(value, sign, self._handle(variable)))
        return self._rows != 1 and any(n is not None and np.all(abs(n) == self._rows) for n in numbers)

    def _handle(self, variable: tf.Variable) -> Any:
        """Return the variable's handle in the graph; None if the graph has not used it."""
        return {id(outer): inner for outer, inner in self._graph.captures}.get(id(variable.handle))

    def _mixed(self, begin: int) -> set[int]:
        """Return the states that are also used in another way after their assignment."""
        inner = {id(inside): id(outer) for outer, inside in self._graph.captures}
        # A sum that is read has to be the sum so far, for logs; each micro-batch draws by a seed of its own.
        mixed = {
            key
            for key, state in self._assigned.items()
            if (state.read and self._kinds[key] == SUM)
            or (state.value.dtype.is_integer and feeds_random_numbers(state.value))
        }
        for number, op in enumerate(self._graph.get_operations()[begin:], begin):
            for tensor in op.inputs if op.type != "ReadVariableOp" else ():
                state = self._assigned.get(inner.get(id(tensor), 0))
                if state is not None and (
                    number >= state.at or any(tensor is written for written in func_graphs.written_by_op(op))
                ):
                    mixed.add(inner[id(tensor)])
        return mixed

    def _results(self) -> list[Any]:
        results = []
        for key, kind in self._kinds.items():
            state = self._assigned[key]
            square = self._square_of_mean(key, lambda key: self._assigned[key].value)
            value = state.value if square is None else state.value + square
            results.append(state.added if kind == SUM else value)
        return results

    def _square_of_mean(self, variance: int, value_of: Callable[[int], Any]) -> Any:
        """Return what the mean's change adds to a variance, counted from the old mean; None if nothing.

        The variance of a batch is the mean of ``variance + square`` over its parts, minus the square of the
        batch's own mean.  ``value_of`` is the new mean.
        """
        mean, new = self._mean_of.get(variance, (0, 1.0))
        if self._kinds.get(mean) != MEAN or self._kinds.get(variance) != MEAN:
            return None
        if self._assigned[mean].times > 1 or self._assigned[variance].times > 1:
            return None
        change = value_of(mean) - tf.convert_to_tensor(self._variables[mean])
        return change * change / new

    def add(self, number: int, values: Sequence[Any]) -> None:
        """Add a micro-batch's states, in the scope of its ops."""
        for (key, kind), value in zip(self._kinds.items(), values, strict=True):
            if kind == ONCE:  # the latest: a micro-batch that is looked at alone needs it
                self._sums[key] = {0: value}
                continue
            weighted = value if kind == SUM else times(value, self._split.weights[number])
            add_to(self._sums.setdefault(key, {}), self._replicas[number], weighted)

    def assign(self) -> None:
        totals = {}
        for key, sums in self._sums.items():
            parts = [part for _, part in sorted(sums.items())]
            total = added_up(parts, self._variables[key].device)
            totals[key] = times(total, self._split.scale) if self._kinds[key] == MEAN else total
        squares = {key: self._square_of_mean(key, totals.__getitem__) for key in totals}
        for key, total in totals.items():
            variable, square = self._variables[key], squares[key]
            if self._kinds[key] == SUM:
                variable.assign_add(total, read_value=False)
            else:
                # The maximum keeps rounding from making a variance negative.
                value = total if square is None else tf.maximum(total - square, 0.0)
                variable.assign(value, read_value=False)

    @property
    def guessed(self) -> list[str]:
        """Return the names of states that only their ops explain, without batch normalization's."""
        paths = [self._paths[key] for key, kind in self._kinds.items() if kind != ONCE]
        own = [path for path in paths if not any(path.startswith(f"{t}/") for t in self._normalizing)]
        return [path for path in own if path not in self._known]


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _with_gradient_of(before: object, value: object) -> Any:
    return tf.identity(value), lambda gradient: (gradient, None)


@dataclass(frozen=True)
class StateKinds:
    """Says by path how each state follows from micro-batches, and which do not.

    Of the states that do not, ``used`` are those on which the loss or a gradient depends, now or later.
    ``metrics`` names metrics that differ between two micro-batches and both in one.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    unlike: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assigned:
    """Holds the states before a step, after it on two micro-batches in one, and after it on each alone.

    ``in_turn`` holds states by name after the second micro-batch, which began with what the first left.
    """

    before: StateValues
    both: StateValues
    first: StateValues
    second: StateValues
    in_turn: Callable[[str], np.ndarray]

    def of(self, name: str) -> list[np.ndarray]:
        """Return one state before the step, after it on both together, on the first, and on the second."""
        return [np.asarray(states[name]) for states in (self.before, self.both, self.first, self.second)]


def state_kinds(assigned: Sequence[Assigned], used: Collection[str]) -> StateKinds:
    """Find how states follow in all of ``assigned``; ``used`` names states that training depends on."""
    kinds: dict[str, str] = {}
    unlike = []
    for name in assigned[0].both if assigned else ():
        # If moved states give values that are not finite, the other samples tell.
        finite = [each for each in assigned if all(map(_is_finite, each.of(name)))]
        kind = next((kind for kind in _KINDS if all(_holds(kind, each, name) for each in finite)), "")
        # Otherwise there is one update a step if possible, for example of an average of extremes.
        kinds[name] = kind or (MEAN if np.asarray(assigned[0].before[name]).dtype.kind == "f" else IN_TURN)
        if not kind or (kind == IN_TURN and name in used):
            unlike.append(name)
    return StateKinds(kinds, tuple(unlike), tuple(name for name in unlike if name in used))


def _is_finite(values: np.ndarray) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def _holds(kind: str, assigned: Assigned, name: str) -> bool:
    """Return whether a state follows in this way."""
    before, both, first, second = numbers = assigned.of(name)
    if kind == ONCE:
        return np.array_equal(both, first) and np.array_equal(both, second)
    if before.dtype.kind not in "fiu":
        return kind == IN_TURN and np.array_equal(both, assigned.in_turn(name))
    old, new, one, other = (values.astype(np.float64) for values in numbers)
    if kind == IN_TURN:
        expected = assigned.in_turn(name).astype(np.float64)
    else:
        expected = (one + other) / 2 if kind == MEAN else one + other - old
    if before.dtype.kind != "f":
        return kind != MEAN and np.array_equal(new, expected)
    rounding = 8 * np.finfo(before.dtype).eps * max(np.abs(each).max(initial=0.0) for each in (old, new))
    difference = float(np.abs(new - expected).max(initial=0.0))
    # A state that begins far away changes by much, whatever its parts are.
    sizes = [float(np.abs(change).max(initial=0.0)) for change in (new - old, one - other)]
    return bool(difference <= _ROUNDING * min(sizes) + rounding)


def moved(states: StateValues) -> StateValues:
    """Return the states with their numbers a little larger, so that a decay shows."""
    numbers = np.random.default_rng(0)
    return {
        name: (value + _MOVED * np.abs(numbers.standard_normal(value.shape))).astype(value.dtype)
        for name, value in states.items()
        if value.dtype.kind == "f"
    }


def in_steps(steps: int, now: np.ndarray, once: np.ndarray, twice: np.ndarray) -> np.ndarray:
    """Extrapolate a state ``steps`` later from two steps: each change is one share of the one before.

    Counts, ramps, decays and moving averages go on like this; what has two values stays as after two steps.
    """
    if now.dtype.kind not in "fiu":
        return twice
    old, new, newer = (np.asarray(values, np.float64) for values in (now, once, twice))
    change, next_change = new - old, newer - new
    share = np.clip(np.divide(next_change, change, out=np.zeros_like(old), where=change != 0), 0.0, 1.0)
    falling = np.minimum(share, 1.0 - 1e-9)
    value = old + change * np.where(share < 1.0, (1.0 - falling**steps) / (1.0 - falling), steps)
    if now.dtype.kind in "iu":
        limits = np.iinfo(now.dtype)
        value = np.clip(np.rint(value), limits.min, limits.max)
    return value.astype(now.dtype)


@contextlib.contextmanager
def set_to(variables: Mapping[str, Any], values: StateValues) -> Iterator[None]:
    """Set the variables to these values inside the block; those without a value stay as they are."""
    before = {name: variable.numpy() for name, variable in variables.items()}
    try:
        for name, value in values.items():
            variables[name].assign(value)
        yield
    finally:
        for name, value in before.items():
            variables[name].assign(value)
