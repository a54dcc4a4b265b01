"""Simulates what would be better, where all ranks train slower than one alone would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.modes.data_parallel.planned import factor_for, stock_step_s
from tf_ooo.report.gain import Gain

# Batches of so many times the rows.
_ROWS = (1, 2, 4, 8)
# A link that was measured before may be wrong by so much.
_MOST_OFF = 64.0
StepSeconds = Callable[[int, int], float]


def advice(ranks: int, alone_s: float, step_s: StepSeconds, gain: Gain) -> str:
    """Return one line: how much slower, and how many ranks, or how large batches, to take.

    Args:
        ranks: that train now.
        alone_s: seconds of one rank's step without the others; of larger batches as many times more.
        step_s: predicts the seconds of a step of so many ranks with so many times the rows.
        gain: as measured.
    """
    best, best_ranks, best_rows = 1.0, 1, 1
    for count in range(2, ranks + 1):
        for rows in _ROWS:
            throughput = count * rows * alone_s / step_s(count, rows)
            if throughput > best:
                best, best_ranks, best_rows = throughput, count, rows
    if best_ranks == 1:
        return f"{gain.text}; one rank alone is faster than all that was simulated: python train.py"
    rows_text = f" with batches of {best_rows} times as many rows" if best_rows > 1 else ""
    return f"{gain.text}; by simulation {best_ranks} ranks{rows_text} reach {best:.2f}x the throughput of one"


def from_times(ranks: int, alone_s: float, together_s: float) -> StepSeconds:
    """Estimate step times from two known ones: a ring sends (n - 1) / n of the bytes."""
    sent_s = max(0.0, together_s - alone_s) / ((ranks - 1) / ranks)
    return lambda count, rows: rows * alone_s + sent_s * (count - 1) / count


def from_costs(
    layers: Sequence[LayerCosts], link: Link, alone_s: float, together_s: float, ranks: int, steps: int
) -> StepSeconds:
    """Simulate the stock order, with costs of layers that are made to fit both measured times.

    Work is scaled by what a rank takes alone, messages by what all take.  OOOError: it cannot be simulated.
    """
    factor = alone_s / max(sum(layer.busy_s + layer.update_s for layer in layers), 1e-9)
    fitted = [layer.slowed(factor) for layer in layers]

    def together(times: float) -> float:
        return stock_step_s(fitted, link.slowed(times), ranks, steps)

    between = link.slowed(factor_for(together, together_s, (1 / _MOST_OFF, _MOST_OFF)))

    def step_s(count: int, rows: int) -> float:
        return stock_step_s([layer.scaled(rows) for layer in fitted], between, count, steps)

    return step_s
