"""Plans for the trained model: within its limit, for its costs, and again as more is known."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_loops, train_function
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import MemoryLimitError
from tf_ooo.fit.distributed import Distributed
from tf_ooo.fit.measured import costs_of_parts, layers_of, measured_costs, unknown_sizes, with_shared_link
from tf_ooo.fit.timing import ONE_DEVICE
from tf_ooo.hosts.cluster import Cluster
from tf_ooo.hosts.devices import available_devices
from tf_ooo.hosts.memory import in_host_memory
from tf_ooo.hosts.ranks.base import Engine, SingleEngine
from tf_ooo.hosts.system_memory import available_bytes
from tf_ooo.modes.pipeline.mesh import (
    Mesh,
    loop_parts,
    make_mesh,
    mesh_within,
    on_best_devices,
    with_whole_parts,
)
from tf_ooo.modes.pipeline.options import AUTO, Pipeline
from tf_ooo.modes.pipeline.partition import Cutter, check_recomputed, units_of
from tf_ooo.modes.pipeline.planning import (
    Limit,
    PlanRequest,
    fits_whole,
    limit_of,
    named_bounds,
    own_cuts,
)
from tf_ooo.modes.pipeline.reporting import advice, fill_report, forget_whole_parts, note_loops_and_turns
from tf_ooo.planning.building.stages import stage_of_layer
from tf_ooo.planning.choosing.recomputing import NONE
from tf_ooo.planning.model.schedule_file import ScheduleFile
from tf_ooo.report.parts import Outcome, fall_back
from tf_ooo.rewriting.passes import layers_that_cannot
from tf_ooo.rewriting.placing import Homes
from tf_ooo.rewriting.staged import StagedPlan
from tf_ooo.rewriting.step_graph import StepGraph, variable_layers
from tf_ooo.tracing.averaging import Averaging
from tf_ooo.tracing.micro_batches import Division, rows_of
from tf_ooo.tracing.variables import optimizers_of
from tf_ooo.units import first_of, seconds_text

if TYPE_CHECKING:
    import keras

    from tf_ooo.modes.pipeline.placed_step import PlacedStep

# A plan for costs of another measurement has to be better by so much.
_LEAST_GAIN = 0.05
_TIMED = 100
# The names start at the root, not in the numbered step: the engine knows a gradient by its op's name, and the
# last batches of two ranks may have different numbers of micro-batches.
_SCOPE = "tf_ooo_average/"


@dataclass(frozen=True)
class PipelineRanks:
    """Holds the ranks, each with a pipeline, and the averaging of their gradients; by default one alone."""

    engine: Engine = field(default_factory=SingleEngine)
    averaging: Averaging | None = None

    def applying(self, model: keras.Model) -> Callable[[Any], AbstractContextManager[Any]]:
        """Return the context around a batch's updates, in which applied gradients are averaged."""
        averaging = self.averaging
        if averaging is None:
            return contextlib.nullcontext

        @contextlib.contextmanager
        def averaged(batch: object) -> Iterator[None]:
            weights = model.trainable_weights
            with tf.name_scope(_SCOPE), averaging.active(optimizers_of(model), batch, weights):
                yield

        return averaged

    def shared(self, table: CostTable) -> CostTable:
        """Return rank 0's costs, so that all pipelines have the same cut and schedule. Blocks."""
        if self.engine.size == 1:
            return table
        mine = table.to_json() if self.engine.rank == 0 else None
        return CostTable.from_json(self.engine.gather(mine)[0])


class PlannedPipeline:
    """Holds a plan on named devices; kept for all fits of one model."""

    def __init__(
        self, mesh: Mesh, step: StepGraph, devices: tuple[str, ...], compile_tasks: bool = False
    ) -> None:
        self.mesh, planned, each = mesh, mesh.plan, mesh.chosen.devices
        self.step_s, self.turns = deque[float](maxlen=_TIMED), step.turns_with_updates
        # Each replica has neighbouring devices, and holds a part of each stage's variables.
        numbers = planned.schedule.device_of_stage
        on = [[devices[replica * each + number] for number in numbers] for replica in range(mesh.replicas)]
        homes = Homes(stage_of_layer(planned.problem.bounds), on, mesh.chosen.holders)
        again = planned.problem.recomputed
        self.plan = StagedPlan(planned.schedule, step.known, homes, available_devices(), again, compile_tasks)
        self.devices = {name: homes.of_variables(layer) for name, layer in variable_layers(step).items()}
        self.placed: PlacedStep | None = None  # what the fit before has traced


