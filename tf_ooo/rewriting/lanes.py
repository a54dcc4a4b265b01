"""The tasks of a lane one after the other, as control edges: what all modes have in common."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from tf_ooo.planning.model.schedule import Task


@dataclass(frozen=True)
class LaneOrder:
    """Holds what a lane adds to a graph: edges (before, after), names of joins for edges to lead through,
    each op's place in the lane; ``notes`` say which tasks may still overlap."""

    edges: list[tuple[str, str]] = field(default_factory=list)
    joins: list[str] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bundle:
    """Tasks in a row that run as one, each with its ops, which are numbers."""

    tasks: dict[Task, Sequence[int]] = field(default_factory=dict)

    @cached_property
    def ops(self) -> list[int]:
        return [op for ops in self.tasks.values() for op in ops]


class Links(Protocol):
    """Says how the tasks of one mode wait for each other, and what the ops of its graph depend on."""

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the ops, by number."""

    def bit(self, op: int) -> int:
        """The op as a set of bits."""

    def needs(self, op: int) -> int:
        """The op and all that it depends on, as bits."""

    def run_as_one(self, before: Task, after: Task) -> bool:
        """Return whether two tasks in a row are one block."""

    def link(self, order: LaneOrder, rank: int, block: Bundle, following: Bundle, free: list[int]) -> None:
        """Adds the edges that have the ``free`` ops of ``following`` run after ``block``, which has this
        place.

        Behind the last block there follows an empty one.
        """


def one_after_another(lane: Sequence[Task], ops: Mapping[Task, Sequence[int]], links: Links) -> LaneOrder:
    """Return edges that make the tasks run one after the other; those without ``ops`` are looked through.

    What an earlier block needs gets no edge (the shape that a kernel's gradient and the next dO share).  It
    would not always be a cycle yet, but one once ops are merged: after all graph optimizers oneDNN makes one
    op of a bias gradient and that of the kernel.
    """
    order = LaneOrder()
    blocks = _blocks([task for task in lane if ops.get(task)], ops, links)
    needed = 0
    for rank, (block, following) in enumerate(itertools.zip_longest(blocks, blocks[1:], fillvalue=Bundle())):
        order.ranks.update((links.names[op], rank) for op in block.ops)
        for op in block.ops:
            needed |= links.needs(op)
        links.link(order, rank, block, following, [op for op in following.ops if not needed & links.bit(op)])
    return order


def _blocks(tasks: Sequence[Task], ops: Mapping[Task, Sequence[int]], links: Links) -> list[Bundle]:
    blocks: list[Bundle] = []
    for before, task in zip([None, *tasks], tasks, strict=False):
        if before is None or not links.run_as_one(before, task):
            blocks.append(Bundle())
        blocks[-1].tasks[task] = ops[task]
    return blocks
