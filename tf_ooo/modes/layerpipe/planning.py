"""Makes the plan of a model that is spread over devices."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_compiled, keras_layers
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OOOError
from tf_ooo.modes.layerpipe.reporting import fill_report
from tf_ooo.modes.layerpipe.rounds import stages_of
from tf_ooo.modes.layerpipe.spread import SpreadPlan, lower_shares
from tf_ooo.modes.layerpipe.traced import Traced, renumbered
from tf_ooo.planning.building.layerpipe_cuts import in_rounds
from tf_ooo.planning.choosing.on_paper import policies_of
from tf_ooo.planning.choosing.plan import Candidate, Plan, as_asked, choose, policy_named, tried
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import Policy
from tf_ooo.report.report import Report
from tf_ooo.report.summary import Gain
from tf_ooo.rewriting.step_graph import StepGraph, variable_layers
from tf_ooo.tracing.variables import optimizers_of
from tf_ooo.units import seconds_text

if TYPE_CHECKING:
    import keras


_LOG = logging.getLogger("tf_ooo")
# Batches of the plan, for each processor: enough for the rounds at both ends not to matter.
_BATCHES = 4
MODE = "layerpipe"
# Predictions may be off by so much: a division of layers that saves less may just as well lose.
LEAST_GAIN = 1.1
# Batches of so many times the rows.
_ROWS = (1, 2, 4)
# Training waits for what would be better.
_MOST_S = 5.0
StepSeconds = Callable[[Sequence[LayerCosts], int], float]


def plan_spread(
    step: StepGraph, costs: CostTable, traced: Traced, devices: Sequence[str], schedule: str, report: Report
) -> tuple[SpreadPlan, Callable[[Gain], str]]:
    """Plan, and report the plan; also return a function that says what would be better if it is slow.

    ``traced``: the ``step`` before it is spread, which shows what can be divided.
    """
    graph = step.graph
    layers = [set(layer.variables) for layer in graph.layers]
    options: dict[str, Any] = {"lower_shares": lower_shares(renumbered(traced, layers), costs.op_seconds)}
    plan = make_plan(schedule, costs.layers, costs.link, len(devices), _BATCHES * len(devices), options)
    stages = stages_of(plan.schedule, len(costs.layers))
    trained = {name for variable in graph.variables for name in (variable.name, *variable.slots)}
    home = {
        name: stages.of["dW" if name in trained else "F", layer]
        for name, layer in variable_layers(step).items()
    }
    fill_report(report, graph, plan, costs, stages, devices)

    def step_s(layers: Sequence[LayerCosts], count: int) -> float:
        other = make_plan(schedule, layers, costs.link, count, _BATCHES * count, options)
        return other.timeline.steady_step_s

    advise = partial(advice, costs.layers, len(devices), plan.timeline.steady_step_s, step_s)
    return SpreadPlan(stages, devices, layers, costs.op_seconds, home), advise


def make_plan(
    schedule: str,
    layers: Sequence[LayerCosts],
    link: Link,
    devices: int,
    microbatches: int,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Return the plan of a policy, or of ``auto``, as this mode runs it, with why layers are left whole.

    Cuts inside of layers also send weights and stored inputs.  So ``auto`` takes them only where the
    predicted step is at least :data:`LEAST_GAIN` times as fast as with whole layers.  Each policy gets the
    ``options`` that it has.  Raises OptionsError: more devices than tasks.
    """
    problem = Problem(tuple(layers), devices, microbatches, link, mode=MODE)

    def asked(policy: Policy) -> Problem:
        own = {name: value for name, value in (options or {}).items() if name in policy.options}
        return dataclasses.replace(problem, options=own)

    if schedule == "auto":
        return _whole_or_divided(
            [tried(policy, asked(policy), as_run=_as_run) for policy in policies_of(MODE)]
        )
    policy = policy_named(schedule, MODE)
    return as_asked(policy, asked(policy), as_run=_as_run)


def _as_run(schedule: Schedule) -> Schedule:
    """Order the schedule in rounds if layers are whole: more batches are on their way here than in 1F1B."""
    return in_rounds(schedule) if schedule.fused_backward else schedule


