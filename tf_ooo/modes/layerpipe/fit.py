"""Runs ``model.fit`` with forward, dO and dW of different steps at the same time on different devices."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import nests, train_function
from tf_ooo.compat.keras_variables import value_of
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.fit import timing
from tf_ooo.fit.distributed import Distributed, FirstSteps, OnlyTraced, Placed, check_model
from tf_ooo.fit.measured import check_costs, measured_costs, with_shared_link
from tf_ooo.fit.mode import Experiment, Training
from tf_ooo.fit.recorder import Watched
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.memory import host_memory, in_host_memory
from tf_ooo.hosts.ranks.base import Engine, SingleEngine
from tf_ooo.hosts.speeds import measured_model
from tf_ooo.hosts.system_memory import available_bytes
from tf_ooo.modes.layerpipe.options import LayerPipe
from tf_ooo.modes.layerpipe.planning import in_order_of, note_rebuilt_weights, plan_spread
from tf_ooo.modes.layerpipe.reporting import fill_spread, watched_round
from tf_ooo.modes.layerpipe.spread import Spread, SpreadPlan, spread
from tf_ooo.modes.layerpipe.ticks import Batches, Epoch, rounds_together, structure_of
from tf_ooo.modes.layerpipe.traced import Traced, renumbered, trace
from tf_ooo.report.parts import ENOUGH, Outcome
from tf_ooo.report.report import Report
from tf_ooo.rewriting.parts import WHOLE
from tf_ooo.rewriting.staged import LayerByLayer
from tf_ooo.rewriting.step_graph import StepGraph
from tf_ooo.tracing.micro_batches import Division
from tf_ooo.tracing.step import StepFunctions
from tf_ooo.tracing.variables import Moved, all_variables, build, optimizers_of, values_of
from tf_ooo.units import first_of

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
_GLOBAL_CLIPPING = (
    "global_clipnorm= has each update wait for all layers' gradients, which come at different times in "
    "mode='layerpipe': train without clipping by global norm (clipnorm= and clipvalue= are fine), or with "
    "another mode"
)
_GOING_ON = (
    "training goes on, but without costs= (callback.report.costs of the fit before): the first steps train "
    "synchronously again, and the result is not that of a fit without a break"
)
_AHEAD = (
    "the model was saved within an epoch: its weights have the updates of batches that came in ahead of the "
    "last one reported; a fit that goes on from its number (BackupAndRestore, ModelCheckpoint with "
    "save_freq=N) would train them twice: with drain_steps=N none are ahead"
)


@dataclass(frozen=True)
class SpreadStep:
    """Represents a traced step over rounds, which the next fit of the same model runs again.

    ``moved``, ``read``: the variables; ``structure``: that of batches and of the data.
    """

    moved: Moved
    read: Sequence[Any]
    structure: tuple[Any, Any]
    over_rounds: Spread


class LayerPipeMode:
    """Profiles, plans, spreads the model, runs in rounds, and drains at the ends of epochs.

    ``plan``: that of the model trained last; None: not planned yet.  ``distributed``: keeps the model.
    ``traced``: its step over rounds, as traced in the last fit.
    """

    keeps_stock = False
    compiles = False

    def __init__(self, options: LayerPipe) -> None:
        self.options = options
        self.plan: SpreadPlan | None = None
        self.traced: SpreadStep | None = None
        self.distributed = Distributed(options.mode)

    def join(self) -> Engine:
        """Return the engine of one process, which trains alone."""
        return SingleEngine()

    def check(self, model: keras.Model, steps: int | None) -> None:
        """Raise BackendError for missing devices or an unsuitable model, OptionsError for options."""
        check_model(model, self.options.mode)
        self.distributed.place(model, self.options.devices)
        if len(self.distributed.target.devices) == 1:
            return
        together, every = train_function.steps_per_execution(model), self.options.drain_steps
        if every is not None and every % together and together != steps:
            raise OptionsError(
                f"drain_steps={every} is no multiple of steps_per_execution={together}: callbacks would see "
                "batches on their way"
            )
        if any(getattr(optimizer, "global_clipnorm", None) for optimizer in optimizers_of(model)):
            raise BackendError(_GLOBAL_CLIPPING)

    def prepare(self, model: keras.Model, steps: int | None) -> Training | None:
        """Prepare a fit, with the former plan if step and devices are the same; None on one device."""
        distributed, every = self.distributed, self.options.drain_steps
        if distributed.begin(model, steps):
            self.plan, self.traced, distributed.step_s = None, None, ()
        if len(distributed.target.devices) == 1:
            without = "" if every is None else f", without drain_steps={every}"
            distributed.report.put(Outcome(True, f"there is one device: the stock step runs{without}"))
            return None
        return LayerPipeFit(self, model, steps)

    def describe(self) -> Report:
        return self.distributed.describe()


class LayerPipeFit(Experiment):
    """Runs a fit: steps on one device until there is a plan, then rounds."""

    def __init__(self, mode: LayerPipeMode, model: keras.Model, steps: int | None) -> None:
        self.mode, self.model, self.distributed = mode, model, mode.distributed
        self.target, self.batches = mode.distributed.target, Batches(steps)
        self.data_spec: Any = None
        super().__init__(Beginning(self) if mode.plan is None else Planned(self, mode.plan))

    def run(self, given: Any) -> Any:
        """Run one execution, step by step: phases return None at the end of the data."""
        self.data_spec = getattr(given, "element_spec", None)
        outputs = None
        for _ in range(train_function.steps_per_execution(self.model)):
            results = self.phase.run(given)
            if results is None:
                break
            outputs = results
        if outputs is None:
            raise StopIteration
        return outputs

    def explain(self, error: Exception) -> Exception:
        return self.target.explain(error)

    def replaced(self) -> None:
        self.distributed.note_replaced()

    def epoch_begin(self, epoch: int) -> None:
        self.batches.taken = 0

    def ended(self) -> None:
        super().ended()
        self.distributed.say_if_slower()

    def plan(self, step: StepGraph, costs: CostTable, traced: Traced, started: float) -> SpreadPlan:
        """Plan a step with these costs; ``traced``: the step before it is spread."""
        mode, report, target = self.mode, self.distributed.describe(), self.target
        check_costs(costs, [layer.name for layer in step.graph.layers])
        costs = with_shared_link(costs, target)
        plan, advise = plan_spread(step, costs, traced, target.devices, mode.options.schedule, report)
        mode.plan, mode.traced, self.distributed.step_s = plan, None, plan.step_s
        self.distributed.slower_warning.advise = advise
        if mode.options.weights == "ema":
            note_rebuilt_weights(report, self.model)
        report.change(plan_seconds=time.perf_counter() - started)
        return plan


class Beginning(Training):
    """Traces the step before the first one runs, so that a model that cannot be spread trains nothing."""

    def __init__(self, fit: LayerPipeFit) -> None:
        self._fit = fit

    def run(self, given: Any) -> Any:
        """Enter the next phase, and run the first step in it; None at the end of the data."""
        fit, started, costs = self._fit, time.perf_counter(), self._fit.mode.options.costs
        with timing.said("tracing the step, to take it apart"):
            traced = self._look(given)
        planning_s = time.perf_counter()
        if traced is None:
            return None
        if costs is None:
            if any(value_of(each.iterations).numpy() for each in optimizers_of(fit.model)):
                fit.distributed.describe().note(_GOING_ON)
            fit.enter(Measuring(fit, traced))
        else:  # the first batch is delayed as all others are
            layers = traced.graph.layers
            order = in_order_of([layer.name for layer in costs.layers], [layer.name for layer in layers])
            as_given = renumbered(traced, [layers[number].variables for number in order])
            fit.enter(Planned(fit, fit.plan(as_given.as_step(), costs, traced, planning_s)))
            serial_s, first = fit.distributed.report.layerpipe.serial_step_s, OnlyTraced(planning_s - started)
            batch, compare, free = fit.batches.look(given), fit.mode.options.compare, available_bytes()
            # A step on one device needs activations and gradients beside weights and slots.
            needed_bytes = sum(layer.activation_bytes + layer.weight_bytes for layer in costs.layers)
            fits = free is None or needed_bytes < free.bytes
            fit.distributed.compare(fit.model, batch, first, compare, serial_s, fits, compare is True)
        return fit.phase.run(given)

    def _look(self, iterator: Iterator[Any]) -> Traced | None:
        model = self._fit.model
        with host_memory() if in_host_memory(model) else contextlib.nullcontext():
            build(model, optimizers_of(model), model.train_step, iterator)
        batch = self._fit.batches.look(iterator)
        return None if batch is None else trace(model, batch, data_spec=self._fit.data_spec)


class Measuring(Training):
    """Runs steps on one device; the last of them makes the plan."""

    def __init__(self, fit: LayerPipeFit, traced: Traced) -> None:
        self._fit, self._traced = fit, traced
        layers, functions = LayerByLayer(home_device(), WHOLE), partial(StepFunctions, fit.model, Division(1))
        self._first = FirstSteps(fit.model, layers, functions, fit.mode.options, fit.distributed.describe())

    def run(self, given: Any) -> Any:
        """Run one step; None at the end of the data."""
        fit, first = self._fit, self._first
        batch = fit.batches.take(given)
        if batch is None:
            return None
        outputs = first.run(batch)
        if first.done:
            started = time.perf_counter()
            with timing.said("planning, on which devices F, dO and dW run"):
                plan = fit.plan(*self._costs(), self._traced, started)
            first.close()
            fit.enter(Planned(fit, plan, first.seen))
            serial_s = fit.distributed.report.layerpipe.serial_step_s
            compare = fit.mode.options.compare
            fit.distributed.compare(fit.model, batch, first, compare, serial_s, calls_python=compare is True)
        return outputs

    def _costs(self) -> tuple[StepGraph, CostTable]:
        """Return the step, as it was traced to be spread, and its costs.

        Costs of layers that the measured step lacks are calculated from shapes.
        """
        measured, costs = self._first.measured()
        known = dict(zip((layer.variables for layer in measured.graph.layers), costs.layers, strict=True))
        own = self._traced.graph.layers
        others = [layer.name for layer in own if layer.variables not in known]
        if not others and len(own) == len(known):
            return measured, costs
        step = self._traced.as_step()
        calculated = measured_costs(step, None, on=measured_model(home_device())).layers
        layers = [
            replace(known.get(layer.variables, from_shapes), inputs=from_shapes.inputs, tied=from_shapes.tied)
            for layer, from_shapes in zip(own, calculated, strict=True)
        ]
        note = f"costs are calculated from shapes, not measured, of {first_of(others) or 'layers'}"
        self._fit.distributed.report.note(f"{note}: the measured step is divided into other layers")
        return step, replace(costs, layers=tuple(layers))

    def ended(self) -> None:
        self._fit.distributed.note_too_short(self._first.seen)

    def restore(self) -> Sequence[str]:
        self._first.close()
        return ()


class Planned(Training):
    """Has a plan; the next batch is the first one in rounds.

    ``unspread``: steps of this fit before there was a plan.
    """

    def __init__(self, fit: LayerPipeFit, plan: SpreadPlan, unspread: int = 0) -> None:
        self._fit, self._plan, self._unspread = fit, plan, unspread
        self._placed = Placed(fit.model, fit.target)

    def run(self, given: Any) -> Any:
        """Spread the step, and run the first batch's rounds; None at the end of the data."""
        batch = self._fit.batches.take_of_epoch(given)
        if batch is None:
            return None
        with timing.said(f"spreading the step over {len(self._plan.devices)} devices"):
            step = self._step(batch)
        rounds = InRounds(self._fit, self._plan, self._placed, step)
        self._fit.enter(rounds)
        return rounds.begin(batch, given)

    def _step(self, batch: object) -> SpreadStep:
        """Move the variables, and spread the step over their devices, unless the last fit has."""
        fit, plan, kept = self._fit, self._plan, self._fit.mode.traced
        self._unspread = 0
        read, structure = values_of(all_variables(fit.model)), (structure_of(batch), fit.data_spec)
        if kept is not None and not (kept.structure == structure and nests.are_same(kept.read, read)):
            _LOG.info("the step is traced again: other variables or batches than in the fit before")
            kept = None
        fit.mode.traced = None  # until this fit has ended well
        self._placed = Placed(fit.model, fit.target, None if kept is None else kept.moved)
        self._placed.move({name: plan.devices[processor] for name, processor in plan.home.items()})
        if kept is not None:
            return kept
        report = fit.distributed.describe()
        over_rounds = spread(fit.model, batch, plan, fit.mode.options, fit.data_spec)
        self._placed.moved.check_captures(over_rounds.traced.captured.values())
        report.note(*over_rounds.notes)
        fill_spread(report, over_rounds)
        return SpreadStep(self._placed.moved, read, structure, over_rounds)

    def ended(self) -> None:
        self._fit.distributed.note_too_short(self._unspread)

    def restore(self) -> Sequence[str]:
        return self._placed.restore()


