"""Follows how far a gradient reaches: the forward pass, the weights, and whose updates each op changes.

Everything here follows values through the graph; no layer name, no op name, no name scope:

1. What a step writes and reads tells which variables are weights.
2. Clipping by global norm, loss scaling, learning rates tie all weights together through one number (rank 0);
   gradients flow through tensors.  With these edges cut, *reach* of an op = weights whose update it changes.
3. An op that has a weight's shape and reaches that weight alone is its gradient, or comes after it.  Results
   that depend on no such op are results of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from grappler_passes.graph.dependencies import SWITCHES
from grappler_passes.graph.flow import Propagation, marks, memberships, several, union
from grappler_passes.graph.variables import ValueFlow, VariableAccess

# Finds the variables that a step trains, and which others are an optimizer's slots of one of them. A *weight*
# is written with a value that depends on data, and read on the way to a result of the step. A *slot* is
# written too, but all it ever changes is one weight.

Slots = dict[int, list[VariableAccess]]


def find_weights(values: ValueFlow, results: Sequence[int]) -> tuple[list[VariableAccess], Slots]:
    """Return the weights, and the slots keyed by the number of their weight."""
    written = [v for v in values.variables if v.writes]
    fed = values.fed_by_data()
    no_memory = values.propagation(cut_memory_of={v.handle for v in values.variables})
    changes = _changes(written, values.propagation())
    ends = _ends(written, results, changes, fed)
    to_end = no_memory.upstream(ends)
    for variable in written:
        _set_preparations_aside(variable, fed, to_end)
    written_fed = [v for v in written if any(fed[w] for w in v.writes)]
    index = {v.handle: i for i, v in enumerate(written)}
    candidates = [
        v
        for v in written_fed
        if v.trainable is not False and any(to_end[r] & ~(2 << index[v.handle]) for r in v.first_reads)
    ]
    if not candidates:
        candidates = _not_dominated(written_fed, index, changes)
    weights = _without_state(values, candidates, ends)
    return weights, _find_slots(values, weights, written)


def _ends(
    written: Sequence[VariableAccess], results: Sequence[int], changes: list[int], fed: list[int]
) -> dict[int, int]:
    """Mark the ops that end a step: bit 0 for results, bit i + 1 for ``written[i]`` if nothing follows."""
    last = [v.writes if changes[i] & ~(1 << i) == 0 else [] for i, v in enumerate(written)]
    return memberships([results, *([write for write in writes if fed[write]] for writes in last)])


def _set_preparations_aside(variable: VariableAccess, fed: list[int], to_end: list[int]) -> None:
    """Count writes that no data change but the forward pass reads as forward (SpectralNormalization).

    A write is also forward if all reads of a trainable variable come after it (tensorflow-addons'
    WeightNormalization). Weight decay is blind to data as well, but only updates read what it wrote.
    """
    from_data = bool(variable.trainable) and not variable.first_reads
    blind = {w for w in variable.writes if from_data or not fed[w]}
    sources = variable.late_read_sources
    prepared = {w for r, seen in sources.items() if to_end[r] and set(seen) <= blind for w in seen}
    if not prepared or prepared == set(variable.writes):
        return
    for read, seen in list(sources.items()):
        if before := [w for w in seen if w in prepared]:
            variable.prepared_read_sources[read] = before
        sources[read] = [w for w in seen if w not in prepared]
        if not sources[read]:
            del sources[read]
            variable.late_reads.remove(read)
            variable.first_reads.append(read)
    variable.writes = [w for w in variable.writes if w not in prepared]


def _changes(written: list[VariableAccess], graph: Propagation) -> list[int]:
    """Return for each written variable the written variables that its value changes."""
    bits = graph.upstream(memberships(v.writes for v in written))
    return [union(bits[r] for r in v.reads) for v in written]


def _without_state(
    values: ValueFlow, candidates: list[VariableAccess], ends: dict[int, int]
) -> list[VariableAccess]:
    """Drop state that forward passes carry along (an RNN's state, a queue of keys): the written value comes
    straight from the forward pass and shares no gradient with other variables."""
    if len(candidates) < 2:
        return candidates
    graph = values.propagation(cut_memory_of={v.handle for v in candidates})
    own_writes = {n for v in candidates for n in v.writes}
    forward = graph.upstream(marks(ends.keys() - own_writes))
    reached = graph.upstream(memberships(v.writes for v in candidates))
    behind = [here for node, here in enumerate(reached) if not forward[node]]
    for targets in values.targets_of_outputs.values():
        # A loss op may hand out its gradient as well: with reduction="sum" this is the final gradient.
        if not any(forward[t] for t in targets):
            behind.append(union(reached[t] for t in targets))
    shared = union(filter(several, behind))
    kept = [v for i, v in enumerate(candidates) if shared >> i & 1]
    return kept or candidates


def _find_slots(values: ValueFlow, weights: list[VariableAccess], written: list[VariableAccess]) -> Slots:
    """Find the weights' slots, which an update reads or one fused op (ResourceApplyAdam) reads and writes."""
    handles = {w.handle for w in weights}
    bits = values.propagation(cut_memory_of=handles).upstream(memberships(v.writes for v in weights))
    slots: Slots = {}
    for variable in written:
        changed = union(bits[access] for access in (*variable.reads, *variable.writes))
        if variable.handle not in handles and changed and not several(changed):
            slots.setdefault(changed.bit_length() - 1, []).append(variable)
    return slots


def _not_dominated(
    variables: Sequence[VariableAccess], index: dict[int, int], changes: list[int]
) -> list[VariableAccess]:
    """Find the trained variables in a graph that returns nothing: they are nobody's slots."""
    kept = []
    for v in variables:
        mine = changes[index[v.handle]]
        changed = [changes[index[w.handle]] for w in variables if w is not v and mine >> index[w.handle] & 1]
        is_slot = any(mine != other and mine & ~other == 0 for other in changed)
        if changed and not is_slot and v.trainable is not False:
            kept.append(v)
    return kept


# The forward pass: what the results of a step that depend on no gradient are computed from. A loss that is
# not returned and what loops only stash lead to no such result; gradients that nobody reads are none.

PUSH_OPS = frozenset({"TensorListPushBack", "TensorListSetItem"})
STASH_OPS = PUSH_OPS | {"Merge", *SWITCHES, "Identity", "NextIteration"}


def forward_ops(g: GradientFlow) -> list[int]:
    """Return 1 for each op of the forward pass."""
    fed, past = g.full.downstream(g.data_sources), _past_forward(g)
    ends = {
        *g.results,
        *(write for variable in g.variables for write in variable.writes),
    } - g.all_sinks.keys()
    seeds = marks(n for n in ends if fed[n] and not g.after[n] and not past[n])
    seeds |= _hidden(g, g.full.upstream(seeds))
    known = g.full.upstream(seeds)
    stash = _stashes(g, known)
    return g.full.upstream(seeds | marks(stash)) if stash else known


def _hidden(g: GradientFlow, known: list[int]) -> dict[int, int]:
    """Return the forward ops that lead to no visible result, such as a loss that is not returned.

    They change gradients of weights on which they do not depend yet. In ``h = x @ v; loss = sum((h @ w)**2)``
    the op ``h`` depends on v alone and changes the gradients of both.
    """
    reads = (read for weight in g.weights for read in weight.reads)
    if not any(several(g.reach[read]) and not known[read] for read in reads):
        return {}
    return marks(
        node
        for node, reached in enumerate(g.reach)
        if g.depends[node] and reached & ~g.depends[node] and g.from_data[node] and not g.after[node]
    )


def _past_forward(g: GradientFlow) -> list[int]:
    """Return the gradients among the results: nobody asked for them, but the graph does not name its results.

    They come after ops that change fewer weights than they depend on (``d loss / d x`` changes none).
    """
    if g.results_are_certain:
        return [0] * len(g.flow)
    shrunk = (
        n
        for n, reached in enumerate(g.reach)
        if reached and not reached & ~g.depends[n] and reached != g.depends[n]
    )
    return g.full.downstream(marks(shrunk))


def _stashes(g: GradientFlow, known: list[int]) -> list[int]:
    """Return loop variables of a forward loop that only collect tensors for the gradient loop.

    The LoopCond that their Switch reads belongs to a loop with a known result.  A gradient loop collects
    tensors as well (gradients of an RNN's inputs), but no forward result waits for its LoopCond.
    """
    stashes: list[int] = []
    for group in g.full.groups:
        types = {g.flow.types[n] for n in group}
        if types & PUSH_OPS and types <= STASH_OPS and _is_run_by(g, group, known):
            stashes += group
            stashes += [t for n in group for t in g.flow.raw_targets[n] if g.flow.types[t] == "Exit"]
    return stashes


def _is_run_by(g: GradientFlow, group: list[int], known: list[int]) -> bool:
    switches = [n for n in group if g.flow.types[n] == "Switch"]
    return any(known[g.flow.data[n][1].source] for n in switches) and not any(known[n] for n in group)


RETURN_OPS = ("_Retval", "_DeviceRetval")


@dataclass
class GradientFlow(ValueFlow):
    """Holds the facts that ops are classified by; bit i stands for ``weights[i]``."""

    results: list[int] = field(default_factory=list)
    results_are_certain: bool = True
    weights: list[VariableAccess] = field(init=False)
    slots: Slots = field(init=False)

    def __post_init__(self) -> None:
        self.weights, self.slots = find_weights(self, self.results)

    # -- graphs of value flow ---------------------------------------------------------------

    @cached_property
    def weight_handles(self) -> frozenset[int]:
        return frozenset(w.handle for w in self.weights)

    @cached_property
    def full(self) -> Propagation:
        """Follow all values, but not through a weight's memory, which leads to the next step's forward."""
        return self.propagation(cut_memory_of=self.weight_handles)

    @cached_property
    def needed(self) -> Propagation:
        """Follow all values as ``full`` does, and also to ops that need a tensor only for its shape."""
        return self.propagation(cut_memory_of=self.weight_handles, cut_metadata=False)

    @cached_property
    def cut(self) -> Propagation:
        """Follow all values as ``full`` does, except along edges that carry one number."""
        return self.propagation(cut_scalars=True, cut_memory_of=self.weight_handles)

    @cached_property
    def from_data(self) -> list[int]:
        """Return 1 for each op whose value changes with the data other than through one number."""
        return self.cut.downstream(self.data_sources)

    # -- reach ------------------------------------------------------------------------------

    def sinks(self, weight: int) -> list[int]:
        return [
            *self.weights[weight].writes,
            *(n for slot in self.slots.get(weight, []) for n in slot.writes),
        ]

    @cached_property
    def all_sinks(self) -> dict[int, int]:
        """Return 1 for the writes of all weights and slots, as seeds for a propagation."""
        return marks(sink for i in range(len(self.weights)) for sink in self.sinks(i))

    @cached_property
    def reach(self) -> list[int]:
        """Return for each op the weights whose update it changes, with one-number edges cut."""
        seeds = memberships(map(self.sinks, range(len(self.weights))))
        bits = self.cut.upstream(seeds)
        scalars = [i for i, w in enumerate(self.weights) if w.shape == ()]
        if not scalars:
            return bits
        after_others = self.full.downstream(self._gradient_like(bits))
        hops = {i: self._reductions(i, bits, after_others) for i in scalars}
        for i, distances in hops.items():
            for node, distance in distances.items():
                # Clipping by global norm leads from each to all: the nearest one is its own.
                if all(distance <= other.get(node, distance) for other in hops.values()):
                    seeds[node] = seeds.get(node, 0) | 1 << i
        return self.cut.upstream(seeds)

    def _reductions(self, weight: int, reach: list[int], after_others: list[int]) -> dict[int, int]:
        """Find ops that reduce tensors to a rank-0 weight's gradient, and their distance from its writes."""
        reductions: dict[int, int] = {}
        seen: set[int] = set()
        level, distance = set(self.sinks(weight)), 0
        while level:
            distance += 1
            above = {p for node in level for p in self.full.preds[node] if p not in seen and not reach[p]}
            seen |= above
            reducing = {
                node
                for node in above
                if any(self.from_data[e.source] and not e.scalar for e in self.flow.data[node])
                and not after_others[node]
            }
            reductions |= dict.fromkeys(reducing, distance)
            level = above - reducing
        return reductions

    def _gradient_like(self, reach: list[int]) -> dict[int, int]:
        """Mark ops with a weight's shape that reach only this weight; else (sparse updates) its writes."""
        of_bit = {1 << i: i for i in range(len(self.weights))}
        alike: dict[int, int] = {}
        seen = 0
        lone = {
            1 << i: self._from_gradient_on(i, reads, reach) for i, reads in self.lone_reads(reach).items()
        }
        for node, bits in enumerate(reach):
            weight = of_bit.get(bits)
            if weight is None or not self.from_data[node] or node not in lone.get(bits, (node,)):
                continue
            if any(may_equal(o.shape, self.weights[weight].shape) for o in self.flow.outputs[node]):
                alike[node] = bits
                seen |= bits
        for bit, weight in of_bit.items():
            if not seen & bit:
                alike.update(dict.fromkeys(self.weights[weight].writes, bit))
        return alike

    def lone_reads(self, reach: list[int]) -> dict[int, set[int]]:
        """Return the reads of weights whose forward pass changes no other weight's update, by weight."""
        to_results = self.full.upstream(marks(self.results))
        lone: dict[int, set[int]] = {}
        for i, weight in enumerate(self.weights):
            reads = {r for r in weight.first_reads if to_results[r]}
            if reads and all(reach[r] == 1 << i for r in reads):
                lone[i] = reads
        return lone

    def _from_gradient_on(self, weight: int, reads: set[int], reach: list[int]) -> set[int]:
        """Return the ops of a lone weight from its finished gradient on.

        In ``y = x @ w; dw = transpose(x) @ (y - t)`` ``y`` may have w's shape by chance, but x passes it by.
        """
        fed = self.cut.downstream(marks([*self.data_sources, *reads]))
        own = [n for group in self.cut.groups for n in group if fed[n] and reach[n] == 1 << weight]
        members = set(own)
        entries = {n for n in own if n in reads or n in self.data_sources}
        entries |= {n for n in own if any(fed[p] and p not in members for p in self.cut.preds[n])}
        shape = self.weights[weight].shape
        for node in self.cut.dominators(own, entries):
            if any(may_equal(o.shape, shape) for o in self.flow.outputs[node]):
                return set(own[own.index(node) :])
        return set()

    @cached_property
    def after(self) -> list[int]:
        """Return for each op the weights whose gradients it may depend on, by any edge."""
        return self.full.downstream(self._gradient_like(self.reach))

    @cached_property
    def depends(self) -> list[int]:
        """Return for each op the weights whose values it depends on."""
        return self.full.downstream(self.read_bits)

    @cached_property
    def depends_on_tensors(self) -> list[int]:
        """Propagate like ``depends``, one-number edges cut: a loop's counter depends on no weight."""
        return self.cut.downstream(self.read_bits)

    @cached_property
    def read_bits(self) -> dict[int, int]:
        """Return for each read of a weight the weight, as a bit."""
        return memberships(weight.reads for weight in self.weights)

    @cached_property
    def forward(self) -> list[int]:
        return forward_ops(self)


def may_equal(shape: tuple[int | None, ...] | None, wanted: tuple[int, ...] | None) -> bool:
    """Return whether a shape of known rank may equal ``wanted``: unknown sizes count as equal."""
    if shape is None or wanted is None or len(shape) != len(wanted):
        return False
    return all(a is None or a == b for a, b in zip(shape, wanted, strict=True))