class PipelinePlans:
    """Keeps, from fit to fit, the costs and the plan of the model trained last.

    Attributes:
        planned_from: a step that was taken apart, and its costs; None: to be measured.  Setting it before the
            first step, from another fit of a model with the same names, spares the measurement.
        pipeline: the plan; None: there is none yet, or no longer one.
        asked: how batches are divided into micro-batches, for which costs are measured.
        rows: those of the largest micro-batch in the plan; 0: unknown.
        limit: the limit of each device's memory.
        own: the user's own schedule; None: a policy's is planned.
        counts: how many replicas may share the devices.
        one_device: why the stock step trains on one device; empty: it does not.
        compile_tasks: whether XLA compiles the tasks of stages; ``measured_calls``: whether the seconds of
            compiled tasks are known.
        stock_trace_s: seconds of the execution in which the stock step was traced; 0: not known.
    """

    def __init__(self, options: Pipeline) -> None:
        self.options, self.ranks = options, PipelineRanks()
        self.distributed = Distributed(options.mode)
        self.planned_from: tuple[StepGraph, CostTable] | None = None
        self.pipeline: PlannedPipeline | None = None
        self.own: ScheduleFile | None = None
        self.asked, self.limit, self.rows = Division(1), Limit(), 0
        self.counts: tuple[int, ...] = (1,)
        self.one_device = ""
        self.compile_tasks = self.measured_calls = False
        self.stock_trace_s = 0.0

    @property
    def division(self) -> Division:
        """Return how batches are divided: as asked, or as a plan with larger micro-batches does."""
        if self.pipeline is None or not self.pipeline.mesh.parts:
            return self.asked
        return dataclasses.replace(self.asked, most=self.pipeline.mesh.wanted.microbatches)

    def begin(self, model: keras.Model, steps: int | None) -> None:
        """Begin a fit; keep what is known if step and devices are the same."""
        trained_before = self.distributed.known is not None
        if self.distributed.begin(model, steps):
            self.forget()
            self.planned_from = None if trained_before else self.planned_from
            self.one_device = ""
        if self.one_device and ONE_DEVICE not in self.distributed.report.baselines_s:
            # The fit before was too short to look at several devices.
            self.one_device = ""
            self.distributed.report.put(Outcome())

    def forget(self) -> None:
        """Forget the plan, but not its costs."""
        self.pipeline, self.distributed.step_s = None, ()

    def may_fall_back(self) -> bool:
        """Return whether one device may train instead; ranks would have to agree on it."""
        return self.options.fall_back and self.ranks.engine.size == 1

    def may_stay_stock(self, model: keras.Model) -> bool:
        """Return whether stock steps begin the fit, to see if it is long enough for several devices."""
        options, known = self.options, self.pipeline is not None or self.planned_from is not None
        asked = options.compare is not None or options.costs is not None or options.first_steps != "auto"
        if not self.may_fall_back() or known or asked:
            return False
        # A stock step may need more than a limit allows.
        limited = options.memory_limit_bytes is not None or bool(self.distributed.target.memory_limits())
        return not (limited or in_host_memory(model))

    def train_on_one_device(self, reason: str) -> None:
        """Train on one device from now on; in later fits, too, if one device was measured."""
        self.one_device, self.distributed.slower_warning.advise = reason, None
        report = self.distributed.describe()
        fall_back(report, reason, expected=True, how_to_record="mode='pipeline', which splits in any case")
        forget_whole_parts(report)
        rows = [dataclasses.replace(row, taken=False) for row in report.pipeline.compared_replicas]
        report.change(pipeline=dataclasses.replace(report.pipeline, compared_replicas=rows))
        self.forget()
        self.planned_from = None

    @property
    def replicas_at_first(self) -> int:
        """Return the first steps' replicas; 1 if a plan is to choose: sums of several have other bits."""
        return self.counts[0] if len(self.counts) == 1 else 1

    def loops_of(self, model: keras.Model) -> int:
        """Return in how many loops recurrent layers run their time steps; 1 if none can run in several."""
        options, target, recurrent = self.options, self.distributed.target, len(keras_loops.loops(model))
        if not recurrent:
            return 1
        # Between hosts a layer's weights, and their gradients, would be sent for each micro-batch.
        most = 1 if isinstance(target, Cluster) else len(target.devices) // min(self.counts)
        return loop_parts(options.loop_parts, recurrent, most, self.asked.most)

    def may_leave_rows_open(self, model: keras.Model) -> bool:
        """Return whether batches may share a trace, because their sizes need not be known.

        The limit must be known.  Keras 2 counts steps in the last micro-batch, and ranks trace alike.
        """
        alone = self.ranks.engine.size == 1
        return alone and self.limit.bytes is None and not train_function.counts_steps(model)

    def check_step(self, step: StepGraph) -> None:
        """Raise OptionsError, ScheduleError before the first step, for stages or layers that do not exist."""
        names = [layer.name for layer in step.graph.layers]
        layers = tuple(LayerCosts(1.0, 1.0, 1.0, name=name) for name in names)
        cutter = Cutter(layers, units_of(len(names), step.known.inseparable), Link(), step.count)
        if self.own is not None:
            fixed = layers_that_cannot(step) if self.own.schedule.recompute else frozenset[int]()
            check_recomputed(self.own, len(names), fixed)
            own_cuts(self.own, cutter, self.options.stages)
        elif self.options.stages is not None:
            named_bounds(cutter, self.options.stages)
        elif not self.may_fall_back():
            cutter.cut(tuple(range(len(self.distributed.target.devices) // max(self.counts))))

    def plan_from(self, step: StepGraph, costs: CostTable, measured: bool = True) -> PlannedPipeline:
        """Plan a step with given costs; OptionsError: they are another model's.

        ``measured=False``: steps of the plan are going to be measured, in micro-batches as they are now.
        """
        costs = with_shared_link(costs_of_parts(costs, step), self.distributed.target)
        if costs.rows and self.rows:
            costs = costs.scaled(self.rows / costs.rows)
        costs = self._as_calls(costs)
        self.planned_from = (step, costs)
        self.distributed.report.change(costs=costs)
        return self.plan_with(step, costs, measured)

    def _as_calls(self, costs: CostTable) -> CostTable:
        """Note in the costs whether XLA compiles the tasks, which briefly need more memory then."""
        layers = (dataclasses.replace(layer, compiled=self.compile_tasks) for layer in costs.layers)
        return dataclasses.replace(costs, layers=tuple(layers))

    def plan_with(self, step: StepGraph, costs: CostTable, measured: bool = True) -> PlannedPipeline:
        """Plan, and report the plan; a reported limit is ignored if sizes are unknown."""
        report, limit = self.distributed.report, self.limit
        if limit.bytes is not None and (unknown := unknown_sizes(step)):
            layers = layers_of(step, unknown)
            because = f"they are of {first_of(layers, 3)}; memory_limit_bytes=0 plans without a limit"
            error = MemoryLimitError(limit.bytes, None, unknown, because if layers else "")
            if not limit.reported:
                raise error
            note = f"planned without the limit that devices report ({limit.said}): {error}"
            report.note(note, log=logging.WARNING)
            self.limit = Limit()
        note_loops_and_turns(report, step)
        return self._take(self._planned(step, costs, measured), step, costs)

    def find_limit(self) -> None:
        """Find the limit before a plan is made; ranks agree on it. Blocks."""
        asked_bytes, target = self.options.memory_limit_bytes, self.distributed.target
        self.limit = limit_of(asked_bytes, target, self.ranks.engine)

    def plan_again(self, costs: CostTable) -> PlannedPipeline | None:
        """Plan with costs measured while a plan ran; None: that plan stays.

        The new plan has to be faster by more than costs vary between measurements.  OOOError: no plan can be
        made; the running one stays.
        """
        if self.pipeline is None or self.planned_from is None:
            return None
        step, before = self.planned_from
        on_devices = zip(costs.layers, self.pipeline.mesh.slower_by(), strict=True)
        layers = tuple(layer.slowed(1 / slower) for layer, slower in on_devices)
        costs = self._as_calls(dataclasses.replace(costs, layers=layers, link=before.link))
        planned = self._planned(step, costs)
        kept = self.pipeline.mesh.with_costs(costs.layers)
        self.planned_from = (step, costs)
        report = self.distributed.report
        report.forget(*before.notes)
        if planned.step_s < kept.step_s * (1 - _LEAST_GAIN):
            compared = f"instead of {seconds_text(kept.step_s)}"
            other = self._take(planned, step, costs)
        else:
            compared, other = "no better, so the plan stays", None
            plan = dataclasses.replace(kept.plan, candidates=planned.plan.candidates)
            self._fill(dataclasses.replace(kept, plan=plan, tried=planned.tried), step, costs)
        said = f"planned again with costs that were measured while it ran: {seconds_text(planned.step_s)}"
        report.note(f"{said} a step, {compared}")
        return other

    def _wanted(self, step: StepGraph, costs: CostTable) -> PlanRequest:
        return PlanRequest(
            schedule=self.options.schedule,
            devices=len(self.distributed.target.devices),
            microbatches=step.count,
            link=costs.link,
            memory_limit_bytes=self.limit.bytes,
            less_bytes=self.limit.less_bytes,
            options=self.options.policy_options,
            stages=self.options.stages,
            own=self.own,
            recompute=self.options.recompute,
            fixed=layers_that_cannot(step) if self.options.recompute != NONE else frozenset(),
        )

    def _planned(self, step: StepGraph, costs: CostTable, measured: bool = True) -> Mesh:
        options, limit, alone = self.options, self.limit, self.ranks.engine.size == 1
        units = units_of(len(costs.layers), step.known.inseparable)
        by_hand = options.stages is not None or self.own is not None
        if self.may_fall_back() and options.replicas == AUTO and not by_hand:  # fewer devices may train
            best: Callable[[PlanRequest], Mesh] = functools.partial(on_best_devices, costs.layers, units)
        else:  # each replica has a micro-batch of the step
            counts = tuple(count for count in self.counts if count <= step.count) or self.counts[:1]
            best = functools.partial(make_mesh, costs.layers, units, counts=counts)
        planned = mesh_within(best, self._wanted(step, costs), limit)
        if measured and alone and not by_hand and not options.microbatches:
            whole = with_whole_parts(planned, costs.layers, units)
            if not limit.reported or limit.is_far_from(whole.chosen.limit_bytes):
                planned = whole
        layers = [layer.scaled(planned.larger) for layer in costs.layers]
        advise = functools.partial(advice, planned, layers, units, planned.wanted, alone)
        self.distributed.slower_warning.advise = advise
        return planned

    def _take(self, planned: Mesh, step: StepGraph, costs: CostTable) -> PlannedPipeline:
        report, given = self.distributed.report, self.distributed.target.devices
        devices = planned.of(given)
        limits = self.limit.of_each(len(given))
        report.change(
            memory_limit_bytes=self.limit.least_bytes,
            memory_limits_bytes=planned.of(limits) if limits else (),
            memory_limit_from=self.limit.said,
        )
        self.pipeline = pipeline = PlannedPipeline(planned, step, devices, self.compile_tasks)
        self.distributed.step_s = pipeline.step_s
        self._fill(planned, step, costs)
        because = "distributed as asked"
        if self.options.fall_back:
            fewer = f", on {len(devices)} of {len(given)} devices" if len(devices) < len(given) else ""
            because = f"the fastest that was compared{fewer}"
        report.put(Outcome(kept_because=because))
        return pipeline

    def _fill(self, mesh: Mesh, step: StepGraph, costs: CostTable) -> None:
        devices = mesh.of(self.distributed.target.devices)
        if mesh.parts and self.rows:  # a fit that is given these costs has other micro-batches at first
            costs = dataclasses.replace(costs, rows=self.rows)
        fill_report(self.distributed.report, mesh, step, costs, devices, self.ranks.engine.size)

    def exceeds_limit(self, step: StepGraph) -> bool:
        """Return whether one device that ran the step would exceed its limit."""
        asked, limit_bytes = self.options.first_steps, self.limit.least_bytes
        if asked != "auto" or limit_bytes is None or self.ranks.engine.size > 1 or unknown_sizes(step):
            return False
        return not fits_whole(measured_costs(step, None).layers, step.count, limit_bytes)

    def fits_uncut(self) -> bool:
        """Return whether one device may run a whole batch at once, as a stock step does."""
        if self.planned_from is None:
            return False
        (step, costs), limit_bytes = self.planned_from, self.limit.least_bytes
        if limit_bytes is None and (free := available_bytes()):
            limit_bytes = free.bytes
        layers = [layer.scaled(step.count) for layer in costs.layers]
        return limit_bytes is None or fits_whole(layers, 1, limit_bytes)

    def grown_for(self, batch: object) -> PlannedPipeline | None:
        """Plan more micro-batches, or larger ones if there is a limit; None: the present plan suffices."""
        rows, known = self.asked.split(rows_of(batch)), self.rows
        if self.pipeline is None or self.planned_from is None:
            return None
        mesh, (step, costs) = self.pipeline.mesh, self.planned_from
        larger = self.limit.bytes is not None and 0 < known < max(rows)
        if larger:
            more_bytes = mesh.peak_bytes * (max(rows) / known - 1)
            larger = not self.limit.is_far_from(mesh.chosen.limit_bytes + more_bytes)
        if len(rows) <= (mesh.parts or mesh.plan.schedule.microbatches * mesh.replicas) and not larger:
            return None
        if larger:
            costs = costs.scaled(max(rows) / known)
        pipeline = self.plan_with(dataclasses.replace(step, count=len(rows)), costs)
        if larger:
            self.rows, self.planned_from = max(rows), (step, costs)
        return pipeline
