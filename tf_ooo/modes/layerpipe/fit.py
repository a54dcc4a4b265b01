"""``model.fit`` with forward, dO and dW of different steps at the same time on different devices."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_variables, nests, train_function
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, OptionsError
from tf_ooo.fit import progress
from tf_ooo.fit.distributed import Distributed, FirstSteps, Placed, check_model
from tf_ooo.fit.measured import check_costs, with_shared_link
from tf_ooo.fit.mode import Training
from tf_ooo.fit.recorder import Watched
from tf_ooo.fit.slower_warning import ENOUGH, SlowerWarning
from tf_ooo.hosts.devices import home_device
from tf_ooo.hosts.ranks.base import Engine, SingleEngine
from tf_ooo.modes.layerpipe.options import LayerPipe
from tf_ooo.modes.layerpipe.planned import in_order_of, note_rebuilt_weights, plan_spread
from tf_ooo.modes.layerpipe.reporting import fill_spread
from tf_ooo.modes.layerpipe.running import Batches, Epoch, rounds_together, structure_of
from tf_ooo.modes.layerpipe.spread import Spread, SpreadPlan, spread
from tf_ooo.modes.layerpipe.ticks import Ticks
from tf_ooo.modes.layerpipe.traced import Traced, renumbered, trace
from tf_ooo.modes.layerpipe.watching import watched_round
from tf_ooo.report.filling import fill_step_times
from tf_ooo.report.parts import Outcome
from tf_ooo.report.report import Report
from tf_ooo.rewriting.parts import WHOLE
from tf_ooo.rewriting.staged import LayerByLayer
from tf_ooo.rewriting.step_graph import StepGraph
from tf_ooo.tracing import sync
from tf_ooo.tracing.micro_batches import Division
from tf_ooo.tracing.variables import optimizers_of

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
_GLOBAL_CLIPPING = (
    "global_clipnorm= has each update wait for all layers' gradients, which come at different times in "
    "mode='layerpipe': train without clipping by global norm (clipnorm= and clipvalue= are fine), or with "
    "another mode"
)
_ONE_DEVICE = "there is one device: the stock step runs"
_GOING_ON = (
    "training goes on, but without costs= (callback.report.costs of the fit before): the first steps train "
    "synchronously again, and the result is not that of a fit without a break"
)
_AHEAD = (
    "the model was saved within an epoch: its weights have the updates of batches that came in ahead of the "
    "last one reported; a fit that goes on from its number (BackupAndRestore, ModelCheckpoint with "
    "save_freq=N) would train them twice: with drain_steps=N none are ahead"
)


class LayerPipeMode:
    """Profile, plan, spread, run in rounds, drain at the ends of epochs.

    ``plan``: of the model trained last, and ``distributed``: what is known of it.
    """

    keeps_stock = False
    compiles = False

    def __init__(self, options: LayerPipe) -> None:
        self.options = options
        self.plan: SpreadPlan | None = None
        self.distributed = Distributed(options.mode)
        self.slower_warning = SlowerWarning()

    def join(self) -> Engine:
        """This process trains alone."""
        return SingleEngine()

    def check(self, model: keras.Model, steps: int | None) -> None:
        """BackendError: no such devices, or cannot be spread; OptionsError: does not go with these."""
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
        """Prepare a fit, with the former plan if it was of this step on these devices; None on one device."""
        if self.distributed.begin(model, steps):
            self.plan = None
        report = self.distributed.report
        if len(self.distributed.target.devices) == 1:
            report.put(Outcome(True, _one_device_text(self.options)))
            return None
        return LayerPipeSteps(self, model, steps).training()

    def describe(self) -> Report:
        """Return the report with the seconds of the steps so far."""
        if self.plan is not None:
            fill_step_times(self.distributed.report, self.plan.step_s)
        return self.distributed.report

    def say_if_slower(self) -> None:
        """Once: that one device is faster, and what would be better; until more steps deny it."""
        report = self.describe()
        self.slower_warning.look(report, report.gain or report.gain_over_first)


class LayerPipeSteps:
    """A fit: steps on one device until there is a plan, then rounds."""

    def __init__(self, mode: LayerPipeMode, model: keras.Model, steps: int | None) -> None:
        self._mode, self._model, self._target = mode, model, mode.distributed.target
        self._batches = Batches(steps)
        self._data_spec: Any = None
        self._traced: Traced | None = None  # the step as it is before the plan
        self._first: FirstSteps | None = None
        self._placed: Placed | None = None
        self._ticks: Ticks | None = None
        self._over_rounds: Spread | None = None
        self._together = 1  # rounds in one function
        self._structure: Any = None  # of the first batch: all have its parts
        self._epoch: Epoch | None = None
        self._unspread = 0  # steps before the plan

    def run(self, iterator: Iterator[Any]) -> Any:
        """Return one execution."""
        self._data_spec = getattr(iterator, "element_spec", None)
        outputs = None
        for _ in range(train_function.steps_per_execution(self._model)):
            plan = self._mode.plan
            results = self._synchronous(iterator) if plan is None else self._in_rounds(plan, iterator)
            if results is None:
                break
            outputs = results
        if outputs is None:
            raise StopIteration
        return outputs

    # -- before the plan ---------------------------------------------------------------------------

    def _synchronous(self, iterator: Iterator[Any]) -> Any:
        """A step on one device, before the plan; with costs there is none.  None at the end of the data."""
        started, costs = time.perf_counter(), self._mode.options.costs
        if self._traced is None:
            with progress.said("tracing the step, to take it apart"):
                self._traced = self._look(iterator)
        if self._traced is None:
            return None
        if costs is not None:
            # The first batch is delayed as all others are.
            layers = self._traced.graph.layers
            order = in_order_of([layer.name for layer in costs.layers], [layer.name for layer in layers])
            traced = renumbered(self._traced, [layers[number].variables for number in order])
            return self._in_rounds(self._planned(traced.as_step(), costs, self._traced, started), iterator)
        return self._first_step(self._traced, iterator)

    def _look(self, iterator: Iterator[Any]) -> Traced | None:
        """Traces the step before the first one runs: what cannot be spread has trained nothing."""
        model = self._model
        sync.build(model, optimizers_of(model), model.train_step, iterator)
        batch = self._batches.look(iterator)
        if batch is None:
            return None
        return trace(model, batch, data_spec=self._data_spec)

    def _first_step(self, traced: Traced, iterator: Iterator[Any]) -> Any:
        """The last of them makes the plan."""
        if self._first is None:
            self._note_going_on()
            layers, mode = LayerByLayer(home_device(), WHOLE), self._mode
            self._first = FirstSteps(self._model, layers, Division(1), mode.options, mode.describe())
        first, batch = self._first, self._batches.take(iterator)
        if batch is None:
            return None
        outputs = first.run(batch)
        self._unspread = first.seen
        if first.done:
            started = time.perf_counter()
            with progress.said("planning, on which devices F, dO and dW run"):
                self._planned(*first.measured(self._target), traced, started)
            first.close()
            self._first, options = None, self._mode.options
            serial_s = self._mode.describe().layerpipe.serial_step_s
            self._mode.distributed.compare(self._model, batch, first, options.compare, serial_s)
        return outputs

    def _note_going_on(self) -> None:
        """Training that goes on, without the costs of the fit before."""
        report = self._mode.describe()
        counts = (keras_variables.value_of(optimizer.iterations) for optimizer in optimizers_of(self._model))
        if max(int(count.numpy()) for count in counts):
            report.note(_GOING_ON)

    def _planned(self, step: StepGraph, costs: CostTable, traced: Traced, started: float) -> SpreadPlan:
        mode, report = self._mode, self._mode.describe()
        check_costs(costs, [layer.name for layer in step.graph.layers])
        costs = with_shared_link(costs, self._target)
        schedule, devices = mode.options.schedule, self._target.devices
        mode.plan = plan = plan_spread(step, costs, traced, devices, schedule, report, mode.slower_warning)
        if mode.options.weights == "ema":
            note_rebuilt_weights(report, self._model)
        self._traced = None
        report.change(plan_seconds=time.perf_counter() - started)
        return plan

    # -- with a plan -------------------------------------------------------------------------------

    def _in_rounds(self, plan: SpreadPlan, iterator: Iterator[Any]) -> Any:
        """Run the rounds that the next batch's results take; None at the end of the data."""
        timed = len(plan.step_s)
        outputs = None if self._epoch is None else self._epoch.timed_step(plan.step_s)
        if timed < ENOUGH <= len(plan.step_s):
            self._mode.say_if_slower()
        if outputs is not None:
            return outputs
        batch = self._batches.take_of_epoch(iterator)  # the first one, or nothing is on its way
        if batch is None:
            return None
        if self._ticks is None:
            with progress.said(f"spreading the step over {len(plan.devices)} devices"):
                self._ticks = self._spread(plan, batch)
        self._ticks.reset()
        self._epoch = Epoch(
            self._ticks, partial(next, self._following(batch, iterator), None), self._together
        )
        return self._epoch.timed_step(plan.step_s)

    def _following(self, batch: object, iterator: Iterator[Any]) -> Iterator[Sequence[tf.Tensor]]:
        """Yield batches to the end of the epoch, or until ``drain_steps`` batches have come in."""
        every = self._mode.options.drain_steps
        while batch is not None:
            if structure_of(batch) != self._structure:
                raise BackendError(
                    "a batch has other parts than the first: this mode needs batches of one kind"
                )
            yield nests.Packed(batch).tensors
            if every is not None and self._batches.taken % every == 0:
                return
            batch = self._batches.take_of_epoch(iterator)

    def _spread(self, plan: SpreadPlan, batch: object) -> Ticks:
        """Moves the variables, traces the step where they are, and spreads it."""
        mode, report = self._mode, self._mode.describe()
        self._placed, self._unspread = Placed(self._model, self._target), 0
        self._placed.move({name: plan.devices[processor] for name, processor in plan.home.items()})
        over_rounds = spread(self._model, batch, plan, mode.options, self._data_spec)
        self._placed.check_captures(over_rounds.traced.captured.values())
        report.note(*over_rounds.notes)
        fill_spread(report, over_rounds)
        self._over_rounds = over_rounds
        self._structure = structure_of(batch)
        ops = len(over_rounds.traced.index)
        self._together = mode.options.unroll or rounds_together(ops)
        return over_rounds.ticks

    # -- between epochs, and at the end --------------------------------------------------------------

    def training(self) -> Training:
        """Return the hooks of these steps."""
        return Training(
            self.run,
            self.restore,
            self.settle,
            self._target.explain,
            replaced=self._mode.distributed.note_replaced,
            epoch_begin=self.epoch_begin,
            epoch_end=self.epoch_end,
            ended=self.ended,
            watched=self.watched,
        )

    def watched(self) -> Watched | None:
        """Return what to watch if the next step runs full rounds and traces nothing."""
        plan, epoch, planned = self._mode.plan, self._epoch, self._mode.describe().planned
        if plan is None or epoch is None or planned is None or self._over_rounds is None:
            return None
        if not (plan.step_s and epoch.is_full()):
            return None
        return watched_round(plan, self._over_rounds, planned, self._together)

    def settle(self, saving: bool) -> None:
        """All updates are in the weights; says what a fit that goes on from a saved batch would do."""
        if self._epoch is None:
            return
        report = self._mode.describe()
        if saving and self._epoch.ahead:
            report.note(_AHEAD, log=logging.WARNING)
        self._epoch.drain()

    def epoch_begin(self, epoch: int) -> None:
        """Nothing is on its way."""
        self._batches.taken = 0
        self._epoch = None

    def epoch_end(self, epoch: int) -> None:
        """Finishes what an epoch that was stopped early has left on its way."""
        self.settle(saving=False)
        self._epoch = None

    def ended(self) -> None:
        """Says so where no step has been spread, and where one device is faster."""
        self._mode.distributed.note_too_short(self._unspread)
        self._mode.say_if_slower()

    def restore(self) -> list[str]:
        """Variables back to where they were; names those that are lost."""
        # Asked first: what is given up on a worker that has just died might wait for ever.
        self._target.lost()
        self._ticks = self._epoch = self._over_rounds = None
        if self._first is not None:
            self._first.close()
            self._first = None
        if self._placed is None:
            return []
        lost = self._placed.restore()
        self._placed = None
        return lost


def _one_device_text(options: LayerPipe) -> str:
    """Names what the user asked for and does not get."""
    every = options.drain_steps
    return _ONE_DEVICE if every is None else f"{_ONE_DEVICE}, without drain_steps={every}"
