"""Defines the one dependency relation on a GraphDef: which orders must hold, and which ops have side effects.

Nodes are ints, their index in ``graph_def.node``.  The edges NextIteration -> Merge that close a while loop
are left out: the relation speaks of one iteration; a loop's Exits come after all its iterations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, TypeVar

from grappler_passes.compat import graph_protos
from grappler_passes.compat.graph_protos import split_input as split_input
from grappler_passes.errors import GraphError

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

# Execution contexts of the nodes of a flat graph: while frames and branches of lowered conds. TensorFlow runs
# control flow as dataflow. A node inside a while loop runs in the loop's frame, and a control edge is only
# delivered within one frame. A node behind a Switch is *dead* when the other output was taken, and deadness
# travels along data and control edges up to a Merge.

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

    ``frame`` is the stack of while frames that the node runs in, outermost first. ``output_frame`` is the one
    its outputs arrive in; None if they arrive in one iteration only (Enter, NextIteration). ``branches`` are
    ``(predicate tensor, side)``: the node is dead unless each predicate chose that side. ``output_branches``
    are the same for its outputs: an Exit's lack the branch that ended its loop.
    """

    frame: tuple[str, ...] = ()
    output_frame: tuple[str, ...] | None = ()
    branches: frozenset[Branch] = frozenset()
    output_branches: frozenset[Branch] = frozenset()


# A large graph has many nodes, and few contexts.
_context = lru_cache(maxsize=4096)(Context)
_ROOT = Context()


class _Contexts:
    """Finds the context of each node in one walk, in topological order."""

    def __init__(self, index: GraphIndex) -> None:
        self.index = index
        self.frames: list[tuple[str, ...]] = [()] * len(index)  # the frame that outputs arrive in
        self.branch_frame: dict[Branch, tuple[str, ...]] = {}
        self.branches: list[frozenset[Branch]] = [frozenset()] * len(index)
        self.result: list[Context] = [_ROOT] * len(index)

    def compute(self) -> list[Context]:
        if not self.index.frame_names and not any(op in SWITCHES for op in self.index.ops):
            return self.result
        for i in self.index.order:
            if self.index.preds(i):
                self._visit(i)
        return self.result

    def _visit(self, i: int) -> None:
        index, op = self.index, self.index.ops[i]
        frame = max((self.frames[p] for p in index.preds(i)), key=len)
        branches = self._merge(i) if op in MERGES else self._all_inputs(i)
        arrives, visible = frame, True
        if op in ENTERS:
            arrives, visible = (*frame, index.frame_names[i]), i in index.constant_enters
        elif op in EXITS:
            arrives = frame[:-1]
        elif op in NEXT_ITERATIONS:
            visible = False
        # Outside, a loop's value is dead only if the loop as a whole was: branches inside end at the Exit.
        inside = {b for b in branches if self.branch_frame[b] == frame} if op in EXITS else ()
        of_outputs = branches.difference(inside) if inside else branches
        self.frames[i], self.branches[i] = arrives, of_outputs
        self.result[i] = _context(frame, arrives if visible else None, branches, of_outputs)

    def _all_inputs(self, i: int) -> frozenset[Branch]:
        met = {self._edge(producer, port) for producer, port in self.index.data_preds[i]}
        met.update(self.branches[producer] for producer in self.index.control_preds[i])
        return met.pop() if len(met) == 1 else frozenset().union(*met)

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
        """Return a Merge's branches: both sides of one predicate cancel out, since one of them is alive.

        If its inputs differ otherwise, the Merge may be dead in other ways: it gets a branch of its own.
        """
        sides = [self._edge(producer, port) for producer, port in self.index.data_preds[i]]
        common = frozenset.intersection(*sides) if sides else frozenset()
        rest = [side - common for side in sides]
        covers_all = all(len(r) == 1 for r in rest) and len({pred for r in rest for pred, _ in r}) == 1
        if i in self.index.back_preds or len(sides) == 1 or covers_all or not all(rest):
            return common
        own = (self.index.names[i], 0)
        self.branch_frame[own] = max((self.frames[p] for p, _ in self.index.data_preds[i]), key=len)
        return common | {own}


