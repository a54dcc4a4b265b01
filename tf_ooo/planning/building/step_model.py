"""A fast clock for one data parallel step, for searches that try thousands; a test compares its periods.

Forwards stand before all backward tasks, and a layer's waits for its own update: when a step's last forward
ends nothing of the step before is left, and steps repeat from there.  One thing is left out: with
``LayerCosts.occupancy`` the simulator lets updates slow computation down; it has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tf_ooo.planning.building.common import one_worker
from tf_ooo.planning.building.link_order import serve
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.simulation.simulator import task_seconds

Shares = dict[int, tuple[float, ...]]


@dataclass(frozen=True)
class TimedStep:
    """One step in seconds since its forward's end; ``sent``: communications in their order."""

    period_s: float
    weight_grad_end_s: list[float]
    comm_end_s: list[float]
    sent: list[int]


class StepModel:
    """Runs orders on paper; communications are numbered by urgency: layer by layer, slice by slice."""

    def __init__(self, problem: Problem, shares: Shares | None = None) -> None:
        self.problem, self.shares = problem, shares or {}
        self.layers = len(problem.layers)
        reference = self._reference()
        relation = Relation(reference, problem.layers)
        seconds = task_seconds(relation, problem.layers, problem.link).tolist()
        self.comms = [task for task in reference.tasks if task.kind == "comm"]
        node = {relation.task(place): place for place in range(len(relation))}
        needs, needs_before = _sources(relation)
        numbers = range(self.layers)
        of = {kind: [node[Task(kind, layer)] for layer in numbers] for kind in ("F", "dO", "dW", "U")}
        of["comm"] = [node[task] for task in self.comms]
        self.forward_s, self.output_grad_s, self.weight_grad_s, self.update_s, self.comm_s = (
            [seconds[place] for place in of[kind]] for kind in ("F", "dO", "dW", "U", "comm")
        )
        self.comm_needs = _restricted(of["comm"], needs, of["dW"])
        self.update_needs = _restricted(of["U"], needs, of["comm"])
        self.update_needs_grad = _restricted(of["U"], needs, of["dW"])  # where nothing is communicated
        self.forward_needs = _restricted(of["F"], needs_before, of["U"])
        self.compute_s = sum(self.forward_s) + sum(self.output_grad_s) + sum(self.weight_grad_s)
        self.lower_bound_s = self._lower_bound_s()

    def _reference(self) -> Schedule:
        down = range(self.layers - 1, -1, -1)
        backward = [Task(kind, layer) for layer in down for kind in ("dO", "dW")]
        comms = [
            Task("comm", layer, part=part)
            for layer in range(self.layers)
            for part in range(len(self.shares.get(layer, (1,))))
        ]
        return one_worker("reference", self.problem, backward, comms, by_priority=True, shares=self.shares)

    def _lower_bound_s(self) -> float:
        """No order is faster: compute is one machine, and so is the link, which begins with a dO chain."""
        bound_s, sent_s, head_s = self.compute_s, 0.0, float("inf")
        for layer in range(self.layers):
            chain_s = sum(self.output_grad_s[layer:])
            head_s = min(head_s, chain_s + self.weight_grad_s[layer])
            sent_s += sum(self.comm_s[place] for place, task in enumerate(self.comms) if task.stage == layer)
            tail_s = min(self.update_s[: layer + 1]) + sum(self.forward_s[layer:])
            bound_s = max(bound_s, head_s + sent_s + tail_s)
        return float(bound_s)

    def run(self, backward: Sequence[int], order: Sequence[int] | None = None) -> TimedStep:
        """Return one step; ``order`` of communications None: whatever is ready, the most urgent first."""
        now_s = 0.0
        done_s = [0.0] * self.layers
        for task in backward:
            if task >= 0:
                now_s += self.weight_grad_s[task]
                done_s[task] = now_s
            else:
                now_s += self.output_grad_s[-1 - task]
        ready_s = [max(map(done_s.__getitem__, needs), default=0.0) for needs in self.comm_needs]
        if order is None:
            comm_end_s, sent = serve(ready_s, self.comm_s, range(len(ready_s)))
        else:
            comm_end_s, sent = _in_order(ready_s, self.comm_s, order), list(order)
        updated_s = [
            max((*map(comm_end_s.__getitem__, sent_first), *map(done_s.__getitem__, grads)), default=0.0)
            for sent_first, grads in zip(self.update_needs, self.update_needs_grad, strict=True)
        ]
        updated_s, _ = serve(updated_s, self.update_s, range(self.layers))
        for layer, needs in enumerate(self.forward_needs):
            now_s = max(now_s, max(map(updated_s.__getitem__, needs), default=0.0)) + self.forward_s[layer]
        return TimedStep(now_s, ready_s, comm_end_s, sent)

    def schedule(self, policy: str, backward: Sequence[int], order: Sequence[int] | None = None) -> Schedule:
        """The schedule whose period :meth:`run` tells."""
        tasks = tasks_of(backward)
        places = range(len(self.comms)) if order is None else order
        comms = [self.comms[place] for place in places]
        return one_worker(policy, self.problem, tasks, comms, by_priority=order is None, shares=self.shares)


def tasks_of(backward: Sequence[int]) -> list[Task]:
    """-1 - i is dO of layer i, i its dW."""
    return [Task("dW", task) if task >= 0 else Task("dO", -1 - task) for task in backward]


def _in_order(ready_s: Sequence[float], seconds: Sequence[float], order: Sequence[int]) -> list[float]:
    end_s, now_s = [0.0] * len(ready_s), 0.0
    for number in order:
        now_s = max(now_s, ready_s[number]) + seconds[number]
        end_s[number] = now_s
    return end_s


def _sources(relation: Relation) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return for each node what it needs in the same step, and in the step before."""
    same: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for edges in relation.edges:
        needs = before if edges.steps else same
        for source, target in edges.pairs():
            needs.setdefault(target, []).append(source)
    return same, before


def _restricted(nodes: list[int], needs: dict[int, list[int]], wanted: list[int]) -> list[list[int]]:
    """Return for each node the places in ``wanted`` of what it needs."""
    place = {node: number for number, node in enumerate(wanted)}
    return [[place[source] for source in needs.get(node, ()) if source in place] for node in nodes]
