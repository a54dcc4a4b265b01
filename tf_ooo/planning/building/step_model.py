"""Defines a fast clock for one data parallel step, for searches that try thousands; a test checks it.

Forwards stand before all backward tasks, and a layer's forward waits for its own update: when a step's last
forward ends, the step before is over, and steps repeat from there.  One thing is left out: with
``LayerCosts.occupancy`` the simulator lets updates slow computation down; it has the last word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tf_ooo.errors import OptionsError
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.simulation.clock import LaneKind, Tasks, run
from tf_ooo.planning.simulation.simulator import task_seconds

COMPUTE, COMMUNICATION, UPDATE = (0, 0), (0, 1), (0, 2)


def one_worker(
    policy: str,
    problem: Problem,
    backward: Sequence[Task],
    communication: Sequence[Task] = (),
    *,
    barrier: bool = False,
    by_priority: bool = False,
    shares: Mapping[int, tuple[float, ...]] | None = None,
) -> Schedule:
    """Return F, the given backward tasks and updates, of one device or of each data parallel worker.

    Several workers send ``communication`` in its order or, ``by_priority``, the first listed that is ready.
    With a ``barrier`` the next step waits for all updates.  ``shares``: those of sliced gradients.
    """
    if problem.microbatches != 1:
        raise OptionsError(
            f"schedule {policy!r} on one device takes one micro-batch, got {problem.microbatches}"
        )
    layers = range(len(problem.layers))
    tasks = [Task("F", layer) for layer in layers]
    schedule = Schedule("single_device", policy)
    if problem.devices == 1:
        for task in backward:
            tasks += [task, Task("U", task.stage)] if task.kind == "dW" else [task]
        return dataclasses.replace(schedule, lanes={COMPUTE: TaskList(tasks)})
    # A layer without bytes is not communicated, and would have to wait for those that have some.
    sent = [task for task in communication if problem.layers[task.stage].weight_bytes]
    lanes = {
        COMPUTE: TaskList([*tasks, *backward]),
        **({COMMUNICATION: TaskList(sent)} if sent else {}),
        # Updates have a lane of their own: each runs as soon as its gradient is there.
        UPDATE: TaskList([Task("U", layer) for layer in layers]),
    }
    return dataclasses.replace(
        schedule,
        mode="data_parallel",
        workers=problem.devices,
        lanes=lanes,
        barrier=barrier,
        priority_lanes=frozenset({COMMUNICATION, UPDATE} & lanes.keys() if by_priority else {UPDATE}),
        parts={("comm", layer): held for layer, held in (shares or {}).items()},
    )


Shares = dict[int, tuple[float, ...]]


@dataclass(frozen=True)
class TimedStep:
    """Holds one step in seconds since its forward's end; ``sent``: communications in their order."""

    period_s: float
    weight_grad_end_s: list[float]
    comm_end_s: list[float]
    sent: list[int]