class InRounds(Training):
    """Runs each epoch in rounds; the step is spread."""

    def __init__(self, fit: LayerPipeFit, plan: SpreadPlan, placed: Placed, step: SpreadStep) -> None:
        self._fit, self._plan, self._placed, self._step = fit, plan, placed, step
        self._over_rounds = step.over_rounds
        self._structure, _ = step.structure  # of the first batch: all have its parts
        self._together = fit.mode.options.unroll or rounds_together(len(step.over_rounds.traced.index))
        self._epoch: Epoch | None = None  # None between epochs

    def run(self, given: Any) -> Any:
        """Run rounds until the next batch's results are there; None at the end of the data."""
        step_s = self._plan.step_s
        timed = len(step_s)
        outputs = None if self._epoch is None else self._epoch.timed_step(step_s)
        if timed < ENOUGH <= len(step_s):
            self._fit.distributed.say_if_slower()
        if outputs is not None:
            return outputs
        batch = self._fit.batches.take_of_epoch(given)  # the first one, or nothing is on its way
        return None if batch is None else self.begin(batch, given)

    def begin(self, batch: object, iterator: Iterator[Any]) -> Any:
        """Begin an epoch with this batch, and return its results."""
        ticks, following = self._over_rounds.ticks, self._following(batch, iterator)
        ticks.reset()
        self._epoch = Epoch(ticks, partial(next, following, None), self._together)
        return self._epoch.timed_step(self._plan.step_s)

    def _following(self, batch: object, iterator: Iterator[Any]) -> Iterator[Sequence[tf.Tensor]]:
        """Yield batches to the end of the epoch, or until ``drain_steps`` batches have come in."""
        every, batches = self._fit.mode.options.drain_steps, self._fit.batches
        while batch is not None:
            if structure_of(batch) != self._structure:
                raise BackendError(
                    "a batch has other parts than the first: this mode needs batches of one kind"
                )
            yield nests.Packed(batch).tensors
            if every is not None and batches.taken % every == 0:
                return
            batch = batches.take_of_epoch(iterator)

    def watched(self) -> Watched | None:
        """Return what to watch if the next step runs full rounds and traces nothing."""
        planned = self._fit.distributed.report.planned
        full = self._epoch is not None and self._plan.step_s and self._epoch.is_full()
        if planned is None or not full:
            return None
        return watched_round(self._plan, self._over_rounds, planned, self._together)

    def settle(self, saving: bool) -> None:
        """Bring all updates into the weights; say what a fit that goes on from a saved batch would do."""
        if self._epoch is not None:
            report = self._fit.distributed.describe()
            if saving and self._epoch.ahead:
                report.note(_AHEAD, log=logging.WARNING)
            self._epoch.drain()

    def epoch_end(self, epoch: int) -> None:
        """Finish the batches that are on their way after an epoch was stopped early."""
        self.settle(saving=False)
        self._epoch = None

    def restore(self) -> Sequence[str]:
        # Asked first: what is given up on a worker that has just died might wait for ever.
        self._fit.target.lost()
        self._epoch = None
        lost = self._placed.restore()
        if lost:
            self._fit.mode.traced = None
        else:
            self._over_rounds.ticks.empty()
        return lost

    def ended(self) -> None:
        """Keep the traced step for the next fit; after a failure it may be half done."""
        self._fit.mode.traced = self._step
