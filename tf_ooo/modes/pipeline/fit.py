"""``model.fit`` as a pipeline: profile, plan, move the variables, run, move them back."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import iterators, keras_losses, train_function
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, MemoryLimitError, ScheduleError
from tf_ooo.fit import progress
from tf_ooo.fit.distributed import Distributed, FirstSteps, check_model
from tf_ooo.fit.measured import check_costs, unknown_sizes, with_shared_link
from tf_ooo.fit.mode import Training
from tf_ooo.fit.recorder import Watched
from tf_ooo.hosts.cluster import Cluster
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.target import gone
from tf_ooo.modes.pipeline import tasks_of
from tf_ooo.modes.pipeline.advice import ENOUGH, advice
from tf_ooo.modes.pipeline.company import Company
from tf_ooo.modes.pipeline.losses import check_loss
from tf_ooo.modes.pipeline.options import Pipeline
from tf_ooo.modes.pipeline.own_schedule import check_own, check_recomputed, layers_named
from tf_ooo.modes.pipeline.partition import Cutter, units_of
from tf_ooo.modes.pipeline.planning import SCHEDULES, Wanted, make_plan, named_bounds, own_cuts
from tf_ooo.modes.pipeline.reporting import fill_report, note_micro_batches
from tf_ooo.modes.pipeline.running import PlannedPipeline, RunningPipeline
from tf_ooo.options.base import is_file
from tf_ooo.planning.choosing.recompute import NONE
from tf_ooo.planning.model.schedule_file import ScheduleFile, read_schedule
from tf_ooo.report.gain import Gain
from tf_ooo.report.report import Report, fill_step_times
from tf_ooo.rewriting.parts import is_part
from tf_ooo.rewriting.repeating import layers_that_cannot
from tf_ooo.rewriting.staged import LayerByLayer
from tf_ooo.rewriting.unrolled_tasks import Step
from tf_ooo.tracing import sync
from tf_ooo.tracing.micro_batches import rows_of, split_rows
from tf_ooo.tracing.optimizers import optimizers_of

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")


class PipelineMode:
    """Nothing falls back here: the model is distributed by request.

    Attributes:
        planned_from: a step that was taken apart, and its costs.  Set before the first step from another fit
            of a model with the same names, it spares measuring.
        rows: of the largest micro-batch that is planned for; 0: unknown.
        own: a schedule of the user's own, read again before each fit.
    """

    keeps_stock = False
    compiles = False

    def __init__(self, options: Pipeline) -> None:
        self.options = options
        self.company = Company()
        self.planned_from: tuple[Step, CostTable] | None = None
        self.pipeline: PlannedPipeline | None = None
        self.rows = 0
        self.own: ScheduleFile | None = None
        self.advise: Callable[[Gain], str] | None = None
        self.distributed = Distributed(options.mode)

    def join(self) -> Engine:
        """This process trains alone."""
        return self.company.engine

    def check(self, model: keras.Model, steps: int | None) -> None:
        """BackendError: no such devices, or a model that cannot be cut.  ScheduleError: a schedule's file."""
        check_model(model, self.options.mode)
        summed = keras_losses.summed_losses(model)
        if summed:
            raise BackendError(
                f"loss {summed[0]!r} adds up rows (reduction='sum' or none), and micro-batches are averaged; "
                "use reduction='sum_over_batch_size' and a learning rate that is larger by the batch size"
            )
        self.distributed.place(model, self.options.devices, self.company.engine.local_rank)
        if is_file(self.options.schedule):
            self._read_own(self.options.schedule)

    def _read_own(self, path: str | os.PathLike[str]) -> None:
        """The user's own schedule; where it is another than before, it is planned with anew."""
        before, options = self.own, self.options
        if not os.path.exists(path):
            raise ScheduleError(
                f"schedule={os.fspath(path)!r}: there is no such file; Schedule.to_text() and tf-ooo plan "
                f"--out write one; by name: auto, {', '.join(SCHEDULES)}"
            )
        own = read_schedule(path)
        replicas, devices = self.company.engine.size, len(self.distributed.target.devices)
        check_own(own, devices, options.microbatches, replicas)
        if options.recompute != NONE:
            raise own.error(
                f"recompute={options.recompute!r}: the file's 'recompute' line says which layers do"
            )
        if options.stages is not None and layers_named(own):
            raise own.error("the file has 'stage' lines, and stages= is given: leave one out", "stage")
        if before is not None and before.schedule != own.schedule:
            self.pipeline = None
        self.own = own

    def check_step(self, step: Step) -> None:
        """OptionsError, ScheduleError: before the first step runs, for stages that it does not have."""
        names = [layer.name for layer in step.known.graph.layers]
        layers = tuple(LayerCosts(1.0, 1.0, 1.0, name=name) for name in names)
        cutter = Cutter(layers, units_of(len(names), step.known.glued), Link(), step.count)
        if self.own is not None:
            check_recomputed(
                self.own, len(names), layers_that_cannot(step) if self.own.schedule.recompute else ()
            )
            own_cuts(self.own, cutter, self.options.stages, by_bytes=False)
        elif self.options.stages is not None:
            named_bounds(cutter, self.options.stages)

    def prepare(self, model: keras.Model, steps: int | None) -> Training:
        """The training of the model's :class:`PipelineSteps`."""
        return self.steps_of(model, steps).training()

    def steps_of(self, model: keras.Model, steps: int | None) -> PipelineSteps:
        """With the plan of the fit before, where that was of the same step on the same devices."""
        trained_before = self.distributed.known is not None
        if self.distributed.begin(model, steps):
            self.pipeline = None
            self.planned_from = None if trained_before else self.planned_from
        return PipelineSteps(self, model)

    def describe(self) -> Report:
        """With the seconds of the steps so far."""
        if self.pipeline is not None:
            fill_step_times(self.distributed.report, self.pipeline.step_s)
        return self.distributed.report

    def say_if_slower(self) -> None:
        """Once: that one device is faster, and what would be better."""
        report, advise = self.describe(), self.advise
        gain = report.gain
        if gain is None or not gain.slower or advise is None:
            return
        self.advise = None
        text = advise(gain)
        report.notes.append(text)
        _LOG.warning("%s", text)

    def plan_from(self, step: Step, costs: CostTable, model: keras.Model) -> PlannedPipeline:
        """Plans for a step with given costs.  Raises OptionsError where they are another model's."""
        check_costs(costs, [layer.name for layer in step.known.graph.layers])
        costs = with_shared_link(costs, self.distributed.target)
        self.planned_from = (step, costs)
        self.distributed.report.costs = costs
        return self.plan_with(step, costs, model)

    def plan_with(self, step: Step, costs: CostTable, model: keras.Model) -> PlannedPipeline:
        """Plans, and says so in the report."""
        report, devices = self.distributed.report, tuple(self.distributed.target.devices)
        report.memory_limit_bytes = limit_bytes = self.options.memory_limit_bytes
        unknown = unknown_sizes(step) if limit_bytes is not None else ()
        if limit_bytes is not None and unknown:
            raise MemoryLimitError(limit_bytes, None, unknown)
        wanted = Wanted(
            schedule=self.options.schedule,
            devices=len(devices),
            microbatches=step.count,
            link=costs.link,
            memory_limit_bytes=limit_bytes,
            options=self.options.policy_options,
            stages=self.options.stages,
            own=self.own,
            recompute=self.options.recompute,
            fixed=layers_that_cannot(step) if self.options.recompute != NONE else frozenset(),
        )
        units = units_of(len(costs.layers), step.known.glued)
        planned = make_plan(costs.layers, units, wanted)
        self.advise = functools.partial(advice, planned, costs.layers, units, wanted)
        self.pipeline = PlannedPipeline(planned, step, devices)
        if step.count > 1:
            note_micro_batches(report, model)
        fill_report(report, planned, step, costs, devices)
        return self.pipeline


