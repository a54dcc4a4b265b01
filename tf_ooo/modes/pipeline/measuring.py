"""Runs first steps of a pipeline's fit, measured on one device or only taken apart, to make the plan."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

from grappler_passes.blocks import collector_paused
from tf_ooo.compat import nests
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError
from tf_ooo.fit import timing
from tf_ooo.fit.distributed import FirstSteps
from tf_ooo.fit.measured import InPlace, with_shared_link
from tf_ooo.fit.mode import Training
from tf_ooo.hosts.cluster import Cluster
from tf_ooo.hosts.devices import home_device
from tf_ooo.modes.pipeline.first_batch import NEVER_WHOLE
from tf_ooo.modes.pipeline.plans import PlannedPipeline
from tf_ooo.modes.pipeline.reporting import why_uncut
from tf_ooo.modes.pipeline.steps import Given, PipelineSteps, Planned
from tf_ooo.rewriting.parts import WHOLE, is_part, least_share
from tf_ooo.rewriting.staged import LayerByLayer, TracedBefore
from tf_ooo.rewriting.step_graph import StepGraph
from tf_ooo.tracing.micro_batches import BatchesSeen, Division, parts_of, rows_of

# Micro-batches of the step that is taken apart where it does not run: gradients are added up from the second.
_TAKEN_APART = 2


class Beginning(Training):
    """Has no plan yet, or no longer one."""

    def __init__(self, steps: PipelineSteps) -> None:
        self._steps = steps

    @collector_paused()
    def run(self, given: Given) -> Any:
        """Enter the next phase, and run the first step in it."""
        steps, plans, batch = self._steps, self._steps.plans, given[0]
        steps.began_s = time.perf_counter()
        steps.first_batch.build(steps.model, *given, lambda: steps.never_whole)
        rows = plans.division.split(rows_of(batch))
        if plans.planned_from is not None:
            steps.experiment.enter(Planned(steps, plans.plan_from(*plans.planned_from)))
        elif steps.never_whole and len(rows) > _TAKEN_APART:
            # These micro-batches tell everything; the whole step takes many times as long to trace.  One
            # replica suffices, so that gradients are summed.
            measuring = Measuring(steps, batch, Division(_TAKEN_APART), 1)
            steps.experiment.enter(measuring)
            parts = parts_of(batch, (sum(rows[:_TAKEN_APART]), sum(rows[_TAKEN_APART:])))
            return measuring.take_apart(parts[0], given)
        else:
            measuring = Measuring(steps, batch, plans.division, plans.replicas_at_first, steps.seen)
            steps.experiment.enter(measuring)
        return steps.experiment.run(given)


class Measuring(Training):
    """Runs steps on one device; the last of them makes the plan. ``seen``: as of :class:`StepFunctions`."""

    def __init__(
        self,
        steps: PipelineSteps,
        batch: object,
        division: Division,
        replicas: int,
        seen: BatchesSeen | None = None,
    ) -> None:
        self._steps = steps
        layers = LayerByLayer(home_device(), self._share(batch), self._is_whole)
        functions = functools.partial(steps.functions, division, replicas, seen)
        report = steps.plans.distributed.describe()
        pass_s = steps.first_batch.pass_s
        self._first = FirstSteps(steps.model, layers, functions, steps.options, report, pass_s)

    def _share(self, batch: object) -> float:
        """Return the least share of the forward pass for a part of a layer.

        Ranks divide layers alike, or not at all.
        A user's own schedule that was planned with ``costs`` of whole layers counts whole layers.
        """
        plans, costs = self._steps.plans, self._steps.options.costs
        of_whole = costs is not None and not any(is_part(layer.name) for layer in costs.layers)
        if plans.own is not None and of_whole:
            return WHOLE
        if len(set(plans.ranks.engine.gather(repr(nests.signature(batch))))) > 1:
            return WHOLE
        return least_share(len(self._steps.target.devices))

    def _is_whole(self, step: StepGraph) -> bool:
        """Check the step; return whether one device is to run it."""
        self._steps.plans.check_step(step)
        return not (self._steps.never_whole or self._steps.plans.exceeds_limit(step))

    def run(self, given: Given) -> Any:
        steps, plans, first = self._steps, self._steps.plans, self._first
        outputs = first.run(given[0])
        if first.rested:
            return self._cut_first(given)
        if not first.done:
            return outputs
        try:
            step, costs = first.measured()
        except BackendError as error:  # there is no graph; all steps so far have trained
            if not plans.may_fall_back():
                raise
            plans.train_on_one_device(str(error))
            return outputs
        steps.experiment.enter(Planned(steps, *self._plan(step, costs), uncut=first.seen))
        if plans.division != plans.asked and not plans.one_device:
            steps.first_batch.say_what_changes(steps.model, plans.division.split(rows_of(given[0])))
        serial_s = steps.report.pipeline.serial_step_s
        self._compare(given[0], serial_s)
        stock_s = timing.stock_s(first.first_s, first.microbatches) + (first.seen - 1) * serial_s
        steps.first_s, steps.spent_s = first.first_s, time.perf_counter() - steps.began_s - stock_s
        return outputs

    def take_apart(self, some: object, given: Given) -> Any:
        """Take a step on some rows apart without running it; the first step that runs is cut."""
        self._first.run(some)
        return self._cut_first(given)

    def _cut_first(self, given: Given) -> Any:
        """Run the first step cut: it was taken apart, and has not run."""
        steps, plans, batch = self._steps, self._steps.plans, given[0]
        options, report = steps.options, steps.report
        steps.first_batch.compare_no_later()
        step, costs = self._first.measured()
        count = len(plans.division.split(rows_of(batch)))
        alone = plans.ranks.engine.size == 1  # ranks would have to be asked for the same step
        measures = options.costs is None and bool(options.profile_steps) and alone
        pipeline, before = self._plan(dataclasses.replace(step, count=count), costs, measured=not measures)
        report.change(no_baseline=NEVER_WHOLE, batch_rows=rows_of(batch))
        to_measure = None
        if measures:
            signature = nests.signature(batch)
            to_measure = InPlace(step, count, steps.target, options.profile_steps, signature)
        steps.experiment.enter(Planned(steps, pipeline, before, to_measure))
        return steps.experiment.run(given)

    def _plan(
        self, step: StepGraph, costs: CostTable, measured: bool = True
    ) -> tuple[PlannedPipeline, TracedBefore | None]:
        """Return the plan, and the step as traced for one device, if it may be placed unchanged."""
        steps, plans, first = self._steps, self._steps.plans, self._first
        started = time.perf_counter()
        plans.rows = first.rows
        shared = plans.ranks.shared(with_shared_link(costs, steps.target))
        with timing.said("planning, where to cut the model and in which order its tasks run"):
            pipeline = plans.plan_from(step, shared, measured)
        steps.report.change(plan_seconds=time.perf_counter() - started)
        alone = plans.ranks.engine.size == 1 and not isinstance(steps.target, Cluster)
        before = first.traced_before() if alone else None
        first.close()
        return pipeline, before

    def _compare(self, batch: object, serial_s: float) -> None:
        """Compare with one device, if that may train instead, even in a fit of unknown length."""
        steps, plans, distributed = self._steps, self._steps.plans, self._steps.plans.distributed
        may_fall_back, compare = plans.may_fall_back(), steps.options.compare
        if compare is None and distributed.steps is None and may_fall_back:
            compare = True
        too_short = distributed.compare(
            steps.model,
            batch,
            self._first,
            compare,
            serial_s,
            always=not may_fall_back and plans.fits_uncut(),
            calls_python=steps.options.compare is True,
        )
        why = why_uncut(distributed.describe(), len(steps.target.devices), too_short) if may_fall_back else ""
        if why:
            plans.train_on_one_device(why)

    def ended(self) -> None:
        self._steps.plans.distributed.note_too_short(self._first.seen)

    def restore(self) -> Sequence[str]:
        self._first.close()
        return ()
