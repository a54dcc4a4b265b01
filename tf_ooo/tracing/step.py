"""Makes the flat function of one step (all micro-batches, then the updates), and the batch's logs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE
from grappler_passes.compat import runtime
from tf_ooo.compat import func_graphs, keras_loops, nests, tf_functions
from tf_ooo.planning.model.task import replica_of_part
from tf_ooo.tracing.assigned import first_drawn
from tf_ooo.tracing.collecting import Collecting
from tf_ooo.tracing.intercepting import CopiesNeeded, TurnsNeeded
from tf_ooo.tracing.micro_batches import (
    BatchesSeen,
    Division,
    FixedRows,
    OpenBatch,
    OpenRows,
    Split,
    StepRefused,
    behind,
    computed_from,
    open_batch,
    rows_of,
    upstream,
)
from tf_ooo.tracing.one_by_one import InTurns, MicroBatches, OneByOne
from tf_ooo.tracing.states import IN_TURN, SUM, NotHeld, States
from tf_ooo.tracing.traces import traced_anew
from tf_ooo.tracing.variables import names_by_handle, optimizers_of

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
_PASSES_ON = {"Cast", "Identity", "Reshape", "Squeeze"}
_REDUCES = {
    "All": tf.reduce_all,
    "Any": tf.reduce_any,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
    "Sum": tf.reduce_sum,
}
# A mean over rows, or a sum of means, is the mean of micro-batches.
_MEANS = {"AddN", "AddV2", "DivNoNan", "Mean", "Mul", "MulNoNan", "Neg", "RealDiv", "Sub", "Sum"}

MEAN = "Mean"
_WAY_OUT = "use microbatches=1 where it matters"


class StepFunctions:
    """Trains on a batch's micro-batches when called with it, by one function for each shape of a batch.

    ``tracing`` is entered around calls, ``applying``, given the batch, around tracing the updates: it
    averages over replicas.  ``check_captures`` is given a function's captures before its first run;
    ``around_traces`` is entered around that run and tracing.  ``untraced`` holds functions made in another
    way, by their batches' signatures.  The gradients of each of ``replicas`` are added up separately.
    Batches that ``seen`` gives no trace of their own share one, for any number of rows; None: each has its
    own.  Recurrent layers run their time steps in ``loops``.
    """

    def __init__(
        self,
        model: keras.Model,
        division: Division,
        tracing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        applying: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
        replicas: int = 1,
        loops: int = 1,
    ) -> None:
        self.model, self.division, self._tracing = model, division, tracing
        self._replicas, self._loops = replicas, loops
        self._applying = applying
        self.check_captures: Callable[[Iterable[Any]], None] = lambda captures: None
        self.around_traces: Callable[[], AbstractContextManager[Any]] = nullcontext
        # It is given the names of states that each micro-batch changes, and of states that are guessed at.
        self.note_changed: Callable[[list[str], list[str]], None] = lambda names, guessed: None
        # It is given the name of an op that draws other random numbers for each micro-batch.
        self.note_drawn: Callable[[str], None] = lambda name: None
        # It is given a line on what differs from a step on the batch in one.
        self.note: Callable[[str], None] = lambda text: None
        self._functions: dict[Any, Any] = {}
        self._concrete: dict[Any, Any] = {}
        self.seen: BatchesSeen | None = None
        self._open: set[Hashable] = set()
        self.untraced: dict[Any, Callable[[Any], Any]] = {}
        self._in_turns = self._copies = False
        # This says how states follow from micro-batches, as :class:`States` takes it.
        self.kinds: Mapping[str, str] = {}
        self._each: set[str] = set()

    def __call__(self, batch: object) -> Any:
        while True:  # each error asks for another trace, and none comes twice
            try:
                return self._run(batch)
            except TurnsNeeded as error:
                _LOG.debug("updates are traced in turns: %s", error)
                self._in_turns = self._copies = True
            except CopiesNeeded as error:
                _LOG.debug("micro-batches of unequal rows are traced as copies: %s", error)
                self._copies = True
            except NotHeld as error:
                _LOG.debug("each micro-batch assigns %s", error)
                self._each.update(error.paths)

    def _run(self, batch: object) -> Any:
        key = nests.signature(batch)
        if key in self.untraced:
            return self.untraced[key](batch)
        opened = None if key in self._functions else self._opened(batch, key)
        traced_key = key if opened is None else opened.key
        if traced_key in self._functions:
            with self._tracing():
                return self._called(traced_key, batch)
        with self.around_traces(), self._tracing(), traced_anew(self.model):
            if opened is not None and self._traced_open(opened, batch):
                return self._called(opened.key, batch)
            function = self._make(batch)
            traced = self._concrete[key] = function.get_concrete_function(batch)
            self.check_captures(traced.captured_inputs)
            self._functions[key] = function
            return self._called(key, batch)

    def _called(self, key: object, batch: object) -> Any:
        with runtime.calls_without_idle_optimizers():
            return self._functions[key](batch)

    def forget_open(self) -> bool:
        """Return whether the latest trace was for any number of rows; from now on there is none such."""
        latest = next(reversed(self._functions), None)
        if self.seen is None or latest not in self._open:
            return False
        del self._functions[latest]
        self.seen = None
        return True

    def _opened(self, batch: object, signature: object) -> OpenBatch | None:
        """Return the batch with open rows; None if it is to be traced with its own."""
        copies = self._copies and len(set(self.division.split(rows_of(batch)))) > 1
        if not copies and (self.seen is None or self.seen.has_own_trace(signature)):
            return None
        return open_batch(batch, self.division)

    def _traced_open(self, opened: OpenBatch, batch: object) -> bool:
        """Trace the step for any number of rows; return False if it has to know the number."""
        function = self._make(batch, [opened.spec])
        try:
            self.check_captures(function.get_concrete_function().captured_inputs)
        except (CopiesNeeded, TurnsNeeded, NotHeld):
            raise
        except Exception as error:  # user's code may need the number too; other errors come again
            _LOG.debug("each number of rows is traced by itself", exc_info=error)
            self.seen = None
            return False
        self._functions[opened.key] = function
        self._open.add(opened.key)
        return True

    def concrete_of(self, signature: object) -> Any:
        """Return the traced function for batches of this signature alone, if there is one."""
        return self._concrete.get(signature)

    @property
    def traced(self) -> int:
        return len(self._functions)

    def concrete(self, batch: object) -> Any:
        with self._tracing(), traced_anew(self.model):
            return self._make(batch).get_concrete_function(batch)

    def _make(self, batch: object, specs: Sequence[Any] | None = None) -> Any:
        """Make the function; ``specs`` describe a batch whose rows are open."""
        rows = self.division.split(rows_of(batch))
        model, loops, in_turns = self.model, self._loops, self._in_turns
        # With at most one micro-batch no names need a scope, and the bits are those of Keras' own step.
        scope = STEP_SCOPE if self.division.most > 1 else ""

        def step(batch: object) -> Any:
            split = FixedRows(rows) if specs is None else OpenRows(batch, len(rows))
            replicas = replica_of_part(split.count, self._replicas)
            collecting = Collecting(
                optimizers_of(model), split.weights, split.scale, replicas, specs is not None, in_turns
            )
            states = States(model, split, replicas, self.kinds, self._each)
            micro_batches = MicroBatches(model, split, collecting, states, scope)
            may_be_copies = specs is None and self.seen is not None and not self._copies
            parts = (
                InTurns(micro_batches, lambda: self._applying(batch))
                if in_turns
                else OneByOne(micro_batches, may_be_copies)
            )
            logs = parts.run(batch)
            for text in collecting.notes:
                self.note(text)
            if split.count > 1:
                known = [name for name, kind in self.kinds.items() if kind in (IN_TURN, SUM)]
                self.note_changed([name for name in parts.changed if name not in known], states.guessed)
                self.note_drawn(first_drawn())
            refuse_no_gradient(model, collecting.applied)
            with func_graphs.numbered_step(split.count, STEP_ATTR, scope):
                # This is a metric's result after the last micro-batch.
                metrics = names_by_handle(metric_variables(model))
                out = whole_logs(logs, split, lambda value: computed_from(value, metrics), self.note)
                states.assign()  # as in the forward pass, before the updates
                if not in_turns:
                    with self._applying(batch):
                        collecting.apply()
                return nests.with_variables_read(out)

        def traced_once(batch: object) -> Any:
            with tf_functions.variables_made_at_once(), keras_loops.in_parts(loops):
                return step(batch)

        return tf_functions.plain_function(traced_once, specs)


def refuse_no_gradient(model: keras.Model, updates: Sequence[Any]) -> None:
    """Raise StepRefused if no optimizer has been called."""
    if not updates and not model.trainable_weights:
        raise StepRefused(
            "the model has no trainable weights: there is no layer to cut it at; fit it as it is"
        )
    if not updates:
        raise StepRefused(
            "train_step applies no gradient through a Keras optimizer that is an attribute of the model; "
            "use optimizer.apply_gradients or optimizer.apply"
        )


def metric_variables(model: keras.Model) -> list[Any]:
    """Return the variables of all metrics of a model."""
    return [variable for metric in model.metrics for variable in metric.variables]


def whole_logs(
    logs: Sequence[Any], split: Split, depends: Callable[[Any], bool], note: Callable[[str], None]
) -> Any:
    """Return the logs of the whole batch; ``depends`` tells whether a tensor is a metric's result.

    A metric's result is the last micro-batch's.  Counts and other sums over rows are added up, extremes are
    taken over all, other numbers are averaged by rows.  Whole numbers and arrays computed from rows in
    another way are the last micro-batch's.  ``note`` is given a line for each that is not the batch's own.
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
        if not _reads_data(last):  # computed from weights, constants or common counts
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
    """Return numbers that :func:`whole_logs` combines without a note, by name, and how it does.

    ``logs`` are the first micro-batch's; the op that reduces them is named, or :data:`MEAN`.
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
    """Return the op that gives the batch's value from the micro-batches' values; empty if none is known."""
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
    """Return whether a tensor is computed from the step's inputs, not from variables alone."""
    return any(each.op.type == "Placeholder" and each.dtype != tf.resource for each in upstream([tensor]))


def _may_count_rows(tensor: tf.Tensor, rows: object) -> bool:
    """Say whether a tensor is a constant that may come from the number of rows, as ``tf.size`` does."""
    known = tf.get_static_value(tensor)
    if known is None or not isinstance(rows, int) or rows < 2 or known.dtype.kind not in "fiu":
        return False
    return bool(((known != 0) & (known % rows == 0)).any())


def _counts_rows(source: Any, split: Split, number: int) -> bool:
    """Return whether a tensor is the number of a micro-batch's rows; a constant if the trace knows it."""
    if source.op.type != "StridedSlice" or source.shape.rank != 0 or not source.dtype.is_integer:
        return False
    begin, shape = tf.get_static_value(source.op.inputs[1]), source.op.inputs[0]
    if begin is None or begin.size != 1 or int(begin[0]) != 0:
        return False
    known = tf.get_static_value(shape)
    return shape.op.type == "Shape" or known is not None and int(known[0]) == split.kind(number)
