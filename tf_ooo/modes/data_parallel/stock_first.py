"""Stock steps at the beginning of a fit, until all ranks know whether the rest pays for a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import train_function
from tf_ooo.fit.paying import StockFirst
from tf_ooo.modes.data_parallel import planned
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.tracing.unrolled import Unrolled

if TYPE_CHECKING:
    from tf_ooo.modes.data_parallel.ranks import RanksInStep

# The steps in another order, and a single one, which is profiled, are traced. The first takes up to 1.4 times
# as long as the stock order's, as it is also rewritten; the second less than half of it.
_TRACES = 2
# Runs batches; their logs, the seconds of a step, and whether something was traced meanwhile.
Timed = Callable[[Unrolled, Sequence[Any]], tuple[Any, float, bool]]


def may_wait(options: DataParallel) -> bool:
    """Say whether stock steps come first: the rest of the fit must pay for profile, plan and comparison."""
    # With ``strict`` a failure is to show in the first steps.
    asked = options.compare is True or options.strict or not options.may_fall_back
    return options.profile_steps > 0 and not asked


class RanksStockFirst:
    """Several stock steps in one function, for one fit.

    What the slowest rank took counts, so that all ranks come to the same end after the same execution.

    Args:
        ranks: of the fit.
        stock: runs batches in the stock order.
        trace_s: what tracing it took in an earlier fit, by the slowest rank; 0: it was not traced.
    """

    def __init__(self, ranks: RanksInStep, stock: Unrolled, trace_s: float = 0.0) -> None:
        of_execution, of_epoch = train_function.steps_per_execution(ranks.model), ranks.lockstep.of_epoch
        self._engine, self._stock = ranks.engine, stock
        self._gradient_bytes = sum(4 * math.prod(w.shape) for w in ranks.model.trainable_weights)
        together = min(of_execution, of_epoch or of_execution)
        self.known = StockFirst(
            _TRACES, ranks.executions_of_fit(), together, trace_s, steps=ranks.steps_of_fit()
        )

    def run(self, batches: Sequence[Any], timed: Timed) -> Any:
        """Return one execution; the logs of its last step."""
        known = self.known
        if not known.untimed or len(batches) < known.together:  # a short one tells nothing about the others
            outputs = self._stock(batches)
            known.add(None, False)
            return outputs
        outputs, each_s, traced = timed(self._stock, batches)
        everyone = self._engine.gather((each_s, traced))
        each_s, traced = max(theirs_s for theirs_s, _ in everyone), any(each for _, each in everyone)
        known.beside_s = planned.most_seconds(each_s, self._gradient_bytes)
        known.add(each_s * len(batches), traced)
        return outputs
