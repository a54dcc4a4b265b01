"""Orders each device of a pipeline by control edges within its lane; there are none between devices."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

from grappler_passes.graph.dependencies import GraphIndex, has_side_effects, only_reads
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.rewriting.lowering import Bundle, LaneOrder, one_after_another
from tf_ooo.rewriting.step_graph import StepGraph

_ORDERED = ("F", "dO", "dW")
# Gradients of this size and more are computed one after the other.
_LARGE_BYTES = 1024**2


def ops_of_tasks(
    step: StepGraph, stage_of_layer: Sequence[int], left_out: Collection[int] = ()
) -> dict[Task, list[int]]:
    """Return each task's nodes in order, without sums over micro-batches or layers and ``left_out``."""
    names = step.index.names
    sums = step.sums | step.joined
    ops: dict[Task, list[int]] = {}
    for i in step.index.order:
        at = step.where.get(names[i])
        if at is None or names[i] in sums or i in left_out or step.index.ops[i] == "Const":
            continue
        kind, layer, microbatch = at
        ops.setdefault(Task(kind, stage_of_layer[layer], 0 if kind == "U" else microbatch), []).append(i)
    return ops


def too_late(step: StepGraph) -> set[int]:
    """Return ops that wait for something behind their task, usually copies of the logs.

    They wait for updates or, if forward ops, for their micro-batch's backward pass; a lane would too.
    """
    index = step.index
    yet_to_come = list(itertools.accumulate(reversed(_updates(step)), operator.or_))[::-1]
    backward: dict[int, int] = {}
    for name, (kind, _, microbatch) in step.where.items():
        if kind in ("dO", "dW"):
            backward[microbatch] = backward.get(microbatch, 0) | 1 << index.position[index.index[name]]
    late: set[int] = set()
    for name, (kind, _, microbatch) in step.where.items():
        i = index.index[name]
        turn = step.turns[i]
        later = yet_to_come[turn] | (backward.get(microbatch, 0) if kind == "F" else 0)
        if kind != "U" and (turn > 0 and not yet_to_come[turn] or index.reach[i] & later):
            late.add(i)
    return late


def _updates(step: StepGraph) -> list[int]:
    """Return for each turn the ops that write weights, as bits."""
    index, bits = step.index, [0] * (max(step.turns) + 1)
    for name, (kind, _, _) in step.where.items():
        i = index.index[name]
        if kind == "U" and has_side_effects(index.ops[i]) and not only_reads(index.ops[i]):
            bits[step.turns[i]] |= 1 << index.position[i]
    return bits


def lane_tasks(schedule: Schedule, count: int) -> Iterator[tuple[int, list[Task]]]:
    """Yield each lane's device, and its tasks to be ordered, in a step of ``count`` micro-batches."""
    for (device, _), tasks in schedule.lanes.items():
        yield device, [t for t in tasks if t.kind in _ORDERED and t.microbatch < count]


def order_updates(
    step: StepGraph, device_of_layer: Sequence[str], prefix: str, sizes: Mapping[str, int]
) -> dict[str, LaneOrder]:
    """Return edges, by device, that make layers with large weights update one by one, the highest first.

    All updates are ready at once at the end of a step, and an optimizer makes several tensors as large as the
    weights on its way.  Ops that an update of a higher layer needs, also on another device, get no edge.
    """
    index, updates = step.index, functools.reduce(operator.or_, _updates(step))
    by_layer: dict[tuple[int, int], list[int]] = {}  # by turn and layer
    for name, (kind, layer, _) in step.where.items():
        if kind == "U":
            i = index.index[name]
            by_layer.setdefault((step.turns[i], layer), []).append(i)
    orders = {device_of_layer[layer]: LaneOrder() for _, layer in by_layer}
    joins = {
        device: _Joins(index, f"{prefix}/updates_{number}", False, sizes)
        for number, device in enumerate(sorted(orders))
    }
    lasts: dict[str, list[int]] = {}
    earlier = 0
    for turn, layer in sorted(by_layer, key=lambda at: (at[0], -at[1])):
        device, ops = device_of_layer[layer], by_layer[turn, layer]
        links = joins[device]
        writes = [i for i in ops if updates & links.bit(i)]
        needed = functools.reduce(operator.or_, map(links.needs, writes), 0)
        own = [i for i in ops if needed & ~earlier & links.bit(i)]
        earlier |= needed
        if not any(sizes.get(index.names[i], 0) >= _LARGE_BYTES for i in own):
            continue
        if device in lasts:
            name = f"{layer}/{turn}" if turn else str(layer)
            links.join(orders[device], lasts[device], firsts_of(index, own), name)
        lasts[device] = lasts_of(index, writes)
    return orders


