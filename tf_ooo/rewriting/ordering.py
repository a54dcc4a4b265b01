"""The order of each device: control edges from task to task within its lane, none between devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.effects import has_side_effects, only_reads
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.rewriting.unrolled_tasks import Step

_ORDERED = ("F", "dO", "dW")
# Up to so many edges lead from task to task without a join between.
_WITHOUT_JOIN = 2
# Gradients of this size and more are computed one after the other.
_LARGE_BYTES = 1024**2


@dataclass(frozen=True)
class LaneOrder:
    """What a lane adds to a graph.

    Attributes:
        edges: (before, after), to and from joins included.
        joins: names of the joins.
        ranks: place in the lane of each op.
    """

    edges: list[tuple[str, str]] = field(default_factory=list)
    joins: list[str] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)


def ops_of_tasks(step: Step, stage_of_layer: Sequence[int], reach: Sequence[int]) -> dict[Task, list[int]]:
    """Nodes of each task in topological order; sums of gradients belong to none, of layers neither.

    Nor do ops that wait for updates, such as the copies of the logs that a step returns: a lane ordered
    around them would wait for the end of the step.
    """
    names = step.index.names
    updates, sums = _updates(step), step.sums | step.joined
    ops: dict[Task, list[int]] = {}
    for i in step.index.order:
        at = step.where.get(names[i])
        if at is None or names[i] in sums or step.index.ops[i] == "Const":
            continue
        kind, layer, microbatch = at
        if kind != "U" and reach[i] & updates:
            continue
        ops.setdefault(Task(kind, stage_of_layer[layer], 0 if kind == "U" else microbatch), []).append(i)
    return ops


def _updates(step: Step) -> int:
    """The ops that write weights, as bits."""
    index, bits = step.index, 0
    for name, (kind, _, _) in step.where.items():
        i = index.index[name]
        if kind == "U" and has_side_effects(index.ops[i]) and not only_reads(index.ops[i]):
            bits |= 1 << index.position[i]
    return bits


def lane_tasks(schedule: Schedule, count: int) -> Iterator[tuple[int, list[Task]]]:
    """Each lane's device and its tasks that are to be ordered, of a step with ``count`` micro-batches."""
    for (device, _), tasks in schedule.lanes.items():
        yield device, [t for t in tasks if t.kind in _ORDERED and t.microbatch < count]


