"""The flat function of one step: all micro-batches, then the updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from grappler_passes.analysis.steps import STEP_ATTR, STEP_SCOPE
from grappler_passes.compat import runtime
from tf_ooo.compat import func_graphs, keras_loops, nests, tf_functions
from tf_ooo.planning.model.task import replica_of_part
from tf_ooo.tracing.assigned import first_drawn
from tf_ooo.tracing.collecting import Collecting
from tf_ooo.tracing.intercepting import CopiesNeeded, TurnsNeeded
from tf_ooo.tracing.logs import whole_logs
from tf_ooo.tracing.micro_batches import (
    BatchesSeen,
    Division,
    FixedRows,
    OpenBatch,
    OpenRows,
    StepRefused,
    computed_from,
    open_batch,
    rows_of,
)
from tf_ooo.tracing.one_by_one import InTurns, MicroBatches, OneByOne
from tf_ooo.tracing.states import IN_TURN, SUM, NotHeld, States
from tf_ooo.tracing.traces import traced_anew
from tf_ooo.tracing.variables import names_by_handle, optimizers_of

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")


class StepFunctions:
    """Callable with a batch: trains on its micro-batches in one function, one for each shape of a batch.

    ``tracing`` is entered around calls, ``applying``, given the batch, where the updates are traced: what
    averages over replicas.  ``check_captures`` is given what a function captures, before it runs for the
    first time; ``around_traces`` is entered around that, and tracing it.  ``untraced`` holds functions that
    were made in another way, by the signatures of their batches.  The gradients of each of so many
    ``replicas`` are added up by themselves.  Batches that ``seen`` says have no trace of their own share one,
    for any number of rows; None: each has its own.  Recurrent layers run their time steps in ``loops``.
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
        # Given the names of states that each micro-batch changes, and of states that are guessed at.
        self.note_changed: Callable[[list[str], list[str]], None] = lambda names, guessed: None
        # Given the name of an op that draws other random numbers for each micro-batch.
        self.note_drawn: Callable[[str], None] = lambda name: None
        # Given a line on what is not as in a step on the batch in one.
        self.note: Callable[[str], None] = lambda text: None
        self._functions: dict[Any, Any] = {}
        self._concrete: dict[Any, Any] = {}
        self.seen: BatchesSeen | None = None
        self._open: set[Hashable] = set()
        self.untraced: dict[Any, Callable[[Any], Any]] = {}
        self._in_turns = self._copies = False
        # States follow from micro-batches like this, as :class:`States` wants to know it.
        self.kinds: Mapping[str, str] = {}
        self._each: set[str] = set()

    def __call__(self, batch: object) -> Any:
        while True:  # each of these comes of a trace, and none twice
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
        """Return whether the latest trace was one for any number of rows; from now on there is none."""
        latest = next(reversed(self._functions), None)
        if self.seen is None or latest not in self._open:
            return False
        del self._functions[latest]
        self.seen = None
        return True

    def _opened(self, batch: object, signature: object) -> OpenBatch | None:
        """Return the batch as one of any number of rows; None: it is to be traced with its own."""
        copies = self._copies and len(set(self.division.split(rows_of(batch)))) > 1
        if not copies and (self.seen is None or self.seen.has_own_trace(signature)):
            return None
        return open_batch(batch, self.division)

    def _traced_open(self, opened: OpenBatch, batch: object) -> bool:
        """Traces the step for any number of rows; False: it has to know it."""
        function = self._make(batch, [opened.spec])
        try:
            self.check_captures(function.get_concrete_function().captured_inputs)
        except (CopiesNeeded, TurnsNeeded, NotHeld):
            raise
        except Exception as error:  # user's code may need the number, too; what else is wrong is raised again
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
        """``specs``: of a batch whose rows are open."""
        rows = self.division.split(rows_of(batch))
        model, loops, in_turns = self.model, self._loops, self._in_turns
        # Never more than one micro-batch: nothing to tell apart by name, and the bits of Keras' own step.
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
                # A metric's result after the last micro-batch.
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
    """Raises StepRefused where no optimizer has been called."""
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