def order_lane(
    index: GraphIndex,
    lane: Sequence[Task],
    ops: Mapping[Task, Sequence[int]],
    name: str,
    fused: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> LaneOrder:
    """Return edges that make the tasks run one after the other, many edges through joins.

    With ``fused`` a dO and the dW that follows are one task, whose result is sent at its end.  ``sizes`` are
    bytes of results, if known: large gradients of one task are computed one after the other, so that each can
    be added to its sum meanwhile.
    """
    joins = _Joins(index, name, fused, sizes or {})
    order = one_after_another(lane, ops, joins)
    # These come last: if they would close a cycle they are left out, not the edges from task to task.
    order.edges.extend((index.names[before], index.names[after]) for before, after in joins.one_by_one)
    return order


class _Joins:
    """Makes edges from the last ops of a task to the first of the next; many edges lead through a join.

    ``one_by_one`` are edges between the large results of each dW task.
    """

    def __init__(self, index: GraphIndex, name: str, fused: bool, sizes: Mapping[str, int]) -> None:
        self.names = index.names
        self.one_by_one: list[tuple[int, int]] = []
        self._index, self._name, self._fused, self._sizes = index, name, fused, sizes

    def bit(self, op: int) -> int:
        return 1 << self._index.position[op]

    def needs(self, op: int) -> int:
        return self._index.reach[op] | self.bit(op)

    def run_as_one(self, before: Task, after: Task) -> bool:
        """Return whether these are a dO and its dW, and run fused."""
        return self._fused and after.kind == "dW" and before == Task("dO", after.stage, after.microbatch)

    def link(self, order: LaneOrder, rank: int, block: Bundle, following: Bundle, free: list[int]) -> None:
        index = self._index
        if len(block.tasks) > 1:
            self._send_last(order, block, f"{rank}/sent")
        # A result with an edge to or from another result of its task gets none to or from another task.
        followed = {before for before, _ in self.one_by_one}
        if [task.kind for task in following.tasks] == ["dW"]:  # fused with its dO they are so anyway
            self.one_by_one += self._large_results(following.ops, free)
        waiting = {after for _, after in self.one_by_one}
        lasts = [i for i in lasts_of(index, block.ops) if i not in followed]
        firsts = [i for i in firsts_of(index, free) if i not in waiting]
        self.join(order, lasts, firsts, rank)

    def _large_results(self, nodes: Sequence[int], free: Sequence[int]) -> list[tuple[int, int]]:
        """Return edges that make each large result of a dW task wait for the one before."""
        index = self._index
        inside, lasts = set(nodes), lasts_of(index, nodes)
        large = sorted((i for i in lasts if self._is_large(i, inside)), key=lambda i: index.position[i])
        edges: list[tuple[int, int]] = []
        earlier = 0
        for before, after in itertools.pairwise(large):
            earlier |= self.needs(before)
            own = self.needs(after) & ~earlier
            firsts = firsts_of(index, [i for i in free if own & self.bit(i)])
            edges += [(before, first) for first in firsts]
        return edges

    def _is_large(self, i: int, inside: Collection[int]) -> bool:
        """Return whether the result is large, or its summands within the task are so together."""
        parts = [self.names[p] for p, _ in self._index.data_preds[i] if p in inside]
        own_bytes, parts_bytes = self._sizes.get(self.names[i], 0), sum(self._sizes.get(p, 0) for p in parts)
        return max(own_bytes, parts_bytes) >= _LARGE_BYTES

    def _send_last(self, order: LaneOrder, block: Bundle, name: str) -> None:
        """Make the results that leave a dO task wait for the dW of the same stage."""
        index = self._index
        output_grads, weight_grads = block.tasks.values()
        inside = set(block.ops)
        able = [i for i in output_grads if index.contexts[i].frame == () and i not in index.back_preds]
        leaving = [i for i in able if any(s not in inside for s in index.succs[i])]
        free = [i for i in weight_grads if not any(index.reach[i] & self.bit(j) for j in leaving)]
        lasts = lasts_of(index, free)
        if lasts and leaving:
            self.join(order, lasts, leaving, name)

    def join(self, order: LaneOrder, lasts: list[int], firsts: list[int], name: object) -> None:
        """Put all of ``firsts`` after all of ``lasts``; what the graph already implies gets no edge."""
        reach = self._index.reach
        ends = sum(map(self.bit, lasts))
        free = [i for i in firsts if ends & ~reach[i]]
        waiting = [i for i in lasts if any(not reach[j] & self.bit(i) for j in free)]
        before, after = [self.names[i] for i in waiting], [self.names[i] for i in free]
        if min(len(before), len(after)) <= 1:  # a join would need more edges
            order.edges.extend((a, b) for a in before for b in after)
            return
        join = f"{self._name}/{name}"
        order.joins.append(join)
        order.edges.extend((a, join) for a in before)
        order.edges.extend((join, b) for b in after)


def lasts_of(index: GraphIndex, nodes: Sequence[int]) -> list[int]:
    """Return the ops of a task on which no other op of it depends; loops and branches end with these."""
    contexts = index.contexts
    able = [i for i in nodes if contexts[i].output_frame == () and not contexts[i].output_branches]
    kept: list[int] = []
    covered = 0
    for i in sorted(able, key=lambda i: -index.position[i]):
        if not covered >> index.position[i] & 1:
            kept.append(i)
        covered |= index.reach[i]
    return kept


def firsts_of(index: GraphIndex, nodes: Sequence[int]) -> list[int]:
    """Return the ops that depend on no other op of the task."""
    able = [i for i in nodes if index.contexts[i].frame == () and i not in index.back_preds]
    inside = sum(1 << index.position[i] for i in able)
    return [i for i in able if not index.reach[i] & inside]