Node = TypeVar("Node")
WOULD_CLOSE_A_CYCLE = "the edge would close a cycle"


def reached(start: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the given nodes and all that they lead to."""
    seen = set(start)
    stack = list(seen)
    while stack:
        new = set(following(stack.pop())) - seen
        seen |= new
        stack += new
    return seen


class GraphIndex:
    """Holds predecessors, successors, topological order, contexts and reachability of a flat GraphDef.

    ``data_preds[i]`` are ``(producer, output port)`` in input order; ``control_preds[i]`` and
    ``back_preds`` (loop back edges by Merge, in no other list) are producers; ``succs[i]`` holds every
    data and control successor once per edge.  Raises GraphError on duplicate names, dangling
    inputs and cycles.  The GraphDef is read once and not kept.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        nodes = graph_def.node
        self.names: list[str] = [node.name for node in nodes]
        self.ops: list[str] = [node.op for node in nodes]
        self.index: dict[str, int] = {}
        for i, name in enumerate(self.names):
            if self.index.setdefault(name, i) != i:
                raise GraphError("duplicate node name", name)
        count = len(self.names)
        # Rows without entries share one empty tuple: fewer objects, a third of the time.
        self.data_preds: list[Sequence[tuple[int, int]]] = [()] * count
        self.control_preds: list[Sequence[int]] = [()] * count
        self.back_preds: dict[int, list[int]] = {}
        self.succs: list[list[int]] = [[] for _ in range(count)]
        self.frame_names: dict[int, str] = {}
        self.constant_enters: set[int] = set()
        for i, node in enumerate(nodes):
            self._add_inputs(i, node.input)
            if self.ops[i] in ENTERS:
                self.frame_names[i] = node.attr["frame_name"].s.decode()
                if node.attr["is_constant"].b:
                    self.constant_enters.add(i)
        self.loop_preds: dict[int, list[int]] = {}
        self.order: list[int] = self.topological_order()
        if self.back_preds:
            self._add_loop_edges()
            self.order = self.topological_order()
        self.position = places_in(self.order)

    def _add_inputs(self, i: int, inputs: Iterable[str]) -> None:
        data: list[tuple[int, int]] = []
        control: list[int] = []
        may_end_a_loop = self.ops[i] in MERGES
        for text in inputs:
            producer, port = self.index.get(text), 0  # most read a first output
            if producer is None:
                name, port = split_input(text)
                producer = self.index.get(name)
            if producer is None:
                raise GraphError(f"input {text!r} names no node", self.names[i])
            if may_end_a_loop and self.ops[producer] in NEXT_ITERATIONS:
                self.back_preds.setdefault(i, []).append(producer)
                continue
            if port < 0:
                control.append(producer)
            else:
                data.append((producer, port))
            self.succs[producer].append(i)
        if data:
            self.data_preds[i] = data
        if control:
            self.control_preds[i] = control

    def _add_loop_edges(self) -> None:
        """Let a loop's Exits come after all Enters and NextIterations of its frame, as the executor does.

        Without these edges a plan could make a loop wait for its own result.
        """
        feeding: dict[tuple[str, ...], list[int]] = {}
        for i, op in enumerate(self.ops):
            if op in ENTERS or op in NEXT_ITERATIONS:
                feeding.setdefault(self.arrival_frame(i), []).append(i)
        for end, op in enumerate(self.ops):
            if op in EXITS:
                self.loop_preds[end] = feeding.get(self.contexts[end].frame, [])
                for source in self.loop_preds[end]:
                    self.succs[source].append(end)

    def __len__(self) -> int:
        return len(self.names)

    def of(self, name: str) -> int:
        """Return the index of a node; GraphError if no node has that name."""
        try:
            return self.index[name]
        except KeyError:
            raise GraphError("no such node", name) from None

    def preds(self, i: int) -> list[int]:
        """Return the data and control predecessors once per edge, and for an Exit what feeds its loop."""
        data = [producer for producer, _ in self.data_preds[i]]
        return [*data, *self.control_preds[i], *self.loop_preds.get(i, ())]

    def topological_order(self, extra: Sequence[tuple[int, int]] = ()) -> list[int]:
        """Return a topological order of the graph with ``extra`` edges; GraphError names a cycle's node.

        The order is breadth first: what can start earlier comes earlier, and large gradients of a task keep
        that order. rustworkx's order goes deep first and takes as long.
        """
        waiting = [len(self.data_preds[i]) + len(self.control_preds[i]) for i in range(len(self))]
        for end, sources in self.loop_preds.items():
            waiting[end] += len(sources)
        more: dict[int, list[int]] = {}
        for before, after in extra:
            more.setdefault(before, []).append(after)
            waiting[after] += 1
        order = [i for i, pending in enumerate(waiting) if not pending]
        for i in order:  # grows while it is read: a queue
            for successor in (*self.succs[i], *more[i]) if i in more else self.succs[i]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    order.append(successor)
        if len(order) != len(self):
            stuck = next(i for i, pending in enumerate(waiting) if pending)
            raise GraphError("the graph has a cycle through or before this node", self.names[stuck])
        return order

    @cached_property
    def reach(self) -> list[int]:
        """Return for each node the bit set of its ancestors; bit p is the node at position p."""
        return self.ancestor_bits(self.order, {})

    def ancestor_bits(self, order: Sequence[int], extra: dict[int, list[int]]) -> list[int]:
        """Return ancestor bit sets under ``extra[after] = [before, ...]``; bits are places in ``order``."""
        reach = [0] * len(self)
        closed = [0] * len(self)
        for place, i in enumerate(order):
            bits = 0
            for producer, _ in self.data_preds[i]:
                bits |= closed[producer]
            for producer in self.control_preds[i]:
                bits |= closed[producer]
            for producer in (*extra.get(i, ()), *self.loop_preds.get(i, ())):
                bits |= closed[producer]
            reach[i] = bits
            closed[i] = bits | (1 << place)
        return reach

    def implied(self, before: str | int, after: str | int) -> bool:
        """Return whether ``after`` already depends on ``before``; False if both are the same node."""
        source, target = self._as_index(before), self._as_index(after)
        return bool((self.reach[target] >> self.position[source]) & 1)

    @cached_property
    def contexts(self) -> list[Context]:
        return _Contexts(self).compute()

    def arrival_frame(self, node: str | int) -> tuple[str, ...]:
        """Return the while frame in which a node's outputs arrive."""
        context = self.contexts[i := self._as_index(node)]
        entered = (self.frame_names[i],) if i in self.frame_names else ()
        return (*context.frame, *entered) if context.output_frame is None else context.output_frame

    def edge_is_legal(self, before: str, after: str) -> tuple[bool, str]:
        """Return whether a control edge may be added, and else the reason.

        Edges between devices are legal.  Names that are not in the graph make an edge illegal.
        """
        for name in (before, after):
            if name not in self.index:
                return False, f"no node {name!r}"
        source, target = self.index[before], self.index[after]
        reason = self.context_conflict(source, target)
        if not reason and (source == target or self.implied(target, source)):
            reason = f"{before!r} depends on {after!r}: {WOULD_CLOSE_A_CYCLE}"
        return not reason, reason

    def context_conflict(self, source: int, target: int) -> str:
        """Say why a control edge is illegal, cycles left aside; empty if it is legal."""
        first, then = self.contexts[source], self.contexts[target]
        if self.ops[target] == "_Arg":
            return "an _Arg takes no inputs"
        if target in self.back_preds:
            return "the target is a loop's Merge, which also runs before the loop's first iteration"
        if first.output_frame is None:
            return f"a control edge out of a {self.ops[source]} would fire in one iteration only"
        if first.output_frame != then.frame:
            frames = ("/".join(frame) or "the root frame" for frame in (first.output_frame, then.frame))
            return f"different while frames: {' and '.join(frames)}"
        if lacking := first.output_branches - then.branches:
            where = ", ".join(sorted(f"output {side} of {pred}" for pred, side in lacking))
            return f"the source may be dead where the target is not ({where})"
        return ""

    def _as_index(self, node: str | int) -> int:
        return node if isinstance(node, int) else self.of(node)


def places_in(order: Sequence[int]) -> list[int]:
    """Return the place of each number from 0 to n - 1 in a permutation of them."""
    places = [0] * len(order)
    for place, i in enumerate(order):
        places[i] = place
    return places


# Finds ops with side effects and what these act on: a rewrite may not lose their order. TensorFlow says which
# ops have state (``op_def.is_stateful``); the tables here are the exceptions.

# They are registered as stateful so that they are not folded or shared, but only name or hand on a value.
_HARMLESS = frozenset({"_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "VarHandleOp", "_VarHandlesOp"})
# These are not registered as stateful, and yet their effect is seen outside.
_HARMFUL = frozenset({"Abort"})
# They read a variable (or its shape) and change nothing.
_READS = re.compile(r"ReadVariableOp|_ReadVariablesOp|ResourceGather(Nd)?|VarIsInitializedOp|VariableShape")
_HANDLE_COPIES = frozenset({"Identity", "Enter", "RefEnter", *SWITCHES, "NextIteration", "Merge"})
WORLD = ""


@lru_cache(maxsize=4096)
def has_side_effects(op_type: str) -> bool:
    """Return True for an op that reads or changes state, waits for another process, or is seen outside.

    True also for an unknown op, and for assignments to reference variables (TensorFlow 1). Horovod does not
    register its ops as stateful, though a second run of one would wait for ranks that do not send again.
    """
    if op_type in _HARMLESS:
        return False
    if op_type in _HARMFUL or graph_protos.is_communication(op_type):
        return True
    return graph_protos.is_stateful(op_type) or graph_protos.has_reference_inputs(op_type)


@lru_cache(maxsize=4096)
def only_reads(op_type: str) -> bool:
    """Return True for an op with side effects that changes nothing: two of them may run in any order."""
    return bool(_READS.fullmatch(op_type))


def states_of(index: GraphIndex, i: int) -> set[str]:
    """Return the states that node ``i`` reads or changes: the names of its resources' sources, or WORLD."""
    states = set()
    for place in graph_protos.resource_inputs(index.ops[i]):
        if place < len(index.data_preds[i]):
            source = index.data_preds[i][place][0]
            while index.ops[source] in _HANDLE_COPIES and index.data_preds[source]:
                source = index.data_preds[source][0][0]
            states.add(index.names[source])
    return states or {WORLD}


def users_of_states(index: GraphIndex) -> Iterable[list[int]]:
    """Return for each state the ops with side effects on it, in the order of the graph."""
    by_state: dict[str, list[int]] = {}
    for i in index.order:
        if has_side_effects(index.ops[i]):
            for state in states_of(index, i):
                by_state.setdefault(state, []).append(i)
    return by_state.values()


def conflicts(index: GraphIndex) -> Iterator[tuple[int, int]]:
    """Yield pairs (first, then) of ops on the same state, at least one a write, that the graph orders.

    These are the read-after-write, write-after-read and write-after-write hazards.
    """
    met: set[tuple[int, int]] = set()
    for members in users_of_states(index):
        for first, then in combinations(members, 2):
            if only_reads(index.ops[first]) and only_reads(index.ops[then]):
                continue
            if (first, then) not in met and index.implied(first, then):
                met.add((first, then))
                yield first, then