class PipelineSteps:
    """A fit: steps on one device until there is a plan, then steps of the pipeline."""

    def __init__(self, mode: PipelineMode, model: keras.Model) -> None:
        self._mode, self._model, self._target = mode, model, mode.distributed.target
        self._first: FirstSteps | None = None
        self._running: RunningPipeline | None = None
        self._uncut = 0  # steps before the plan

    def run(self, iterator: Any) -> Any:
        """One execution."""
        outputs, batches = None, iterators.take(iterator, train_function.steps_per_execution(self._model))
        for batch in batches:
            outputs = self.step(batch, iterator)
        if not batches:
            raise StopIteration
        return outputs

    def step(self, batch: Any, iterator: Any) -> Any:
        """One step on one batch; its logs."""
        mode, pipeline = self._mode, self._mode.pipeline
        if pipeline is None and mode.planned_from is not None:
            self._build(batch, iterator)
            pipeline = mode.plan_from(*mode.planned_from, self._model)
        if pipeline is None:
            return self._first_step(batch, iterator)
        running = self._running_with(self._large_enough(pipeline, batch))
        outputs = running.step(batch)
        if len(pipeline.step_s) == ENOUGH:
            mode.say_if_slower()
        return outputs

    def _build(self, batch: Any, iterator: Any) -> None:
        """All variables; then, unless that was switched off, the loss of this first batch is looked at."""
        sync.build(self._model, optimizers_of(self._model), self._model.train_step, iterator)
        options = self._mode.options
        if options.check_loss:
            check_loss(self._model, batch, options.microbatches)

    # -- before the plan ---------------------------------------------------------------------------

    def _first_step(self, batch: Any, iterator: Any) -> Any:
        """On one device; the last of them makes the plan."""
        first = self._first
        if first is None:
            self._build(batch, iterator)
            mode, model = self._mode, self._model
            layers = LayerByLayer(home_device(), self._keep_layers_whole(), mode.check_step)
            applying, parts = mode.company.applying(model), mode.options.microbatches
            self._first = first = FirstSteps(model, layers, parts, mode.options, mode.describe(), applying)
        outputs = first.run(batch)
        self._uncut = first.seen
        if first.done:
            self._make_plan(first, batch)
        return outputs

    def _keep_layers_whole(self) -> bool:
        """Other replicas, or those who measured ``costs``, may have batches that are divided otherwise."""
        given = self._mode.options.costs
        if given is not None:
            return not any(is_part(layer.name) for layer in given.layers)
        return self._mode.company.engine.size > 1

    def _make_plan(self, first: FirstSteps, batch: Any) -> None:
        mode, started = self._mode, time.perf_counter()
        step, costs = first.measured(self._target)
        mode.rows = first.rows
        with progress.said("planning, where to cut the model and in which order its tasks run"):
            mode.plan_from(step, mode.company.shared(with_shared_link(costs, self._target)), self._model)
        mode.describe().plan_seconds = time.perf_counter() - started
        first.close()
        self._first = None
        serial_s = mode.describe().pipeline.serial_step_s
        mode.distributed.compare(self._model, batch, first, mode.options.compare, serial_s)

    # -- with a plan -------------------------------------------------------------------------------

    def _large_enough(self, pipeline: PlannedPipeline, batch: Any) -> PlannedPipeline:
        """Plans anew for a batch of more micro-batches, with a limit of memory also for larger ones."""
        mode = self._mode
        rows, known = split_rows(rows_of(batch), mode.options.microbatches), mode.rows
        larger = mode.options.memory_limit_bytes is not None and 0 < known < max(rows)
        if mode.planned_from is None or (len(rows) <= pipeline.plan.schedule.microbatches and not larger):
            return pipeline
        step, costs = mode.planned_from
        if larger:
            layers = tuple(layer.scaled(max(rows) / known) for layer in costs.layers)
            costs = dataclasses.replace(costs, layers=layers)
        pipeline = mode.plan_with(dataclasses.replace(step, count=len(rows)), costs, self._model)
        if larger:
            mode.rows, mode.planned_from = max(rows), (step, costs)
        lost = self.restore()
        if lost:
            raise gone(lost, self._target.explain)
        return pipeline

    def _running_with(self, pipeline: PlannedPipeline) -> RunningPipeline:
        """Moves the variables, if they are not yet; from now on steps are placed and ordered."""
        if self._running is not None:
            return self._running
        mode, model = self._mode, self._model
        applying = mode.company.applying(model)
        running = RunningPipeline(model, self._target, pipeline, applying, mode.options, mode.describe())
        self._running, self._uncut = running, 0
        running.begin()
        return running

    # -- at the end --------------------------------------------------------------------------------

    def training(self) -> Training:
        """Of these steps."""
        return Training(
            self.run,
            self.restore,
            explain=self._target.explain,
            replaced=self._mode.distributed.note_replaced,
            ended=self.ended,
            watched=self.watched,
        )

    def watched(self) -> Watched | None:
        """Once a step of the plan has run that traced nothing."""
        pipeline, graph = self._mode.pipeline, self._mode.describe().rewritten_graph
        if self._running is None or pipeline is None or not pipeline.step_s:
            return None
        addresses = self._target.addresses if isinstance(self._target, Cluster) else ()
        schedule = pipeline.plan.schedule
        return Watched(schedule, functools.partial(tasks_of, graph), pipeline.step_s, addresses=addresses)

    def ended(self) -> None:
        """Says so where no step has been cut, and where one device is faster."""
        self._mode.distributed.note_too_short(self._uncut)
        self._mode.say_if_slower()

    def restore(self) -> list[str]:
        """Variables back to where they were; names those that are lost."""
        if self._first is not None:
            self._first.close()
            self._first = None
        if self._running is None:
            return []
        lost = self._running.restore()
        self._running = None
        return lost
