"""A pipeline's fit: stock steps where that may be all, then steps batch by batch, or one device after all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import iterators, train_function
from tf_ooo.fit.experiment import Experiment, Kept, StockFirst, forget_steps
from tf_ooo.fit.paying import Budget
from tf_ooo.modes.pipeline.first_batch import FirstBatch
from tf_ooo.modes.pipeline.measuring import Beginning
from tf_ooo.modes.pipeline.plans import PipelinePlans
from tf_ooo.modes.pipeline.steps import PipelineSteps
from tf_ooo.tracing.micro_batches import StepRefused
from tf_ooo.tracing.traces import trace_count

if TYPE_CHECKING:
    import keras

# Finding out whether several devices are faster takes so many times as long as tracing a stock step, at most.
_TRACES = 4


class PipelineFit(Experiment):
    """A fit of a model, in executions as Keras asks for them."""

    def __init__(self, plans: PipelinePlans, first_batch: FirstBatch, model: keras.Model) -> None:
        self._plans, self._model = plans, model
        self.steps = PipelineSteps(plans, first_batch, model, Beginning)
        super().__init__(ByBatches(self))
        steps, stock = plans.distributed.steps, plans.distributed.stock
        if steps is not None and stock is not None and plans.may_stay_stock(model):
            self.enter(self._stock_first(steps, stock))
        forget_steps(plans.distributed.report)

    def _stock_first(self, steps: int, stock: Callable[[Any], Any]) -> StockFirst:
        """Return what finds out from stock steps whether a pipeline pays."""
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
        """Return one execution, batch by batch, as long as one device is not known to do better."""
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
        """Go on with stock, first with the rest of this execution, whose logs it returns; None: no rest."""
        self.steps.bring_back()
        stock = self._plans.distributed.stock
        if stock is None:
            return None
        self.enter(Kept(stock))
        if not rest:
            return None
        with train_function.steps_per_execution_set_to(self._model, len(rest)):
            return stock(iterators.iterator_over(rest, iterator))


class ByBatches(Experiment):
    """Executions are run batch by batch; what else is to be done is up to the phase of the steps."""

    def __init__(self, fit: PipelineFit) -> None:
        super().__init__(fit.steps.experiment)
        self._fit = fit

    def run(self, given: Any) -> Any:
        batches = iterators.take(given, train_function.steps_per_execution(self._fit.steps.model))
        if not batches:
            raise StopIteration
        return self._fit.by_batches(batches, given)
