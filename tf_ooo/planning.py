"""``tf_ooo.plan``: the schedule of a named policy, or the best of all, checked by simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link, check_layers
from tf_ooo.errors import CostError, MemoryLimitError, OOOError, OptionsError
from tf_ooo.schedule import Schedule, TaskList
from tf_ooo.schedulers import POLICIES
from tf_ooo.schedulers.problem import Policy, Problem
from tf_ooo.simulator import simulate
from tf_ooo.timeline import Timeline

DEFAULT_POLICY = "fast_forward"
# Above this, simulating takes most of the time of planning; simulate() tells what plan() leaves open.
_TASKS_TO_PREDICT = 2_000_000
_STEADY_STEPS = 4


@dataclass(frozen=True)
class Candidate:
    """One schedule that ``auto`` has looked at.

    ``reason`` says why it cannot be taken, empty where it can; then there is a timeline.
    """

    name: str
    schedule: Schedule | None = None
    timeline: Timeline | None = None
    reason: str = ""

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step; infinite where there is none."""
        return float("inf") if self.timeline is None else step_s(self.timeline)


def plan(
    training_graph: Any = None,
    costs: Any = None,
    schedule: str = DEFAULT_POLICY,
    memory_limit_bytes: int | None = None,
    *,
    layers: Sequence[LayerCosts] | None = None,
    devices: int = 1,
    microbatches: int = 1,
    link: Link | None = None,
    mode: str | None = None,
    **options: Any,
) -> Schedule:
    """An order of all tasks of a training step.

    Args:
        training_graph: from :func:`tf_ooo.classify`; or None, and ``layers``.
        costs: seconds of the graph's ops by name, or a CostTable that holds them; None: the backward
            pass of one device is ordered, and no time predicted.
        schedule: a policy's name, or ``"auto"``: the fastest of the mode, by simulation.
        memory_limit_bytes: of each device.
        layers: planning without a model: a LayerCosts each, for one micro-batch.
        devices: devices of a pipeline, or workers of data parallel training.
        microbatches: micro-batches of one step.
        link: between each two devices.
        mode: single_device, data_parallel, pipeline or layerpipe; None: the policy's own, for
            ``"auto"`` pipeline if there are several devices.
        options: what a policy offers, for example ``group=2`` of modulo.

    Raises:
        OptionsError: an unknown policy, mode or option, or more stages than layers.
        CostError: costs are missing or no numbers.
        MemoryLimitError: no schedule of that name stays within the limit; says the smallest limit
            that one can keep.
    """
    if training_graph is not None and costs is None:
        from tf_ooo.planner import plan_graph  # noqa: PLC0415 - imports TensorFlow

        return plan_graph(training_graph, schedule, memory_limit_bytes)
    if training_graph is not None:
        layers = layers_of_graph(training_graph, costs)
        between = link if link is not None else getattr(costs, "link", None)
        problem = _problem(layers, devices, microbatches, between, memory_limit_bytes, options)
        return _only_tasks_of(training_graph, _plan(problem, schedule, mode))
    table = getattr(layers, "layers", layers)
    if table is None:
        raise OptionsError("plan() needs a training graph, or layers=[LayerCosts, ...]")
    between = link if link is not None else getattr(layers, "link", None)
    return _plan(_problem(table, devices, microbatches, between, memory_limit_bytes, options), schedule, mode)


def _problem(
    layers: Any, devices: int, microbatches: int, link: Link | None, limit_bytes: int | None, options: Any
) -> Problem:
    between = Link() if link is None else link
    problem = Problem(check_layers(layers), devices, microbatches, between, limit_bytes, options)
    check_problem(problem)
    return problem


def _plan(problem: Problem, schedule: str, mode: str | None) -> Schedule:
    if schedule == "auto":
        return best(candidates(problem, mode), problem)
    return _predicted(make(policy_named(schedule, mode), dataclasses.replace(problem, mode=mode)), problem)


def _only_tasks_of(training_graph: Any, schedule: Schedule) -> Schedule:
    """Layers of a graph may lack a dO of their own; a pipeline's stages are made of whole layers."""
    from tf_ooo.lowering import task_ops  # noqa: PLC0415 - with a graph only

    if schedule.stages:
        return schedule
    there = task_ops(training_graph).ops
    lanes = {
        lane: TaskList([task for task in tasks if task in there or task.kind not in ("dO", "dW")])
        for lane, tasks in schedule.lanes.items()
    }
    return dataclasses.replace(schedule, lanes=lanes)


def layers_of_graph(training_graph: Any, costs: Any) -> tuple[LayerCosts, ...]:
    """The costs of a graph's layers; CostError names an op without seconds."""
    from tf_ooo.costs.from_graph import graph_costs  # noqa: PLC0415 - with a graph only

    seconds = getattr(costs, "op_seconds", costs)
    if isinstance(seconds, Mapping) and seconds:
        return graph_costs(training_graph, seconds).layers
    layers = getattr(costs, "layers", ())
    if len(layers) != len(training_graph.layers):
        raise CostError(
            "costs of a graph are seconds by op name, or a CostTable with op_seconds or with the graph's "
            f"{len(training_graph.layers)} layers"
        )
    return tuple(layers)


def check_problem(problem: Problem) -> None:
    """OptionsError unless the numbers are whole and above 0."""
    for name in ("devices", "microbatches"):
        value = getattr(problem, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionsError(f"{name} must be a whole number of at least 1, got {value!r}")
    limit = problem.memory_limit_bytes
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0
    ):
        raise OptionsError(f"memory_limit_bytes must be above 0, got {limit!r}")
    if not isinstance(problem.link, Link):
        raise CostError(f"link must be a tf_ooo.Link, got {problem.link!r:.80}")


