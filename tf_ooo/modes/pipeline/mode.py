"""Runs a pipeline's fits: refuses some early, runs stock steps if these may suffice, then cut steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_compiled, keras_variables, train_function
from tf_ooo.errors import BackendError, ScheduleError
from tf_ooo.fit.distributed import check_model
from tf_ooo.fit.mode import Experiment, Kept, StockFirst, Training, forget_steps
from tf_ooo.fit.timing import Budget
from tf_ooo.hosts.devices import home_device, over_hosts
from tf_ooo.hosts.memory import evaluate_in_host_memory, in_host_memory
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.system_memory import available_bytes
from tf_ooo.modes.pipeline.first_batch import FirstBatch, division_of
from tf_ooo.modes.pipeline.measuring import Beginning
from tf_ooo.modes.pipeline.mesh import counts_of
from tf_ooo.modes.pipeline.options import AUTO, Pipeline
from tf_ooo.modes.pipeline.partition import check_own
from tf_ooo.modes.pipeline.planning import SCHEDULES
from tf_ooo.modes.pipeline.plans import PipelinePlans
from tf_ooo.modes.pipeline.steps import PipelineSteps
from tf_ooo.options.base import is_file
from tf_ooo.planning.choosing.recomputing import NONE
from tf_ooo.planning.model.problem import check_limits
from tf_ooo.planning.model.schedule_file import ScheduleFile, read_schedule
from tf_ooo.report.report import Report
from tf_ooo.tracing.micro_batches import Division, StepRefused
from tf_ooo.tracing.traces import trace_count
from tf_ooo.tracing.variables import bytes_of

if TYPE_CHECKING:
    import keras


# Finding out whether several devices are faster takes so many times as long as tracing a stock step, at most.
_TRACES = 4
# No optimizer has as many slots for a weight: with more than that nothing has to be counted.
_ENOUGH = 8
# Tracing and TensorFlow's graphs with their optimizers take so much: for 10 to 20 dense layers 280 to 310 MB.
_GRAPH_BYTES = 280_000_000
# These shares of the bytes of weights were measured: for tensors sent to workers at the same moment, and for
# gradients, which stages that run here also hold as sums.
_SENT, _WHOLE, _COMPUTED_HERE = 0.5, 1.0, 1.4


class PipelineMode:
    """Keeps a pipeline; nothing falls back unless ``fall_back`` is asked for: it was chosen explicitly.

    Attributes:
        plans: plans of the model trained last.
        first_batch: checks before that model was cut.
    """

    keeps_stock = False
    compiles = False

    def __init__(self, options: Pipeline) -> None:
        self.options, self.plans = options, PipelinePlans(options)
        self.distributed, self.first_batch = self.plans.distributed, FirstBatch(self.plans)
        self._refused = ""

    def join(self) -> Engine:
        """Return the engine of one process, which trains alone."""
        return self.plans.ranks.engine

    def check(self, model: keras.Model, steps: int | None) -> None:
        """Check everything before anything changes.

        BackendError: no such devices, a model that cannot be cut, or too little memory in this process.
        ScheduleError: a schedule's file.
        """
        self._refused = ""
        try:
            self._check_model(model)
        except BackendError as error:
            if not self.plans.may_fall_back():
                raise
            self._refused = str(error)
        check_host_memory(model, self.options)
        self.distributed.place(model, self.options.devices, self.join().local_rank)
        if isinstance(self.options.memory_limit_bytes, Sequence):
            check_limits(self.options.memory_limit_bytes, len(self.distributed.target.devices))
        devices, as_keras = self.distributed.target.devices, train_function.is_compiled(model)
        self.plans.compile_tasks = self.options.compiles_tasks(as_keras, devices)
        self.plans.asked = division_of(model, self.options)
        if is_file(self.options.schedule):
            self._read_own(self.options.schedule)
        self.plans.counts = self._counts(self.plans.own)

    def _check_model(self, model: keras.Model) -> None:
        check_model(model, self.options.mode)
        summed = keras_compiled.summed_losses(model)
        if summed:
            raise BackendError(
                f"loss {summed[0]!r} adds up rows (reduction='sum' or none), and micro-batches are averaged; "
                "use reduction='sum_over_batch_size' and a learning rate that is larger by the batch size"
            )

    def _counts(self, own: ScheduleFile | None) -> tuple[int, ...]:
        """Return how many replicas may share this process' devices. OptionsError: they cannot."""
        return counts_of(self._replicas(own), len(self.distributed.target.devices), self.plans.asked.most)

    def _replicas(self, own: ScheduleFile | None) -> int | str | None:
        """Return the replicas that are asked for in this process; a file may say how many."""
        if self.join().size > 1:  # each process is one
            return 1
        return own.schedule.workers if own and self.options.replicas == AUTO else self.options.replicas

    def _read_own(self, path: str | os.PathLike[str]) -> None:
        """Read the user's own schedule; if it has changed, plan anew."""
        before, options = self.plans.own, self.options
        if not os.path.exists(path):
            raise ScheduleError(
                f"schedule={os.fspath(path)!r}: there is no such file; Schedule.to_text() and tf-ooo plan "
                f"--out write one; by name: auto, {', '.join(SCHEDULES)}"
            )
        own = read_schedule(path)
        if options.microbatches is None:
            asked = self._replicas(own)
            self.plans.asked = Division(own.schedule.microbatches * (asked if isinstance(asked, int) else 1))
        (count,), devices = self._counts(own), len(self.distributed.target.devices)
        check_own(own, devices // count, -(-self.plans.asked.most // count), max(count, self.join().size))
        if options.recompute != NONE:
            raise own.error(
                f"recompute={options.recompute!r}: the file's 'recompute' line says which layers do"
            )
        if options.stages is not None and own.schedule.stages:
            raise own.error("the file has 'stage' lines, and stages= is given: leave one out", "stage")
        if before is not None and before.schedule != own.schedule:
            self.plans.forget()
        self.plans.own = own

    def prepare(self, model: keras.Model, steps: int | None) -> Training | None:
        """Prepare a fit; None: one device trains, as it is faster or the model is refused."""
        fit = self.fit_of(model, steps)
        if self._refused:
            self.plans.train_on_one_device(self._refused)
        return None if self.plans.one_device else fit

    def fit_of(self, model: keras.Model, steps: int | None) -> PipelineFit:
        """Make a fit, with the former plan if step and devices are the same."""
        if in_host_memory(model):
            evaluate_in_host_memory(model)
        self.plans.begin(model, steps)
        return PipelineFit(self.plans, self.first_batch, model)

    def describe(self) -> Report:
        return self.distributed.describe()


class PipelineFit(Experiment):
    """Represents a fit of a model, in executions as Keras asks for them."""

    def __init__(self, plans: PipelinePlans, first_batch: FirstBatch, model: keras.Model) -> None:
        self._plans, self._model = plans, model
        self.steps = PipelineSteps(plans, first_batch, model, Beginning)
        super().__init__(ByBatches(self))
        steps, stock = plans.distributed.steps, plans.distributed.stock
        if steps is not None and stock is not None and plans.may_stay_stock(model):
            self.enter(self._stock_first(steps, stock))
        forget_steps(plans.distributed.report)

    def _stock_first(self, steps: int, stock: Callable[[Any], Any]) -> StockFirst:
        """Return the phase that finds out from stock steps whether a pipeline pays."""
        plans, together = self._plans, train_function.steps_per_execution(self._model)

        def keep(budget: Budget) -> None:
            plans.stock_trace_s = budget.trace_s
            plans.train_on_one_device(budget.why_not)
            self.enter(Kept(stock))

        def begin(budget: Budget) -> None:
            plans.stock_trace_s, report = budget.trace_s, plans.distributed.report
            forget_steps(report)
            report.change(undecided="")
            self.enter(ByBatches(self))

        budget = Budget(_TRACES, -(-steps // together), together, plans.stock_trace_s)
        return StockFirst(budget, plans.distributed.report, stock, lambda: trace_count(stock), keep, begin)

    def explain(self, error: Exception) -> Exception:
        return self._plans.distributed.target.explain(error)

    def replaced(self) -> None:
        self._plans.distributed.note_replaced()

    def ended(self) -> None:
        super().ended()
        if not self._plans.one_device:
            self._plans.distributed.say_if_slower()

    def by_batches(self, batches: list[Any], iterator: object) -> Any:
        """Run one execution, batch by batch, until one device is known to do better."""
        outputs, plans = None, self._plans
        for number, batch in enumerate(batches, 1):
            try:
                outputs = self.steps.run(batch, iterator)
            except StepRefused as error:
                if not plans.may_fall_back():
                    raise
                plans.train_on_one_device(str(error))
                return self._go_on_with_stock(batches[number - 1 :], iterator)
            if plans.one_device:
                return self._go_on_with_stock(batches[number:], iterator) or outputs
        return outputs

    def _go_on_with_stock(self, rest: list[Any], iterator: object) -> Any:
        """Continue with stock: run the rest of this execution and return its logs; None: there is no rest."""
        self.steps.bring_back()
        stock = self._plans.distributed.stock
        if stock is None:
            return None
        self.enter(Kept(stock))
        if not rest:
            return None
        with train_function.steps_per_execution_set_to(self._model, len(rest)):
            return stock(train_function.iterator_over(rest, iterator))


class ByBatches(Experiment):
    """Runs executions batch by batch; everything else is left to the phase of the steps."""

    def __init__(self, fit: PipelineFit) -> None:
        super().__init__(fit.steps.experiment)
        self._fit = fit

    def run(self, given: Any) -> Any:
        batches = train_function.take(given, train_function.steps_per_execution(self._fit.steps.model))
        if not batches:
            raise StopIteration
        return self._fit.by_batches(batches, given)


def check_host_memory(model: keras.Model, options: Pipeline) -> None:
    """Raise BackendError if what is made before the first step would not fit beside the weights.

    Nothing is made yet.  The slots of the model's optimizer stay in this process while stages train with
    copies.  Graphs, tensors sent to workers, and gradients, if stages or the whole first steps run on this
    host's CPU, are added.  Models without weights or on a GPU are not checked, nor is an optimizer that
    cannot be made again from its settings.
    """
    weights = model.trainable_weights if model.built else []
    if not weights or not all(map(_in_this_process, weights)):
        return
    weight_bytes, available = bytes_of(weights), available_bytes()
    if available is None or available.bytes > _ENOUGH * weight_bytes:
        return
    optimizer, on_cpu = getattr(model, "optimizer", None), ":CPU:" in home_device()
    slots: Sequence[Any] = ()  # none are to be made where the optimizer has them, or nobody knows
    if keras_compiled.is_optimizer(optimizer):
        slots = keras_compiled.to_be_built(optimizer, weights) or ()
    asked = options.first_steps
    whole = on_cpu and asked != "cut" and (asked == "whole" or not in_host_memory(model))
    share = _COMPUTED_HERE if on_cpu else 0.0
    if over_hosts(options.devices):
        share = _WHOLE if whole else _SENT
    working_bytes = _GRAPH_BYTES + round(share * weight_bytes)
    needed_bytes = bytes_of(slots) + working_bytes
    if needed_bytes <= available.bytes:
        return
    of_slots = f"{bytes_of(slots)} bytes for the slots of {type(optimizer).__name__} and " if slots else ""
    ways = [
        "train on a machine, or in a group, with more memory",
        "take an optimizer with fewer slots" if slots else "",
        "build the model in tf_ooo.host_memory(), so that no step runs whole here" if whole else "",
    ]
    raise BackendError(
        f"this process has {weight_bytes} bytes of trainable weights and needs {of_slots}about "
        f"{working_bytes} bytes for gradients, messages and graphs beside them, but {available.bytes} are "
        f"{available.said}: about {needed_bytes - available.bytes} more would do; "
        f"{', or '.join(filter(None, ways))}"
    )


def _in_this_process(variable: keras.Variable) -> bool:
    value = keras_variables.value_of(variable)
    return value is not None and ":CPU:" in value.device and "/job:worker/" not in value.device
