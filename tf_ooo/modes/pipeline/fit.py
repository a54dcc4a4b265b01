"""The steps of a pipeline's fit: measured on one device, planned, cut, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import iterators, keras_losses, nests, train_function
from tf_ooo.compat.evaluation import Kind
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, OOOError
from tf_ooo.fit import progress
from tf_ooo.fit.distributed import FirstSteps
from tf_ooo.fit.in_place import InPlace
from tf_ooo.fit.measured import with_shared_link
from tf_ooo.fit.mode import Function, Training
from tf_ooo.fit.paying import StockFirst
from tf_ooo.fit.recorder import Watched
from tf_ooo.fit.slower_warning import ENOUGH
from tf_ooo.fit.stock_first import forget_steps, note_steps, run_stock_first
from tf_ooo.hosts.cluster import Cluster
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.memory import host_memory, in_host_memory
from tf_ooo.hosts.target import gone
from tf_ooo.modes.pipeline import tasks_of
from tf_ooo.modes.pipeline.dividing import micro_batch_notes, one_micro_batch_note
from tf_ooo.modes.pipeline.losses import check_loss
from tf_ooo.modes.pipeline.one_device import why_back, why_uncut
from tf_ooo.modes.pipeline.pieces import pieces_of
from tf_ooo.modes.pipeline.running import PlannedPipeline, RunningPipeline
from tf_ooo.modes.pipeline.state_kinds import StateKinds
from tf_ooo.planning.simulation.measured import repeated
from tf_ooo.rewriting.op_tasks import timed_ops
from tf_ooo.rewriting.parts import WHOLE, is_part, least_share
from tf_ooo.rewriting.staged import LayerByLayer, TracedBefore
from tf_ooo.rewriting.step_graph import StepGraph
from tf_ooo.tracing import sync
from tf_ooo.tracing.micro_batches import BatchesSeen, Division, StepRefused, parts_of, rows_of
from tf_ooo.tracing.traces import traced_anew
from tf_ooo.tracing.variables import all_variables, bytes_of, optimizers_of

if TYPE_CHECKING:
    import keras

    from tf_ooo.modes.pipeline.mode import PipelineMode

_LOG = logging.getLogger("tf_ooo")
# Finding out whether several devices are faster takes so many times as long as tracing a stock step, at most.
_TRACES = 4
# Micro-batches of the step that is taken apart where it does not run: gradients are added up from the second.
_TAKEN_APART = 2
_CALCULATED = "costs are calculated from shapes, not measured"
_NEVER_WHOLE = "no device is to hold the whole model"
_ALSO_WHOLE = (
    "the model was not built in tf_ooo.host_memory(): its weights and slots, {} bytes, also stand on {}, "
    "above the limit of {} bytes"
)
_LOSS_UNCHECKED = (
    f"the loss of a batch is not compared with its micro-batches' (check_loss): {_NEVER_WHOLE}; one that "
    "adds up rows, or compares them with one another, trains with the micro-batches' mean"
)
_METRIC = (
    "the log {} is that of micro-batches, not the batch's own: its metric says something else of two "
    "micro-batches than of both in one, as the largest number of a batch does; use microbatches=1 where it "
    "matters"
)
_FIRST_ONLY = f"whether rows of a batch look at each other was seen in the first batch only: {_NEVER_WHOLE}"
_UNLIKE = (
    "{}: what the forward pass assigns for a batch does not follow from what it assigns for micro-batches; "
    "nothing that is trained depends on it, and it becomes another than in stock training; microbatches=1 "
    "keeps stock's"
)


class PipelineSteps:
    """A fit: steps on one device until there is a plan, then steps of the pipeline."""

    def __init__(self, mode: PipelineMode, model: keras.Model) -> None:
        self._mode, self._model, self._target = mode, model, mode.distributed.target
        self._first: FirstSteps | None = None
        self._running: RunningPipeline | None = None
        self._before: TracedBefore | None = None  # the step as it ran on one device
        self._in_place: InPlace | None = None
        self._planned_anew = False  # once in a fit
        self._measured_batches: Any = None  # their signature
        self._uncut = 0  # steps before the plan
        self._stock: Callable[[Any], Any] | None = None  # trains on one device
        self._stock_first = self._whether_it_pays()
        forget_steps(mode.describe())

    @functools.cached_property
    def _seen(self) -> BatchesSeen | None:
        """The kinds of batches; None: each is traced by itself."""
        return BatchesSeen() if self._mode.may_leave_rows_open(self._model) else None

    def _whether_it_pays(self) -> StockFirst | None:
        """Return what finds out from stock steps whether a pipeline pays; None: nobody asks."""
        steps, together = self._mode.distributed.steps, train_function.steps_per_execution(self._model)
        if steps is None or not self._mode.may_stay_stock(self._model):
            return None
        return StockFirst(_TRACES, -(-steps // together), together, self._mode.stock_trace_s)

    def run(self, iterator: object) -> Any:
        """Return one execution."""
        if self._stock is not None:
            return self._stock(iterator)
        if self._stock_first is not None and self._mode.distributed.stock is not None:
            return self._run_stock(self._stock_first, self._mode.distributed.stock, iterator)
        outputs, batches = None, iterators.take(iterator, train_function.steps_per_execution(self._model))
        for number, batch in enumerate(batches, 1):
            try:
                outputs = self.step(batch, iterator)
            except StepRefused as error:
                if not self._mode.may_fall_back():
                    raise
                self._mode.train_on_one_device(str(error))
                return self._go_on_with_stock(batches[number - 1 :], iterator)
            if self._mode.one_device:
                return self._go_on_with_stock(batches[number:], iterator) or outputs
        if not batches:
            raise StopIteration
        return outputs

    def _run_stock(self, first: StockFirst, stock: Callable[[Any], Any], iterator: object) -> Any:
        """Return one execution as Keras runs it; the last of them tells whether the fit is long enough."""
        outputs = run_stock_first(first, stock, lambda: stock(iterator))
        self._mode.stock_trace_s = first.trace_s
        if first.why_not:
            note_steps(self._mode.describe(), first)
            self._mode.train_on_one_device(first.why_not)
            self._stock = stock
        elif first.begins:
            self._stock_first = None
        return outputs

    def _go_on_with_stock(self, rest: list[Any], iterator: object) -> Any:
        """Go on with stock, first with the rest of this execution, whose logs it returns; None: no rest."""
        self._bring_back()
        self._uncut, self._stock = 0, self._mode.distributed.stock
        if self._stock is None or not rest:
            return None
        with train_function.steps_per_execution_set_to(self._model, len(rest)):
            return self._stock(iterators.iterator_over(rest, iterator))

    def step(self, batch: object, iterator: object) -> Any:
        """Return one step on one batch; its logs."""
        mode, pipeline = self._mode, self._mode.pipeline
        self._look_at_later(batch)
        if pipeline is None and mode.planned_from is not None:
            self._build(batch, iterator)
            pipeline = mode.plan_from(*mode.planned_from, self._model)
        if pipeline is None:
            return self._first_step(batch, iterator)
        pipeline = self._large_enough(pipeline, batch)
        running = self._running_with(pipeline)
        outputs = self._cut_step(running, pipeline, batch)
        if running.not_planned:
            self._forget_plan(running.not_planned)
        elif len(pipeline.step_s) == ENOUGH:
            self._look_at_gain()
        return outputs

    def _forget_plan(self, why: str) -> None:
        """The next step is taken apart and planned, as if there had been no plan."""
        self._planned_anew, self._in_place = True, None
        self._mode.pipeline = self._mode.planned_from = None
        self._warn(f"a step ran in stock order, and the next ones are planned anew: {why}")
        self._bring_back()

    def _look_at_gain(self) -> None:
        """Says that several devices are slower than one, or leaves them."""
        mode = self._mode
        why = why_back(mode.describe()) if mode.may_fall_back() else ""
        if why:
            mode.train_on_one_device(why)
        else:
            mode.say_if_slower()

    def _build(self, batch: object, iterator: object) -> None:
        """All variables; then, unless that was switched off, the loss of this first batch is looked at."""
        model, options = self._model, self._mode.options
        self._mode.find_limit()
        on_host, rows = in_host_memory(model), self._mode.division.split(rows_of(batch))
        with host_memory() if on_host else contextlib.nullcontext():
            sync.build(model, optimizers_of(model), model.train_step, iterator)
            if options.check_loss and (on_host or not self._never_whole):  # of a few rows; nothing is kept
                self._check_loss(batch, len(rows), on_host)
            else:
                self._mode.states, self._mode.later = StateKinds(), None
        self._say_what_changes(rows)
        if not self._never_whole or on_host:
            return
        if options.first_steps == "auto" and self._mode.ranks.engine.size == 1:  # so it is too large
            size, limit_bytes = bytes_of(all_variables(model)), self._mode.limit.least_bytes
            self._warn(_ALSO_WHOLE.format(size, home_device(), limit_bytes))
        if options.check_loss and keras_losses.own_loss_code(model):
            self._warn(_LOSS_UNCHECKED)

    def _check_loss(self, batch: object, microbatches: int, on_host: bool) -> None:
        """Once for such batches, until the model is compiled again."""
        mode, model = self._mode, self._model
        key = mode.distributed.stock, nests.signature(batch), microbatches
        if key[0] is None or mode.checked != key:
            with traced_anew(model):
                checked = check_loss(model, batch, microbatches, gradients=not on_host)
            mode.states, mode.later, mode.checked = checked.states, checked.later, key
        if self._never_whole:
            self._compare_first_only()
        if mode.states.unlike:
            self._warn(_UNLIKE.format(", ".join(mode.states.unlike)))
        for name in mode.states.metrics:
            self._warn(_METRIC.format(name))

    def _look_at_later(self, batch: object) -> None:
        """StepRefused where rows meet in this batch that did not in the first one."""
        built = self._first is not None or self._mode.pipeline is not None
        note = self._mode.later.check(batch, self._moved) if built and self._mode.later else ""
        if note:
            self._mode.describe().notes.append(note)

    def _moved(self) -> Mapping[int, Any]:
        """The present variables by the ``id`` of their old handles.  BackendError: a worker is gone."""
        if self._running is None:
            return {}
        if self._target.lost():  # a read from it would wait for ever
            raise BackendError("a worker is gone")
        return self._running.replaced

    def _compare_first_only(self) -> None:
        """There is no device on which the whole model may run beside the pipeline."""
        if self._mode.later is not None:
            self._mode.later = None
            self._mode.describe().notes.append(_FIRST_ONLY)

    def _say_what_changes(self, rows: Sequence[int]) -> None:
        """Warns of what micro-batches of so many rows change in the result, before the first step."""
        whole = one_micro_batch_note(self._model, self._mode.options)
        if whole:
            self._mode.describe().notes.append(whole)
        for text in micro_batch_notes(self._model, rows) if len(rows) > 1 else ():
            self._warn(text)

    def _warn(self, note: str) -> None:
        if note in self._mode.describe().notes:
            return
        self._mode.describe().notes.append(note)
        _LOG.warning("%s", note)

    # -- before the plan ---------------------------------------------------------------------------

    def _first_step(self, batch: object, iterator: object) -> Any:
        """Run a first step, on one device; the last of them makes the plan."""
        first = self._first
        if first is None:
            self._build(batch, iterator)
            rows = self._mode.division.split(rows_of(batch))
            if self._never_whole and len(rows) > _TAKEN_APART:
                # Enough to know all from; the whole step takes many times as long to trace.  In one replica,
                # so that there is a sum.
                first = self._begun(batch, Division(_TAKEN_APART), 1)
                first.leave_rows_open(None)
                first.run(parts_of(batch, (sum(rows[:_TAKEN_APART]), sum(rows[_TAKEN_APART:])))[0])
                return self._first_cut_step(first, batch, iterator)
            first = self._begun(batch, self._mode.division, self._mode.replicas_at_first)
        outputs = first.run(batch)
        if first.rested:
            return self._first_cut_step(first, batch, iterator)
        self._uncut = first.seen
        if first.done:
            try:
                measured = first.measured(self._target)
            except BackendError as error:  # there is no graph; all steps so far have trained
                if not self._mode.may_fall_back():
                    raise
                self._mode.train_on_one_device(str(error))
                return outputs
            self._make_plan(*measured, first)
            serial_s = self._mode.describe().pipeline.serial_step_s
            self._compare(batch, first, serial_s)
        return outputs

    def _compare(self, batch: object, first: FirstSteps, serial_s: float) -> None:
        """Compare with one device; where that may train instead, also in a fit of unknown length."""
        mode = self._mode
        asked, unknown = mode.options.compare, mode.distributed.steps is None
        compare = True if asked is None and unknown and mode.may_fall_back() else asked
        too_short = mode.distributed.compare(self._model, batch, first, compare, serial_s)
        if mode.may_fall_back():
            why = why_uncut(mode.describe(), len(self._target.devices), too_short)
            if why:
                mode.train_on_one_device(why)

    def _begun(self, batch: object, division: Division, replicas: int) -> FirstSteps:
        mode, model = self._mode, self._model
        layers = LayerByLayer(home_device(), self._share(batch), self._check_step)
        applying = mode.ranks.applying(model)
        self._first = FirstSteps(
            model,
            layers,
            division,
            mode.options,
            mode.describe(),
            applying,
            replicas,
            loops=mode.loops_of(model),
        )
        self._first.leave_rows_open(self._seen)
        self._first.states_follow(mode.states.kinds)
        return self._first

    def _check_step(self, step: StepGraph) -> bool:
        """Check the step; return whether one device is to run it."""
        self._mode.check_step(step)
        return not (self._never_whole or self._mode.exceeds_limit(step))

    @functools.cached_property
    def _never_whole(self) -> bool:
        """Return whether it is known before the step is traced that no device is to run all of it.

        Asked for when all variables are there; ranks decide alike.
        """
        asked, limit_bytes = self._mode.options.first_steps, self._mode.limit.least_bytes
        if asked != "auto":
            return asked == "cut"
        engine = self._mode.ranks.engine
        if engine.size > 1:  # limits may differ among them
            return any(engine.gather(in_host_memory(self._model)))
        too_large = limit_bytes is not None and bytes_of(all_variables(self._model)) > limit_bytes
        return too_large or in_host_memory(self._model)

    def _first_cut_step(self, first: FirstSteps, batch: object, iterator: object) -> Any:
        """The step was taken apart, and has not run."""
        mode = self._mode
        self._compare_first_only()
        step, costs = first.measured(self._target)
        count = len(mode.division.split(rows_of(batch)))
        self._make_plan(dataclasses.replace(step, count=count), costs, first)
        mode.describe().no_baseline, mode.describe().batch_rows = _NEVER_WHOLE, rows_of(batch)
        alone = mode.ranks.engine.size == 1  # ranks would have to be asked for the same step
        if mode.options.costs is None and mode.options.profile_steps and alone:
            self._measured_batches = nests.signature(batch)
            self._in_place = InPlace(step, count, self._target, mode.options.profile_steps)
        return self.step(batch, iterator)

    def _share(self, batch: object) -> float:
        """Return the least share of the forward pass for a part of a layer; ranks divide alike, or not at
        all.

        A schedule of the user's own that was planned with ``costs`` of whole layers counts those.
        """
        mode = self._mode
        given, engine = mode.options.costs, mode.ranks.engine
        whole = given is not None and not any(is_part(layer.name) for layer in given.layers)
        if mode.own is not None and whole:
            return WHOLE
        if engine.size > 1 and len(set(engine.gather(repr(nests.signature(batch))))) > 1:
            return WHOLE
        return least_share(len(mode.distributed.target.devices))

    def _make_plan(self, step: StepGraph, costs: CostTable, first: FirstSteps) -> None:
        mode, started = self._mode, time.perf_counter()
        mode.rows = first.rows
        with progress.said("planning, where to cut the model and in which order its tasks run"):
            mode.plan_from(step, mode.ranks.shared(with_shared_link(costs, self._target)), self._model)
        mode.describe().plan_seconds = time.perf_counter() - started
        if mode.ranks.engine.size == 1 and not isinstance(self._target, Cluster):
            self._before = first.traced_before()
        first.close()
        self._first = None

    # -- with a plan -------------------------------------------------------------------------------

    def _cut_step(self, running: RunningPipeline, pipeline: PlannedPipeline, batch: object) -> Any:
        """One step; where it was planned with calculated costs, up to three of the first are measured."""
        in_place, timed = self._in_place, pipeline.step_s
        if in_place is None or not timed or nests.signature(batch) != self._measured_batches:
            return running.step(batch)
        before = len(timed)
        outputs = in_place.run(lambda: running.step(batch), max(timed))
        if len(timed) > before:
            timed.pop()  # the profiler's
        if in_place.done:
            self._in_place = None
            self._plan_again(in_place)
        return outputs

    def _plan_again(self, in_place: InPlace) -> None:
        mode, graph = self._mode, self._mode.describe().rewritten_graph
        costs = in_place.costs([node.name for node in graph.node])
        if costs is None:
            mode.describe().notes.append(f"{_CALCULATED}: {in_place.why_not}")
            return
        try:
            with progress.said("planning again, with measured costs"):
                other = mode.plan_again(costs)
        except OOOError as error:
            mode.describe().notes.append(f"the plan with calculated costs stays: {error}")
            return
        if other:
            self._bring_back()

    def _bring_back(self) -> None:
        """Bring the variables back for another plan. BackendError: a variable's worker is gone."""
        lost = self.restore()
        if lost:
            raise gone(lost, self._target.explain)

    def _large_enough(self, pipeline: PlannedPipeline, batch: object) -> PlannedPipeline:
        """Plans anew for a batch of more micro-batches, with a limit of memory also for larger ones."""
        mode = self._mode
        rows, known = mode.division.split(rows_of(batch)), mode.rows
        larger = mode.limit.bytes is not None and 0 < known < max(rows)
        if larger:
            more_bytes = pipeline.mesh.peak_bytes * (max(rows) / known - 1)
            larger = not mode.limit.is_far_from(pipeline.mesh.kept_limit_bytes + more_bytes)
        planned = pipeline.plan.schedule.microbatches * pipeline.mesh.replicas
        if mode.planned_from is None or (len(rows) <= planned and not larger):
            return pipeline
        step, costs = mode.planned_from
        if larger:
            layers = tuple(layer.scaled(max(rows) / known) for layer in costs.layers)
            costs = dataclasses.replace(costs, layers=layers)
        if self._in_place is not None:  # of smaller ones
            self._in_place = None
            mode.describe().notes.append(f"{_CALCULATED}: a larger batch came first")
        pipeline = mode.plan_with(dataclasses.replace(step, count=len(rows)), costs, self._model)
        if larger:
            mode.rows, mode.planned_from = max(rows), (step, costs)
        self._bring_back()
        return pipeline

    def _running_with(self, pipeline: PlannedPipeline) -> RunningPipeline:
        """Moves the variables, if they are not yet; from now on steps are placed and ordered."""
        if self._running is not None:
            return self._running
        mode, model = self._mode, self._model
        applying = mode.ranks.applying(model)
        before, self._before = self._before, None
        alike = before is not None and pipeline.mesh.replicas == 1 == mode.replicas_at_first
        pieces = pieces_of(pipeline.mesh, mode.rows, mode.limit.planned_bytes)
        taken = before if alike else None
        running = RunningPipeline(
            model,
            self._target,
            pipeline,
            applying,
            mode.options,
            mode.division,
            mode.describe(),
            pieces,
            taken,
            loops=mode.loops_of(model),
        )
        running.may_plan_anew = mode.ranks.engine.size == 1 and not self._planned_anew
        running.leave_rows_open(self._seen)
        running.states_follow(mode.states.kinds)
        self._running, self._uncut = running, 0
        running.begin()
        return running

    # -- at the end --------------------------------------------------------------------------------

    def training(self) -> Training:
        """Return the hooks of these steps."""
        return Training(
            self.run,
            self.restore,
            explain=self._target.explain,
            replaced=self._mode.distributed.note_replaced,
            ended=self.ended,
            evaluating=self.evaluating,
            watched=self.watched,
        )

    def evaluating(self, kind: Kind, function: Function) -> Function:
        """Return what evaluates or predicts: Keras' own function until the variables are moved."""
        return function if self._running is None else self._running.evaluating(kind, function)

    def watched(self) -> Watched | None:
        """Once a step of the plan has run that traced nothing."""
        pipeline, graph = self._mode.pipeline, self._mode.describe().rewritten_graph
        if self._running is None or self._in_place or pipeline is None or not pipeline.step_s:
            return None
        addresses = self._target.addresses if isinstance(self._target, Cluster) else ()
        replicas = pipeline.mesh.replicas
        return Watched(
            repeated(pipeline.mesh.schedule, pipeline.turns),
            lambda: timed_ops(graph, tasks_of(graph, replicas)),
            pipeline.step_s,
            addresses=addresses,
        )

    def ended(self) -> None:
        """Says so where no step has been cut, and where one device is faster."""
        self._mode.distributed.note_too_short(self._uncut)
        if self._in_place is not None:
            self._in_place = None
            self._mode.describe().notes.append(f"{_CALCULATED}: the fit had too few steps")
        if not self._mode.one_device:
            self._mode.say_if_slower()

    def restore(self) -> list[str]:
        """Variables back to where they were; names those that are lost."""
        if self._first is not None:
            self._first.close()
            self._first = None
        self._before = None
        if self._running is None:
            return []
        lost = self._running.restore()
        self._running = None
        return lost