def policy_named(name: str, mode: str | None = None) -> Policy:
    """A row of the table.  OptionsError names the ones there are."""
    if name not in POLICIES:
        raise OptionsError(f"schedule={name!r} is not accepted; accepted: auto, {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if mode is not None and mode not in policy.modes:
        raise OptionsError(f"schedule={name!r} is one of mode {' or '.join(policy.modes)}, not {mode!r}")
    return policy


def make(policy: Policy, problem: Problem) -> Schedule:
    """The policy's schedule, within the memory limit; MemoryLimitError where it has none."""
    for name in problem.options:
        if name not in policy.options:
            known = f"its options are {', '.join(policy.options)}" if policy.options else "it has no options"
            raise OptionsError(
                f"schedule {policy.name!r}: {name}={problem.options[name]!r} is unknown; {known}"
            )
    schedule = policy.make(problem)
    limit = problem.memory_limit_bytes
    if limit is None or _peak(schedule, problem) <= limit:
        return schedule
    lean = policy.make(dataclasses.replace(problem, memory_limit_bytes=0))
    smallest = _peak(lean, problem)
    if smallest > limit:
        raise MemoryLimitError(limit, smallest)
    return lean


def candidates(
    problem: Problem, mode: str | None = None, on_progress: Callable[[str], None] | None = None
) -> list[Candidate]:
    """Every schedule that is legal for the mode, simulated; the fastest first.

    Args:
        problem: what to schedule; options of policies are left to the policies' own search.
        mode: None: pipeline if there are several devices, else single_device.
        on_progress: is told the name of each policy before it is tried.
    """
    wanted = mode or ("pipeline" if problem.devices > 1 else "single_device")
    found = []
    for policy in _of_mode(wanted):
        if on_progress is not None:
            on_progress(policy.name)
        chosen = {name: value for name, value in problem.options.items() if name in policy.options}
        found.append(_candidate(policy, dataclasses.replace(problem, options=chosen, mode=wanted)))
    return sorted(found, key=lambda candidate: candidate.step_s)


def _of_mode(mode: str) -> Iterator[Policy]:
    rows = [policy for policy in POLICIES.values() if mode in policy.modes]
    if not rows:
        modes = sorted({mode for policy in POLICIES.values() for mode in policy.modes})
        raise OptionsError(f"mode={mode!r} is not accepted; accepted: {', '.join(modes)}")
    yield from rows


def _candidate(policy: Policy, problem: Problem) -> Candidate:
    try:
        schedule = make(policy, problem)
        timeline = simulated(schedule, problem)
    except MemoryLimitError as error:
        return Candidate(policy.name, reason=f"needs {error.smallest_bytes} bytes")
    except OOOError as error:
        return Candidate(policy.name, reason=str(error))
    return Candidate(policy.name, schedule, timeline)


def best(found: Sequence[Candidate], problem: Problem) -> Schedule:
    """The fastest candidate's schedule with its predictions; MemoryLimitError where there is none."""
    first = min(found, key=lambda candidate: candidate.step_s)
    if first.schedule is None or first.timeline is None:
        raise _none_left(found, problem)
    return _with_prediction(first.schedule, first.timeline)


def _none_left(found: Sequence[Candidate], problem: Problem) -> OOOError:
    peaks = []
    for candidate in found:
        policy = POLICIES[candidate.name]
        lean = dataclasses.replace(problem, memory_limit_bytes=0, options={})
        try:
            peaks.append(_peak(policy.make(lean), problem))
        except OOOError:
            continue
    if problem.memory_limit_bytes is not None and peaks:
        return MemoryLimitError(problem.memory_limit_bytes, min(peaks))
    return OptionsError(f"no schedule is possible: {'; '.join(f'{c.name}: {c.reason}' for c in found)}")


def step_s(timeline: Timeline) -> float:
    """Predicted seconds of one step.

    A pipeline's step ends for all stages together.  In data parallel training and on one device steps
    overlap; in an asynchronous schedule each micro-batch is a step, and this is the time of all of them.
    """
    schedule = timeline.schedule
    if schedule.asynchronous:
        return timeline.steady_step_s * schedule.microbatches
    return timeline.makespan_s if schedule.mode == "pipeline" else timeline.steady_step_s


def simulated(schedule: Schedule, problem: Problem) -> Timeline:
    """One step; where steps overlap as many as show the steady state, in time and in memory."""
    overlap = schedule.mode in ("single_device", "data_parallel") and len(schedule.lanes) > 1
    steps = _STEADY_STEPS + schedule.steps_ahead if overlap else 1
    return simulate(schedule, problem.layers, problem.link, steps)


def _peak(schedule: Schedule, problem: Problem) -> int:
    return max(simulated(schedule, problem).peak_bytes, default=0)


def _predicted(schedule: Schedule, problem: Problem) -> Schedule:
    if len(schedule.tasks) > _TASKS_TO_PREDICT:
        return schedule
    return _with_prediction(schedule, simulated(schedule, problem))


def _with_prediction(schedule: Schedule, timeline: Timeline) -> Schedule:
    peak = max(timeline.peak_bytes, default=0)
    return dataclasses.replace(schedule, predicted_step_s=step_s(timeline), predicted_peak_bytes=peak)