class StepModel:
    """Runs orders on the clock; communications are numbered by urgency: layer by layer, slice by slice."""

    def __init__(self, problem: Problem, shares: Shares | None = None) -> None:
        self.problem, self.shares = problem, shares or {}
        self.layers = len(problem.layers)
        slices = [len(self.shares.get(layer, (1,))) for layer in range(self.layers)]
        comms = [
            Task("comm", layer, part=part) for layer, count in enumerate(slices) for part in range(count)
        ]
        backward = tasks_of(order(self.layers, 0))
        reference = one_worker("reference", problem, backward, comms, by_priority=True, shares=self.shares)
        relation = Relation(reference, problem.layers)
        self.comms = [task for task in reference.tasks if task.kind == "comm"]
        node = {relation.task(place): place for place in range(len(relation))}
        numbers = range(self.layers)
        self.nodes = {kind: [node[Task(kind, n)] for n in numbers] for kind in ("F", "dO", "dW", "U")}
        self.nodes["comm"] = [node[task] for task in self.comms]
        seconds = task_seconds(relation, problem.layers, problem.link)
        self.forward_s, self.output_grad_s, self.weight_grad_s, self.update_s, self.comm_s = (
            seconds[self.nodes[kind]].tolist() for kind in ("F", "dO", "dW", "U", "comm")
        )
        # A step begins when all forwards have ended, and ends with those of the next step.
        source = np.concatenate([edge.source for edge in relation.edges])
        target = np.concatenate([edge.target for edge in relation.edges])
        computes = relation.lane == relation.lanes.index(COMPUTE)
        says_more = ~(computes[source] & computes[target])  # what computes keeps its order anyway
        self.tasks = Tasks(seconds, source[says_more], target[says_more], np.zeros(int(says_more.sum())))
        self.compute_s = sum(self.forward_s) + sum(self.output_grad_s) + sum(self.weight_grad_s)
        self.lower_bound_s = self._lower_bound_s()

    def _lower_bound_s(self) -> float:
        """Return a lower bound of the period: compute is one machine, and so is the link after a dO chain."""
        bound_s, sent_s, head_s = self.compute_s, 0.0, float("inf")
        for layer in range(self.layers):
            chain_s = sum(self.output_grad_s[layer:])
            head_s = min(head_s, chain_s + self.weight_grad_s[layer])
            sent_s += sum(self.comm_s[place] for place, task in enumerate(self.comms) if task.stage == layer)
            tail_s = min(self.update_s[: layer + 1]) + sum(self.forward_s[layer:])
            bound_s = max(bound_s, head_s + sent_s + tail_s)
        return float(bound_s)

    def run(self, backward: Sequence[int], order: Sequence[int] | None = None) -> TimedStep:
        """Run one step; ``order`` of communications None: whatever is ready, the most urgent first."""
        output_grads, weight_grads, comms = (self.nodes[kind] for kind in ("dO", "dW", "comm"))
        computes = [weight_grads[task] if task >= 0 else output_grads[-1 - task] for task in backward]
        places = range(len(comms)) if order is None else order
        lanes = [computes + self.nodes["F"], [comms[place] for place in places], self.nodes["U"]]
        sends = LaneKind.PRIORITY if order is None else LaneKind.ORDERED
        times = run(self.tasks, lanes, (LaneKind.ORDERED, sends, LaneKind.PRIORITY))
        place = {node: place for place, node in enumerate(comms)}
        return TimedStep(
            period_s=times.end_s[self.nodes["F"][-1]],
            weight_grad_end_s=[times.end_s[weight_grads[task.stage]] for task in self.comms],
            comm_end_s=[times.end_s[node] for node in comms],
            sent=[place[node] for node in times.begun if node in place] if order is None else list(order),
        )

    def schedule(self, policy: str, backward: Sequence[int], order: Sequence[int] | None = None) -> Schedule:
        """Return the schedule that has the period of :meth:`run`."""
        tasks, by_priority = tasks_of(backward), order is None
        comms = self.comms if order is None else [self.comms[place] for place in order]
        return one_worker(policy, self.problem, tasks, comms, by_priority=by_priority, shares=self.shares)


def tasks_of(backward: Sequence[int]) -> list[Task]:
    """Return the tasks of numbers: -1 - i is dO of layer i, i is its dW."""
    return [Task("dW", task) if task >= 0 else Task("dO", -1 - task) for task in backward]


_TRY_ALL_UP_TO = 256
_NEIGHBOURS = 8


def order(layers: int, k: int) -> list[int]:
    """Return the order of reverse first-k in numbers: -1 - i is dO of layer i, i is its dW."""
    upper = [task for layer in range(layers - 1, k - 1, -1) for task in (-1 - layer, layer)]
    return [*upper, *(-1 - layer for layer in range(k - 1, -1, -1)), *range(k)]


def by_period(problem: Problem) -> list[int]:
    """Return all k that were tried, the fastest first; among equals the smallest first."""
    model = StepModel(problem)
    layers = model.layers
    periods_s: dict[int, float] = {}
    place = {task.stage: number for number, task in enumerate(model.comms)}

    def period_s(k: int) -> float:
        if k not in periods_s:
            backward = order(layers, k)
            periods_s[k] = model.run(backward, [place[task] for task in backward if task in place]).period_s
        return periods_s[k]

    # 64 values spread over all, both ends among them.
    samples = sorted({layers * step // 63 for step in range(64)})
    for k in range(layers + 1) if layers <= _TRY_ALL_UP_TO else samples:
        period_s(k)
    # Around the best ones, with steps that become smaller.
    step = layers // 63 if layers > _TRY_ALL_UP_TO else 0
    while step:
        for best in sorted(periods_s, key=periods_s.__getitem__)[:_NEIGHBOURS]:
            for k in (best - step, best + step):
                if 0 <= k <= layers:
                    period_s(k)
        step //= 2
    return sorted(periods_s, key=lambda k: (periods_s[k] * (1 + 1e-12 * k), k))