def order_lane(
    index: GraphIndex,
    lane: Sequence[Task],
    ops: Mapping[Task, Sequence[int]],
    reach: Sequence[int],
    name: str,
    fused: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> LaneOrder:
    """Edges that make the tasks run one after the other.

    What an earlier task needs gets no edge: it has to run before.  It would not always be a cycle, but one
    once ops are merged: after all graph optimizers oneDNN makes one op of a bias gradient and that of
    the kernel.

    With ``fused`` a dO and the dW that follows are one task, whose result is sent at its end, as where
    the two are computed together.

    Args:
        index: of the graph.
        lane: the tasks in their order.
        ops: nodes of each task; tasks without any are looked through.
        reach: ancestors of each node, as bits by its position in ``index.order``.
        name: of the lane, for the names of joins.
        sizes: bytes of ops' results, where known: large gradients of one task are computed one after the
            other, each added to its sum meanwhile, instead of all at once.
    """
    found = LaneOrder()
    blocks = _blocks([task for task in lane if ops.get(task)], fused)
    nodes = [[i for task in block for i in ops[task]] for block in blocks]
    inner: list[tuple[int, int]] = []
    needed = 0
    for rank, (block, mine) in enumerate(zip(blocks, nodes, strict=True)):
        found.ranks.update((index.names[i], rank) for i in mine)
        if len(block) > 1:
            _send_last(index, ops[block[0]], ops[block[1]], reach, f"{name}/{rank}/sent", found)
        if rank + 1 == len(blocks):
            break
        for i in mine:
            needed |= reach[i] | 1 << index.position[i]
        free = [i for i in nodes[rank + 1] if not needed >> index.position[i] & 1]
        # What has an edge within its task from, or to, another result has none from, or to, another task.
        followed = {before for before, _ in inner}
        if [task.kind for task in blocks[rank + 1]] == ["dW"]:  # one by one anyway beside its dO
            inner += _one_by_one(index, nodes[rank + 1], free, reach, sizes or {})
        waiting = {after for _, after in inner}
        lasts = [i for i in lasts_of(index, mine, reach) if i not in followed]
        firsts = [i for i in firsts_of(index, free, reach) if i not in waiting]
        _join(index, lasts, firsts, reach, f"{name}/{rank}", found)
    # Last: where they would close a cycle they are left out, not those from task to task.
    found.edges.extend((index.names[before], index.names[after]) for before, after in inner)
    return found


def _blocks(tasks: Sequence[Task], fused: bool) -> list[list[Task]]:
    blocks: list[list[Task]] = []
    for task in tasks:
        before = blocks[-1][-1] if blocks else None
        if fused and task.kind == "dW" and before == Task("dO", task.stage, task.microbatch):
            blocks[-1].append(task)
        else:
            blocks.append([task])
    return blocks


def _one_by_one(
    index: GraphIndex,
    nodes: Sequence[int],
    free: Sequence[int],
    reach: Sequence[int],
    sizes: Mapping[str, int],
) -> list[tuple[int, int]]:
    """Edges for the large results of a dW task: each, with what it alone is made of, after the one before.

    Large are those whose parts are, where they are added up from some.  Only ``free`` ops wait.
    """
    inside = set(nodes)

    def is_large(i: int) -> bool:
        parts = [index.names[p] for p, _ in index.data_preds[i] if p in inside]
        return max(sizes.get(index.names[i], 0), sum(sizes.get(p, 0) for p in parts)) >= _LARGE_BYTES

    lasts = sorted(lasts_of(index, nodes, reach), key=lambda i: index.position[i])
    large = [i for i in lasts if is_large(i)]
    edges: list[tuple[int, int]] = []
    made = 0
    for before, after in itertools.pairwise(large):
        made |= reach[before] | 1 << index.position[before]
        needed = (reach[after] | 1 << index.position[after]) & ~made
        own = [i for i in free if needed >> index.position[i] & 1]
        edges += [(before, first) for first in firsts_of(index, own, reach)]
    return edges


def _send_last(
    index: GraphIndex,
    output_grads: Sequence[int],
    weight_grads: Sequence[int],
    reach: Sequence[int],
    name: str,
    found: LaneOrder,
) -> None:
    """What leaves a dO task waits for the dW of the same stage."""
    inside = {*output_grads, *weight_grads}
    able = [i for i in output_grads if index.contexts[i].frame == () and i not in index.back_preds]
    leaving = [i for i in able if any(s not in inside for s in index.succs[i])]
    free = [i for i in weight_grads if not any(reach[i] >> index.position[j] & 1 for j in leaving)]
    lasts = lasts_of(index, free, reach)
    if lasts and leaving:
        _join(index, lasts, leaving, reach, name, found)


def _join(
    index: GraphIndex,
    lasts: list[int],
    firsts: list[int],
    reach: Sequence[int],
    name: str,
    found: LaneOrder,
) -> None:
    """All of ``firsts`` after all of ``lasts``; where the graph says so already there is no edge."""
    ends = sum(1 << index.position[i] for i in lasts)
    free = [i for i in firsts if ends & ~reach[i]]
    waiting = [i for i in lasts if any(not reach[j] >> index.position[i] & 1 for j in free)]
    before, after = [index.names[i] for i in waiting], [index.names[i] for i in free]
    if len(before) * len(after) <= max(_WITHOUT_JOIN, len(before), len(after)):
        found.edges.extend((a, b) for a in before for b in after)
        return
    found.joins.append(name)
    found.edges.extend((a, name) for a in before)
    found.edges.extend((name, b) for b in after)


def lasts_of(index: GraphIndex, nodes: Sequence[int], reach: Sequence[int]) -> list[int]:
    """The ops that no other op of the task depends on; those in loops and branches end with these."""
    able = [i for i in nodes if index.contexts[i].output_frame == () and not index.contexts[i].branches]
    kept: list[int] = []
    covered = 0
    for i in sorted(able, key=lambda i: -index.position[i]):
        if not covered >> index.position[i] & 1:
            kept.append(i)
        covered |= reach[i]
    return kept


def firsts_of(index: GraphIndex, nodes: Sequence[int], reach: Sequence[int]) -> list[int]:
    """The ops that depend on no other op of the task."""
    able = [i for i in nodes if index.contexts[i].frame == () and i not in index.back_preds]
    inside = 0
    for i in able:
        inside |= 1 << index.position[i]
    return [i for i in able if not reach[i] & inside]
