"""The one dependency relation on a GraphDef: what must, and what may, run before what.

Nodes are ints, their index in ``graph_def.node``.  The edges NextIteration -> Merge that close a while loop
are left out: the relation speaks of one iteration; a loop's Exits come after all its iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TypeVar

from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import GraphError
from grappler_passes.graph.contexts import ENTERS, EXITS, MERGES, NEXT_ITERATIONS, Context, execution_contexts
from grappler_passes.graph.node_input import split_input as split_input

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
    """Predecessors, successors, topological order, contexts and reachability of a flat GraphDef.

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
            if node.op in ENTERS:
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
        for text in inputs:
            name, port = split_input(text)
            producer = self.index.get(name)
            if producer is None:
                raise GraphError(f"input {text!r} names no node", self.names[i])
            if self.ops[producer] in NEXT_ITERATIONS and self.ops[i] in MERGES:
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
        """Return the index of a node; GraphError where there is none of that name."""
        try:
            return self.index[name]
        except KeyError:
            raise GraphError("no such node", name) from None

    def preds(self, i: int) -> list[int]:
        """Return data and control predecessors, once per edge, and for an Exit what feeds its loop."""
        data = [producer for producer, _ in self.data_preds[i]]
        return [*data, *self.control_preds[i], *self.loop_preds.get(i, ())]

    def topological_order(self, extra: Sequence[tuple[int, int]] = ()) -> list[int]:
        """Return a topological order of the graph with ``extra`` edges; GraphError names a cycle's node.

        Breadth first, what can start earlier comes earlier: large gradients of a task are ordered by it.
        rustworkx's order goes deep first and takes as long.
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
        """Ancestor bit sets under ``extra[after] = [before, ...]``; bits are places in ``order``."""
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
        """Return True if ``after`` already depends on ``before`` (not on itself)."""
        source, target = self._as_index(before), self._as_index(after)
        return bool((self.reach[target] >> self.position[source]) & 1)

    @cached_property
    def contexts(self) -> list[Context]:
        return execution_contexts(self, self.frame_names, self.constant_enters)

    def arrival_frame(self, node: str | int) -> tuple[str, ...]:
        """Return the while frame that a node's outputs arrive in."""
        i = self._as_index(node)
        context = self.contexts[i]
        if context.output_frame is not None:
            return context.output_frame
        return (*context.frame, self.frame_names[i]) if i in self.frame_names else context.frame

    def edge_is_legal(self, before: str, after: str) -> tuple[bool, str]:
        """May a control edge be added?  The reason is empty where it may.

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
        """Say why a control edge is illegal, cycles left aside; empty where it is legal."""
        first, then = self.contexts[source], self.contexts[target]
        if self.ops[target] == "_Arg":
            return "an _Arg takes no inputs"
        if target in self.back_preds:
            return "the target is a loop's Merge, which also runs before the loop's first iteration"
        if first.output_frame is None:
            return f"a control edge out of a {self.ops[source]} would fire in one iteration only"
        if first.output_frame != then.frame:
            return f"different while frames: {_show(first.output_frame)} and {_show(then.frame)}"
        lacking = first.output_branches - then.branches
        if lacking:
            where = ", ".join(sorted(f"output {side} of {pred}" for pred, side in lacking))
            return f"the source may be dead where the target is not ({where})"
        return ""

    def _as_index(self, node: str | int) -> int:
        return node if isinstance(node, int) else self.of(node)


def places_in(order: Sequence[int]) -> list[int]:
    """Return the place of each of the numbers 0 to n - 1 in an order of them."""
    places = [0] * len(order)
    for place, i in enumerate(order):
        places[i] = place
    return places


def _show(frame: tuple[str, ...]) -> str:
    return "/".join(frame) or "the root frame"
