"""What would be better, where all ranks train slower than one alone would: by simulation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from tf_ooo.costs.layer_costs import SECONDS, LayerCosts, Link
from tf_ooo.modes.data_parallel.planned import stock_step_s
from tf_ooo.report.gain import Gain

# Batches of so many times the rows.
_ROWS = (1, 2, 4, 8)
# A link that was measured before may be wrong by so much; so often the range is halved.
_MOST_OFF, _HALVINGS = 64.0, 16
StepSeconds = Callable[[int, int], float]


def advice(ranks: int, alone_s: float, step_s: StepSeconds, gain: Gain) -> str:
    """One line: how much slower, and how many ranks, or how large batches, to take.

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
    """What steps would take where nothing but two times is known: a ring sends (n - 1) / n of the bytes."""
    sent_s = max(0.0, together_s - alone_s) / ((ranks - 1) / ranks)
    return lambda count, rows: rows * alone_s + sent_s * (count - 1) / count


def from_costs(
    layers: Sequence[LayerCosts], link: Link, alone_s: float, together_s: float, ranks: int, steps: int
) -> StepSeconds:
    """By simulation of the stock order, with costs of layers that are made to fit both measured times.

    Work is scaled by what a rank takes alone, messages by what all take.  OOOError: it cannot be simulated.
    """
    factor = alone_s / max(sum(layer.busy_s + layer.update_s for layer in layers), 1e-9)
    fitted = [_slower(layer, factor) for layer in layers]
    low, high = 1 / _MOST_OFF, _MOST_OFF
    for _ in range(_HALVINGS):
        times = math.sqrt(low * high)
        if stock_step_s(fitted, _times_as_slow(link, times), ranks, steps) < together_s:
            low = times
        else:
            high = times
    between = _times_as_slow(link, math.sqrt(low * high))

    def step_s(count: int, rows: int) -> float:
        return stock_step_s([layer.scaled(rows) for layer in fitted], between, count, steps)

    return step_s


def _slower(layer: LayerCosts, factor: float) -> LayerCosts:
    return dataclasses.replace(layer, **{name: getattr(layer, name) * factor for name in SECONDS.values()})


def _times_as_slow(link: Link, times: float) -> Link:
    return Link(link.latency_s * times, link.bytes_per_s / times)
