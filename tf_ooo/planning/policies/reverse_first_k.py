"""Reverse first-k scheduling for data parallel training (EuroSys 2022, doi 10.1145/3492321.3519563).

dW of the layers from k on stay in normal order.  Those of the first k layers wait until the whole dO
chain is done and then run lowest layer first, because the next forward needs layer 0's weights first.
Gradients are communicated in the order in which they are made, and run on into the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.common import one_worker, within_memory
from tf_ooo.planning.building.step_model import StepModel
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.simulation.simulator import simulate

_TRY_ALL_UP_TO = 256
_NEIGHBOURS = 8
_COMPARED = 5


def make(problem: Problem) -> Schedule:
    """The schedule for option ``k``; without it, the fastest k by simulation that fits into memory.

    All k are tried with up to 256 layers: the throughput need not rise and then fall with k.
    """
    layers = len(problem.layers)
    if "k" in problem.options:
        k = problem.option("k", 0)
        if k > layers:
            raise OptionsError(f"k must be within 0..{layers}, the number of layers, got {k}")
        return schedule(problem, k)
    if problem.devices == 1:
        return schedule(problem, 0)
    made = [schedule(problem, k) for k in by_period(problem)]
    if any(layer.occupancy for layer in problem.layers):
        # The simulator lets updates slow computation down, the model that sorted these does not.
        made[:_COMPARED] = sorted(made[:_COMPARED], key=lambda each: _step_s(problem, each))
    return within_memory(problem, made)


def _step_s(problem: Problem, made: Schedule) -> float:
    return simulate(made, problem.layers, problem.link, steps=4).steady_step_s


def schedule(problem: Problem, k: int) -> Schedule:
    """Reverse first-k with a given k, 0 to the number of layers."""
    backward = [
        Task("dW", task) if task >= 0 else Task("dO", -1 - task) for task in order(len(problem.layers), k)
    ]
    return one_worker("reverse_first_k", problem, backward, communications(backward))


def order(layers: int, k: int) -> list[int]:
    """The backward tasks: -1 - i is dO of layer i, i is its dW."""
    upper = [task for layer in range(layers - 1, k - 1, -1) for task in (-1 - layer, layer)]
    return [*upper, *(-1 - layer for layer in range(k - 1, -1, -1)), *range(k)]


def communications(backward: Iterable[Task]) -> list[Task]:
    """One for each dW, in the same order."""
    return [Task("comm", task.stage) for task in backward if task.kind == "dW"]


def by_period(problem: Problem) -> list[int]:
    """The k that were tried, the fastest first; of equally fast ones the smallest."""
    model = StepModel(problem)
    layers = model.layers
    found: dict[int, float] = {}
    place = {task.stage: number for number, task in enumerate(model.comms)}

    def period_s(k: int) -> float:
        if k not in found:
            backward = order(layers, k)
            found[k] = model.run(backward, [place[task] for task in backward if task in place]).period_s
        return found[k]

    for k in range(layers + 1) if layers <= _TRY_ALL_UP_TO else _samples(layers):
        period_s(k)
    if layers > _TRY_ALL_UP_TO:
        _descend(layers, found, period_s)
    return sorted(found, key=lambda k: (found[k] * (1 + 1e-12 * k), k))


def _samples(layers: int) -> Iterator[int]:
    """64 values spread over all; both ends are among them."""
    yield from sorted({layers * step // 63 for step in range(64)})


def _descend(layers: int, found: dict[int, float], period_s: Callable[[int], float]) -> None:
    """Looks around the best ones, with steps that become smaller."""
    step = layers // 63
    while step:
        for best in sorted(found, key=found.__getitem__)[:_NEIGHBOURS]:
            for k in (best - step, best + step):
                if 0 <= k <= layers:
                    period_s(k)
        step //= 2
