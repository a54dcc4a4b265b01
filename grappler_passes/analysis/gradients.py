"""Follows how far a gradient reaches: which weights' updates each op of a training step changes.

Everything here follows values through the graph; no layer name, no op name, no name scope:

1. ``weights.py`` tells which variables are weights.
2. Clipping by global norm, loss scaling, learning rates tie all weights together through one number (rank 0);
   gradients flow through tensors.  With these edges cut, *reach* of an op = weights whose update it changes.
3. An op that has a weight's shape and reaches that weight alone is its gradient, or comes after it.  Results
   that depend on no such op are results of the forward pass (``forward.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from grappler_passes.analysis.forward import forward_ops
from grappler_passes.analysis.weights import Slots, find_weights
from grappler_passes.graph.bits import memberships
from grappler_passes.graph.flow import Propagation
from grappler_passes.graph.values import ValueFlow
from grappler_passes.graph.variables import VariableAccess

RETURN_OPS = ("_Retval", "_DeviceRetval")


@dataclass
class GradientFlow(ValueFlow):
    """The facts that classification is made of; bit i stands for ``weights[i]``."""

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
        """All values, but not through a weight's own memory: that leads to the next step's forward pass."""
        return self.propagation(cut_memory_of=self.weight_handles)

    @cached_property
    def needed(self) -> Propagation:
        """Propagate like ``full``, with the ops that are needed for their shape alone."""
        return self.propagation(cut_memory_of=self.weight_handles, cut_metadata=False)

    @cached_property
    def cut(self) -> Propagation:
        """Propagate like ``full``, without one-number edges."""
        return self.propagation(cut_scalars=True, cut_memory_of=self.weight_handles)

    @cached_property
    def from_data(self) -> list[int]:
        """1 for each op whose value changes with the data other than through one number."""
        return self.cut.downstream(self.data_sources)

    # -- reach ------------------------------------------------------------------------------

    def sinks(self, weight: int) -> list[int]:
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
                    reductions[node] = distance
                else:
                    level.append(node)
        return reductions

    def _gradient_like(self, reach: list[int]) -> dict[int, int]:
        """Return ops with a weight's shape that reach it alone: its bit; else (sparse updates) its writes."""
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
        """The weights whose forward pass changes no other weight's update (a model with one): its reads."""
        to_results = self.full.upstream(dict.fromkeys(self.results, 1))
        lone: dict[int, set[int]] = {}
        for i, weight in enumerate(self.weights):
            reads = {r for r in weight.first_reads if to_results[r]}
            if reads and all(reach[r] == 1 << i for r in reads):
                lone[i] = reads
        return lone

    def _from_gradient_on(self, weight: int, reads: set[int], reach: list[int]) -> set[int]:
        """Return the ops of a lone weight from its finished gradient on.

        In ``y = x @ w; dw = transpose(x) @ (y - t)`` ``y`` may have the shape of w by chance, but x passes it
        by.
        """
        fed = self.cut.downstream(dict.fromkeys([*self.data_sources, *reads], 1))
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
        """after[i]: the weights whose gradients op i may depend on, any edge counted."""
        return self.full.downstream(self._gradient_like(self.reach))

    @cached_property
    def depends(self) -> list[int]:
        """depends[i]: the weights whose values op i depends on."""
        return self.full.downstream(self.read_bits)

    @cached_property
    def depends_on_tensors(self) -> list[int]:
        """Propagate like ``depends``, one-number edges cut: a loop's counter depends on no weight."""
        return self.cut.downstream(self.read_bits)

    @cached_property
    def read_bits(self) -> dict[int, int]:
        """The reads of weights: whose."""
        return memberships(weight.reads for weight in self.weights)

    @cached_property
    def forward(self) -> list[int]:
        return forward_ops(self)


def may_equal(shape: tuple[int | None, ...] | None, wanted: tuple[int, ...] | None) -> bool:
    """Return whether a shape of known rank equals ``wanted``, unknown sizes counting as equal."""
    if shape is None or wanted is None or len(shape) != len(wanted):
        return False
    return all(a is None or a == b for a, b in zip(shape, wanted, strict=True))
