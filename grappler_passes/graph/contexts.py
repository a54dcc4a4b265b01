"""Execution contexts of the nodes of a flat graph: while frames and branches of lowered conds.

TensorFlow runs control flow as dataflow.  A node inside a while loop runs in the loop's frame, and
a control edge is only delivered within one frame.  A node behind a Switch is *dead* when the other
output was taken, and deadness travels along data and control edges up to a Merge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grappler_passes.graph.dependencies import GraphIndex

Branch = tuple[str, int]

ENTERS = ("Enter", "RefEnter")
EXITS = ("Exit", "RefExit")
MERGES = ("Merge", "RefMerge")
SWITCHES = ("Switch", "RefSwitch", "_SwitchN")
NEXT_ITERATIONS = ("NextIteration", "RefNextIteration")
_HAND_ON = ("Identity", "LoopCond")


@dataclass(frozen=True)
class Context:
    """Says in which loops and branches a node runs.

    ``frame`` is the stack of while frames it runs in, outermost first; ``output_frame`` the one its
    outputs arrive in, None where they arrive in one iteration only (Enter, NextIteration).
    ``branches`` are ``(predicate tensor, side)``: the node is dead unless each predicate chose that side.
    ``output_branches`` are those of its outputs: of an Exit without what ended its loop.
    """

    frame: tuple[str, ...] = ()
    output_frame: tuple[str, ...] | None = ()
    branches: frozenset[Branch] = frozenset()
    output_branches: frozenset[Branch] = frozenset()


_ROOT = Context()


def execution_contexts(
    index: GraphIndex, frame_names: dict[int, str], constant_enters: set[int]
) -> list[Context]:
    """Return the context of every node.  ``frame_names`` gives each Enter its frame's name."""
    if not frame_names and not any(op in SWITCHES for op in index.ops):
        return [_ROOT] * len(index)
    return _Contexts(index, frame_names, constant_enters).compute()


class _Contexts:
    """One walk in topological order."""

    def __init__(self, index: GraphIndex, frame_names: dict[int, str], constant_enters: set[int]) -> None:
        self.index = index
        self.frame_names = frame_names
        self.constant_enters = constant_enters
        self.frames: list[tuple[str, ...]] = [()] * len(index)  # the frame that outputs arrive in
        self.branch_frame: dict[Branch, tuple[str, ...]] = {}
        self.branches: list[frozenset[Branch]] = [frozenset()] * len(index)
        self.result: list[Context] = [_ROOT] * len(index)

    def compute(self) -> list[Context]:
        for i in self.index.order:
            if self.index.preds(i):
                self._visit(i)
        return self.result

    def _visit(self, i: int) -> None:
        op = self.index.ops[i]
        frame = max((self.frames[p] for p in self.index.preds(i)), key=len)
        branches = self._merge(i) if op in MERGES else self._all_inputs(i)
        arrives, visible = frame, True
        if op in ENTERS:
            arrives, visible = (*frame, self.frame_names[i]), i in self.constant_enters
        elif op in EXITS:
            arrives = frame[:-1]
        elif op in NEXT_ITERATIONS:
            visible = False
        self.frames[i] = arrives
        # Outside, a loop's value is dead only if the loop as a whole was: branches inside end at the Exit.
        of_outputs = branches
        if op in EXITS:
            of_outputs = frozenset(b for b in branches if self.branch_frame[b] != frame)
        self.branches[i] = of_outputs
        self.result[i] = Context(frame, arrives if visible else None, branches, of_outputs)

    def _all_inputs(self, i: int) -> frozenset[Branch]:
        branches: frozenset[Branch] = frozenset()
        for producer, port in self.index.data_preds[i]:
            branches |= self._edge(producer, port)
        for producer in self.index.control_preds[i]:
            branches |= self.branches[producer]
        return branches

    def _edge(self, producer: int, port: int) -> frozenset[Branch]:
        if self.index.ops[producer] not in SWITCHES:
            return self.branches[producer]
        branch = (self._predicate(producer), port)
        self.branch_frame[branch] = self.result[producer].frame
        return self.branches[producer] | {branch}

    def _predicate(self, switch: int) -> str:
        """Return the tensor that decides, seen through copies: all Switches of one cond share it."""
        producer, port = self.index.data_preds[switch][1]
        while self.index.ops[producer] in _HAND_ON and self.index.data_preds[producer]:
            producer, port = self.index.data_preds[producer][0]
        return f"{self.index.names[producer]}:{port}"

    def _merge(self, i: int) -> frozenset[Branch]:
        """A Merge is alive if one input is: inputs that differ in the sides of one predicate cover all cases.

        Where they differ otherwise it may be dead in a way the sets cannot say: it gets a branch of its own.
        """
        sides = [self._edge(producer, port) for producer, port in self.index.data_preds[i]]
        common = frozenset.intersection(*sides) if sides else frozenset()
        if i in self.index.back_preds or len(sides) == 1:
            return common
        rest = [side - common for side in sides]
        if all(len(r) == 1 for r in rest) and len({next(iter(r))[0] for r in rest}) == 1:
            return common
        if not all(rest):
            return common
        own = (self.index.names[i], 0)
        self.branch_frame[own] = max((self.frames[p] for p, _ in self.index.data_preds[i]), key=len)
        return common | {own}
