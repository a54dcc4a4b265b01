"""Which variables a graph trains, which ops are its forward pass, and how far a gradient reaches.

Everything here follows values through the graph; no layer name, no op name, no name scope.  The
ideas, in order:

1. A *weight* is written with a value that depends on data, and is itself read on the way to a
   result of the step (a fetched tensor, a metric, a moving average).  A *slot* (momentum, ...) is
   written too, but all it ever changes is one weight.
2. Cut the edges that carry one number (rank 0).  Clipping by global norm, loss scaling, learning
   rates and step counters tie all weights together through one number; gradients flow through
   tensors.  On the cut graph, *reach* of an op = the weights whose update it changes.
3. An op that has a weight's shape and reaches that weight alone is its gradient, or comes after
   it.  Results of the step that do not depend on any such op are results of the forward pass, and
   the forward pass is what they are computed from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from grappler_passes.bits import several, union
from grappler_passes.compat import is_stateful
from grappler_passes.flow import BACK_EDGE_OP, FlowGraph, Propagation
from grappler_passes.variables import HANDLE_SOURCES, VariableAccess

PUSH_OPS = frozenset({"TensorListPushBack", "TensorListSetItem"})
STASH_OPS = PUSH_OPS | {"Merge", "Switch", "Identity", "NextIteration"}
# What these return depends on a tensor's shape only, not on its value.
METADATA_OPS = frozenset({"Shape", "ShapeN", "Size", "Rank", "VariableShape", "TensorListElementShape"})
RETURN_OPS = ("_Retval", "_DeviceRetval")


@dataclass
class GradientFlow:
    """The facts that classification is made of; bit i stands for ``weights[i]``."""

    flow: FlowGraph
    order: list[int]
    variables: list[VariableAccess]
    results: list[int]
    results_are_certain: bool = True
    weights: list[VariableAccess] = field(default_factory=list)
    slots: dict[int, list[VariableAccess]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._owner = {n: v for v in self.variables for n in v.writes}
        self.cyclic = BACK_EDGE_OP in set(self.flow.types)
        self._find_weights()

    # -- graphs of value flow ---------------------------------------------------------------

    def propagation(
        self, *, cut_scalars: bool = False, cut_memory_of: frozenset[int] = frozenset()
    ) -> Propagation:
        """Value flow without handles; optionally without one-number edges, or without the flow
        through the memory of some variables (by handle)."""
        preds: list[list[int]] = [
            []
            if kind in METADATA_OPS
            else [
                e.source
                for e in edges
                if e.source not in self.handle_nodes and not (cut_scalars and e.scalar)
            ]
            for kind, edges in zip(self.flow.types, self.flow.data, strict=True)
        ]
        for variable in self.variables:
            if variable.handle not in cut_memory_of:
                for read, writes in variable.late_read_sources.items():
                    preds[read].extend(writes)
        return Propagation(preds, self.order, self.cyclic)

    @cached_property
    def handle_nodes(self) -> set[int]:
        return {
            n for n, outputs in enumerate(self.flow.outputs) if outputs and outputs[0].dtype == "resource"
        }

    @cached_property
    def weight_handles(self) -> frozenset[int]:
        return frozenset(w.handle for w in self.weights)

    @cached_property
    def full(self) -> Propagation:
        """All values, but not through a weight's own memory: what a second model (or the next
        step) does with an updated weight is its forward pass, not part of this gradient."""
        return self.propagation(cut_memory_of=self.weight_handles)

    @cached_property
    def cut(self) -> Propagation:
        return self.propagation(cut_scalars=True, cut_memory_of=self.weight_handles)

    @cached_property
    def data_sources(self) -> dict[int, int]:
        """Ops through which data (or randomness) enters: not constants, not variables."""
        reads = {r for v in self.variables for r in v.reads}
        sources = {}
        for node, kind in enumerate(self.flow.types):
            if kind in HANDLE_SOURCES and node not in self.handle_nodes:
                sources[node] = 1
            elif kind in HANDLE_SOURCES or kind in METADATA_OPS or node in reads:
                continue
            elif self.flow.outputs[node] and is_stateful(kind):
                sources[node] = 1
        return sources

    @cached_property
    def from_data(self) -> list[int]:
        """1 for each op whose value changes with the data other than through one number."""
        return self.cut.downstream(self.data_sources)

    # -- weights and slots ------------------------------------------------------------------

    def _find_weights(self) -> None:
        written = [v for v in self.variables if v.writes]
        no_memory = self.propagation(cut_memory_of=frozenset(v.handle for v in self.variables))
        fed = self._fed_by_data()
        written_fed = [v for v in written if any(fed[w] for w in v.writes)]
        changes = self._changes(written, self.propagation())
        ends = dict.fromkeys(self.results, 1)
        for i, variable in enumerate(written):
            if changes[i] & ~(1 << i) == 0:
                for n in (write for write in variable.writes if fed[write]):
                    ends[n] = ends.get(n, 0) | 2 << i
        to_end = no_memory.upstream(ends)
        index = {v.handle: i for i, v in enumerate(written)}
        candidates = [
            v
            for v in written_fed
            if v.trainable is not False and any(to_end[r] & ~(2 << index[v.handle]) for r in v.first_reads)
        ]
        if not candidates:
            candidates = _not_dominated(written_fed, index, changes)
        self.weights = self._without_state(candidates, ends)
        self._find_slots(written)

    def _fed_by_data(self) -> list[int]:
        """Like from_data, but blind to booleans only: a scalar weight's gradient is one number, a
        loss scale is merely switched by one."""
        graph = self.propagation()
        preds = [[p for p in graph.preds[n] if not self._is_predicate(p)] for n in range(len(self.flow))]
        return Propagation(preds, self.order, self.cyclic).downstream(self.data_sources)

    def _is_predicate(self, node: int) -> bool:
        outputs = self.flow.outputs[node]
        return bool(outputs) and all(o.dtype == "bool" and o.shape == () for o in outputs)

    def _changes(self, written: list[VariableAccess], graph: Propagation) -> list[int]:
        """For each written variable, the written variables that its value changes."""
        seeds: dict[int, int] = {}
        for i, variable in enumerate(written):
            for write in variable.writes:
                seeds[write] = seeds.get(write, 0) | 1 << i
        bits = graph.upstream(seeds)
        return [union(bits[r] for r in v.reads) for v in written]

    def _without_state(self, candidates, ends: dict[int, int]):
        """Drops state that forward passes carry along (an RNN's state, a queue of keys): what is
        written there comes straight from the forward pass, and shares no gradient with others."""
        if len(candidates) < 2:
            return candidates
        graph = self.propagation(cut_memory_of=frozenset(v.handle for v in candidates))
        own_writes = {n for v in candidates for n in v.writes}
        forward = graph.upstream({n: 1 for n in ends if n not in own_writes})
        seeds: dict[int, int] = {}
        for i, variable in enumerate(candidates):
            for write in variable.writes:
                seeds[write] = seeds.get(write, 0) | 1 << i
        bits = graph.upstream(seeds)
        shared = 0
        for node, reached in enumerate(bits):
            if not forward[node] and several(reached):
                shared |= reached
        kept = [v for i, v in enumerate(candidates) if shared >> i & 1]
        return kept or candidates

    def _find_slots(self, written: list[VariableAccess]) -> None:
        others = [v for v in written if v.handle not in self.weight_handles]
        seeds: dict[int, int] = {}
        for i, weight in enumerate(self.weights):
            for write in weight.writes:
                seeds[write] = seeds.get(write, 0) | 1 << i
        bits = self.full.upstream(seeds)
        for variable in others:
            changed = union(bits[read] for read in variable.reads)
            if changed and not several(changed):
                self.slots.setdefault(changed.bit_length() - 1, []).append(variable)

    # -- reach ------------------------------------------------------------------------------

    def sinks(self, weight: int) -> list[int]:
        """The writes of a weight and of its slots."""
        return [
            *self.weights[weight].writes,
            *(n for slot in self.slots.get(weight, []) for n in slot.writes),
        ]

    @cached_property
    def all_sinks(self) -> dict[int, int]:
        """1 for the writes of all weights and slots, as seeds for a propagation."""
        return {sink: 1 for i in range(len(self.weights)) for sink in self.sinks(i)}

    @cached_property
    def reach(self) -> list[int]:
        """reach[i]: the weights whose update op i changes, one-number edges cut."""
        seeds: dict[int, int] = {}
        for i in range(len(self.weights)):
            for sink in self.sinks(i):
                seeds[sink] = seeds.get(sink, 0) | 1 << i
        bits = self.cut.upstream(seeds)
        scalars = [i for i, w in enumerate(self.weights) if w.shape == ()]
        if not scalars:
            return bits
        after_others = self.full.downstream(self._gradient_like(bits))
        hops = {i: self._reductions(i, bits, after_others) for i in scalars}
        for i, found in hops.items():
            for node, distance in found.items():
                # Clipping by global norm leads from each to all: the nearest one is its own.
                if all(distance <= other.get(node, distance) for other in hops.values()):
                    seeds[node] = seeds.get(node, 0) | 1 << i
        return self.cut.upstream(seeds)

    def _reductions(self, weight: int, reach: list[int], after_others: list[int]) -> dict[int, int]:
        """For a rank-0 weight: the ops that reduce tensors to its gradient, and their distance from
        its writes, climbing along numbers, never into the gradients of weights that are tensors."""
        found: dict[int, int] = {}
        seen = set()
        level, distance = self.sinks(weight), 0
        while level:
            distance += 1
            above = {p for node in level for p in self.full.preds[node] if p not in seen and not reach[p]}
            seen |= above
            level = []
            for node in above:
                reduces = any(self.from_data[e.source] and not e.scalar for e in self.flow.data[node])
                if reduces and not after_others[node]:
                    found[node] = distance
                else:
                    level.append(node)
        return found

    def _gradient_like(self, reach: list[int]) -> dict[int, int]:
        """Ops with a weight's shape that reach this weight alone, bit per weight; a weight
        without such an op (sparse updates) is represented by its writes."""
        of_bit = {1 << i: i for i in range(len(self.weights))}
        found: dict[int, int] = {}
        seen = 0
        for node, bits in enumerate(reach):
            weight = of_bit.get(bits)
            if weight is None or not self.from_data[node]:
                continue
            if any(may_equal(o.shape, self.weights[weight].shape) for o in self.flow.outputs[node]):
                found[node] = bits
                seen |= bits
        for bit, weight in of_bit.items():
            if not seen & bit:
                found.update(dict.fromkeys(self.weights[weight].writes, bit))
        return found

    @cached_property
    def after(self) -> list[int]:
        """after[i]: the weights whose gradients op i may depend on, any edge counted."""
        return self.full.downstream(self._gradient_like(self.reach))

    @cached_property
    def depends(self) -> list[int]:
        """depends[i]: the weights whose values op i depends on."""
        seeds: dict[int, int] = {}
        for i, weight in enumerate(self.weights):
            for read in weight.reads:
                seeds[read] = seeds.get(read, 0) | 1 << i
        return self.full.downstream(seeds)

    # -- forward ----------------------------------------------------------------------------

    @cached_property
    def forward(self) -> list[int]:
        """1 for each op of the forward pass."""
        fed = self.full.downstream(self.data_sources)
        ends = {
            n: 1
            for n in [*self.results, *self._owner]
            if n not in self.all_sinks and fed[n] and not self.after[n] and not self._past_forward[n]
        }
        known = self.full.upstream(ends)
        seeds = ends | self._hidden_forward(known)
        known = self.full.upstream(seeds)
        stash = self._stash(known)
        return self.full.upstream(seeds | dict.fromkeys(stash, 1)) if stash else known

    def _hidden_forward(self, known: list[int]) -> dict[int, int]:
        """Forward ops that lead to no visible result, such as a loss that is not returned: they
        change gradients of weights on which they do not depend yet.

        Only looked for where a weight is read outside the known forward pass and not by updates.
        """
        reads = (read for weight in self.weights for read in weight.reads)
        if not any(several(self.reach[read]) and not known[read] for read in reads):
            return {}
        return {
            node: 1
            for node, reached in enumerate(self.reach)
            if not known[node]
            and self.depends[node]
            and reached & ~self.depends[node]
            and self.from_data[node]
            and not self.after[node]
        }

    @cached_property
    def _past_forward(self) -> list[int]:
        """Where nothing says which ops are results, ops that nothing consumes are taken for them.
        Among those are gradients that nobody asked for, such as the one of the input: they come
        after ops that change fewer weights than they depend on."""
        if self.results_are_certain:
            return [0] * len(self.flow)
        shrunk = {
            n: 1
            for n, reached in enumerate(self.reach)
            if reached and not reached & ~self.depends[n] and reached != self.depends[n]
        }
        return self.full.downstream(shrunk)

    def _stash(self, forward: list[int]) -> list[int]:
        """Loop variables of a forward loop that only collect tensors for the gradient loop.

        No result depends on them, but it is the forward loop that runs them.
        """
        if not self.cyclic:
            return []
        found: list[int] = []
        for group in self.full.groups:
            types = {self.flow.types[n] for n in group}
            if not types & PUSH_OPS or not types <= STASH_OPS or any(forward[n] for n in group):
                continue
            members = set(group)
            feeds = {p for n in group for p in self.full.preds[n] if p not in members}
            if all(self._is_plain(p, forward, depth=8) for p in feeds):
                found += group
                found += [n for n in range(len(self.flow)) if self._leaves(n, members)]
        return found

    def _is_plain(self, node: int, forward: list[int], depth: int) -> bool:
        """Computed from the forward pass and constants within a few ops (a shape, a slice)."""
        if forward[node] or not self.from_data[node]:
            return True
        return depth > 0 and all(self._is_plain(p, forward, depth - 1) for p in self.full.preds[node])

    def _leaves(self, node: int, loop: set[int]) -> bool:
        return self.flow.types[node] == "Exit" and self.flow.data[node][0].source in loop


def may_equal(shape: tuple[int | None, ...] | None, wanted: tuple[int, ...] | None) -> bool:
    """Whether a shape of known rank equals ``wanted``, unknown sizes counting as equal."""
    if shape is None or wanted is None or len(shape) != len(wanted):
        return False
    return all(a is None or a == b for a, b in zip(shape, wanted, strict=True))


def _not_dominated(variables, index, changes):
    """Of variables in a graph that returns nothing: those that are nobody's slot."""
    kept = []
    for v in variables:
        mine = changes[index[v.handle]]
        others = [changes[index[w.handle]] for w in variables if w is not v and mine >> index[w.handle] & 1]
        is_slot = any(mine != other and mine & ~other == 0 for other in others)
        if others and not is_slot and v.trainable is not False:
            kept.append(v)
    return kept