def _whole_or_divided(candidates: Sequence[Candidate]) -> Plan:
    """Return the fastest plan that divides layers, unless the fastest other one is nearly as fast."""
    trials = [candidate.trial for candidate in candidates if candidate.trial is not None]
    whole, divided = ([t for t in trials if t.schedule.fused_backward is fused] for fused in (True, False))
    if not trials:  # the one that divides layers can use the most devices, and says how many
        raise [candidate.error for candidate in candidates if candidate.error is not None][-1]
    if not whole or not divided:
        return choose(candidates)
    best, best_whole = (min(group, key=lambda trial: trial.step_s) for group in (divided, whole))
    step_s, whole_s = best.timeline.steady_step_s, best_whole.timeline.steady_step_s
    gain = whole_s / step_s if step_s else 1.0
    if gain >= LEAST_GAIN:
        return choose(candidates, lambda candidate: (candidate.trial is not best,))
    why = (
        f"layers are left whole, as in PipeDream: dividing them is predicted to gain {gain:.2f}x, and sends "
        f"more; from {LEAST_GAIN}x on it is done (schedule={best.schedule.policy!r} does it now)"
    )
    return choose(candidates, lambda candidate: (candidate.trial is not best_whole,), why)


def note_rebuilt_weights(report: Report, model: keras.Model) -> None:
    """Note for which optimizers and layers ``weights="ema"`` is not exact."""
    notes = [
        f"weights='ema': earlier weights are rebuilt from the updates that {type(optimizer).__name__} made, "
        "which change from step to step; weights='stash' is exact"
        for optimizer in optimizers_of(model)
        if not keras_compiled.is_plain_sgd(optimizer)
    ]
    if names := keras_layers.batch_normalizations(model):
        notes.append(
            f"weights='ema': {len(names)} BatchNormalization layers, {names[0]} first, use the "
            "statistics of their forward pass with rebuilt weights"
        )
    report.note(*notes, log=logging.WARNING)


def in_order_of(costs: Sequence[str], layers: Sequence[str]) -> list[int]:
    """Return for each named cost the number of its layer.

    Costs are measured in the order in which graph optimizers leave the layers of a step, which differs from
    the trace's for parallel branches (a block and its shortcut).  Layers are matched by names; else by names
    without Keras' numbers, which go on when a model is made again in one process; else, if names were made up
    by hand, by their places.
    """
    for key in (_sorted_parts, _ranked):
        wanted, own = key(costs), key(layers)
        place = {name: number for number, name in enumerate(own)}
        if len(place) == len(own) and sorted(wanted) == sorted(own):
            return [place[name] for name in wanted]
    return list(range(len(layers)))


def _sorted_parts(names: Sequence[str]) -> list[str]:
    """Sort the variables that each name lists."""
    return [", ".join(sorted(name.split(", "))) for name in names]


def _ranked(names: Sequence[str]) -> list[str]:
    """Replace numbers in names by their ranks: dense_7 and dense_9 are dense_0 and dense_1."""
    parts = [[_split(part) for part in name.split("/")] for name in _sorted_parts(names)]
    numbers: dict[str, set[int]] = {}
    for kind, number in (pair for of_name in parts for pair in of_name):
        numbers.setdefault(kind, set()).add(number)
    ranks = {kind: sorted(known) for kind, known in numbers.items()}
    return ["/".join(f"{kind}_{ranks[kind].index(number)}" for kind, number in pairs) for pairs in parts]


def _split(part: str) -> tuple[str, int]:
    kind, _, number = part.rpartition("_")
    return (kind, int(number)) if number != part and number.isdecimal() else (part, 0)


def advice(
    layers: Sequence[LayerCosts], devices: int, predicted_s: float, step_s: StepSeconds, gain: Gain
) -> str:
    """Return one line: how much slower it is, and which devices and batches to take.

    Args:
        layers: costs of one batch.
        devices: the devices of the present plan.
        predicted_s: seconds of its step; predictions are corrected by the error of this one.
        step_s: plans for layers on so many devices, and predicts the seconds of a step.
        gain: as measured.
    """
    began_s = time.perf_counter()
    corrected = gain.ours_median_s / predicted_s
    best_s, best_rows, best_devices = gain.baseline_median_s, 0, 1
    for count in range(2, devices + 1):
        for rows in _ROWS:
            if (count, rows) == (devices, 1) or time.perf_counter() - began_s > _MOST_S:
                continue
            try:
                each_s = step_s([layer.scaled(rows) for layer in layers], count) * corrected / rows
            except OOOError:  # too few layers
                continue
            if each_s < best_s:
                best_s, best_rows, best_devices = each_s, rows, count
    if not best_rows:
        return f"{gain.text}; one device (mode='single_device') is faster than all that was simulated"
    larger = f", batches of {best_rows} times as many rows" if best_rows > 1 else ""
    for_each = " for each batch of today's rows" if best_rows > 1 else ""
    return f"{gain.text}; by simulation devices={best_devices}{larger} takes {seconds_text(best_s)}{for_each}"
