"""Finds while loops of a lowered graph, and the weight gradients that a gradient loop sums step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grappler_passes.graph.contexts import ENTERS, EXITS, SWITCHES
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.effects import has_side_effects

_ADDS = ("Add", "AddV2", "AddN")


@dataclass(frozen=True)
class Accumulator:
    """``total = add(total, step)``: nodes of the loop variable, which nobody else reads."""

    exit: int
    switch: int
    merge: int
    next_iteration: int
    add: int


@dataclass(frozen=True)
class Loop:
    """One while frame: its nodes, Enters included; consumers of each among them and outside."""

    frame: tuple[str, ...]
    members: frozenset[int]
    consumers: dict[int, set[int]]
    condition: int

    def exits(self, index: GraphIndex) -> list[int]:
        return [i for i in sorted(self.members) if index.ops[i] in EXITS and self.consumers[i]]


def find_loops(index: GraphIndex) -> Iterator[Loop]:
    """All while loops, in the order of their frames' names."""
    frames: dict[tuple[str, ...], set[int]] = {}
    for i in range(len(index)):
        frame = index.arrival_frame(i) if index.ops[i] in ENTERS else index.contexts[i].frame
        if frame:
            frames.setdefault(frame, set()).add(i)
    merge_of = {source: merge for merge, sources in index.back_preds.items() for source in sources}
    for frame, members in sorted(frames.items()):
        conditions = [i for i in members if index.ops[i] == "LoopCond"]
        if len(conditions) != 1:
            continue
        consumers = {i: _consumers(index, i, merge_of) for i in members}
        yield Loop(frame, frozenset(members), consumers, conditions[0])


def _consumers(index: GraphIndex, i: int, merge_of: dict[int, int]) -> set[int]:
    # index.succs also holds the order of an Exit after its loop, which no tensor flows along.
    real = {
        s
        for s in index.succs[i]
        if i not in index.loop_preds.get(s, ())
        or i in index.control_preds[s]
        or any(p == i for p, _ in index.data_preds[s])
    }
    return real | ({merge_of[i]} if i in merge_of else set())


def accumulator_of(index: GraphIndex, loop: Loop, end: int) -> Accumulator | None:
    """The sum that leaves the loop at Exit ``end``, or None where it is something else."""
    switch, port = index.data_preds[end][0]
    if index.ops[switch] not in SWITCHES or port != 0:
        return None
    merge = index.data_preds[switch][0][0]
    if len(index.back_preds.get(merge, ())) != 1 or loop.consumers[merge] != {switch}:
        return None
    following = index.back_preds[merge][0]
    add = index.data_preds[following][0][0]
    terms = index.data_preds[add]
    if index.ops[add] not in _ADDS or len(terms) < 2 or sum(term == (switch, 1) for term in terms) != 1:
        return None
    if loop.consumers[switch] != {end, add} or loop.consumers[add] != {following}:
        return None
    return Accumulator(end, switch, merge, following, add)


def only_for(index: GraphIndex, loop: Loop, ends: set[int]) -> set[int]:
    """The nodes of the loop that serve nothing but the Exits ``ends``: whole loop variables included."""
    kept: set[int] = set()
    todo = list(ends)
    while todo:
        i = todo.pop()
        if i in kept or i not in loop.members or i == loop.condition or has_side_effects(index.ops[i]):
            continue
        kept.add(i)
        todo += [p for p, _ in index.data_preds[i]]
        todo += [*index.control_preds[i], *index.back_preds.get(i, ())]
    changed = True
    while changed:
        outside = {i for i in kept if i not in ends and not loop.consumers[i] <= kept}
        kept -= outside
        changed = bool(outside)
    return kept


def obstacle(index: GraphIndex, loop: Loop, sums: list[Accumulator], moved: set[int]) -> str:
    """Say why the sums cannot move to a loop of their own; empty where they can."""
    if len(loop.frame) > 1:
        return "the gradient loop is nested in another loop"
    if any(index.contexts[i].branches for i in loop.members if index.ops[i] in ENTERS):
        return "the gradient loop is in a branch of a conditional"
    if not all({s.exit, s.switch, s.merge, s.next_iteration, s.add} <= moved for s in sums):
        return "a weight gradient's sum is read by other ops of the loop"
    body = index.contexts[sums[0].add].branches
    if any(not index.contexts[i].branches <= body for i in moved - {s.exit for s in sums}):
        return "the weight gradient is computed in a conditional inside the loop"
    return ""
