"""Finds the backward pass of a training step: where it ends, and what each op in it is needed for."""

from __future__ import annotations

from functools import cached_property

from grappler_passes.analysis.gradients import STASH_OPS, GradientFlow, may_equal
from grappler_passes.compat.graph_protos import is_communication
from grappler_passes.graph.flow import PACK_OPS, SPLIT_OPS, bits_of, marks, several, union

REARRANGING_OPS = frozenset({"Reshape", "Cast", "Identity", "Squeeze", "ExpandDims", "Transpose"})

UNSTASH_OPS = STASH_OPS | {"Enter", "Exit", "TensorListPopBack", "TensorListGetItem"}


class Backward:
    """Holds the updates and backward ops of a step; bit i stands for ``gradients.weights[i]``."""

    def __init__(self, gradients: GradientFlow):
        self.gradients = gradients
        self.flow = gradients.flow
        self.size = len(self.flow)
        self.successors = self.flow.targets

    def is_communication(self, node: int) -> bool:
        """Tell whether a node is a collective or a transfer, or packs or unpacks tensors for one."""
        kind = self.flow.types[node]
        return is_communication(kind) or node in self._packing

    @cached_property
    def _packing(self) -> set[int]:
        """Return the concatenations that only a communication reads, and the splits behind it."""
        targets = self.flow.raw_targets
        packing = set()
        for node, kind in enumerate(self.flow.types):
            if is_communication(kind):
                before = [p for p in self.flow.raw_sources[node] if self.flow.types[p] in PACK_OPS]
                packing |= {p for p in before if targets[p] == [node]}
                packing |= {t for t in targets[node] if self.flow.types[t] in SPLIT_OPS}
        return packing

    @cached_property
    def is_update(self) -> list[bool]:
        """Mark the ops from where a gradient first meets optimizer state, another weight's gradient or the
        result of a communication, to the writes."""
        g = self.gradients
        seeds = marks(self._state_reads())
        seeds |= marks(n for n, bits in enumerate(g.after) if several(bits))
        seeds |= g.all_sinks
        for node in range(self.size):
            if self.is_communication(node) and g.reach[node]:
                seeds |= marks(self.successors[node])
        marked = g.full.downstream(seeds)
        # The optimizer's own work on a finished gradient (its square, its norm) is part of the update.
        for node in self._finished_gradients(marked):
            seeds |= marks(self.successors[node])
        for node in range(self.size):
            seeds |= self._work_on_shared_gradient(node, marked)
        marked = g.full.downstream(seeds)
        return [bool(m) and not g.forward[n] for n, m in enumerate(marked)]

    def _finished_gradients(self, marked: list[int]) -> list[int]:
        """Find for each weight the first op of its shape through which data and weights reach its update.

        Only each weight's own ops before ``marked`` (optimizer state) are searched.
        """
        g = self.gradients
        own: dict[int, list[int]] = {}
        for node in (n for group in g.cut.groups for n in group):
            alone = g.reach[node] and not several(g.reach[node])
            if alone and not g.forward[node] and not marked[node]:
                own.setdefault(g.reach[node].bit_length() - 1, []).append(node)
        gradients = []
        for weight, nodes in own.items():
            passed = g.cut.dominators(nodes, self._entries(nodes))
            shape = g.weights[weight].shape
            exact = (n for n in passed if any(o.shape == shape for o in self.flow.outputs[n]))
            near = (n for n in passed if any(may_equal(o.shape, shape) for o in self.flow.outputs[n]))
            if (first := next(exact, next(near, None))) is not None:
                gradients.append(self._behind_views(first))
        return gradients

    def _entries(self, nodes: list[int]) -> list[int]:
        """Return the nodes that read data or weights from outside ``nodes``."""
        g, preds = self.gradients, self.gradients.cut.preds
        outside = {p for n in nodes for p in preds[n] if g.from_data[p] or g.depends[p]} - set(nodes)
        return [node for node in nodes if not outside.isdisjoint(preds[node])]

    def _behind_views(self, node: int) -> int:
        """Return the end of a chain of re-arrangements, such as a bias' gradient on its way to rank 1."""
        g = self.gradients
        while True:
            targets = [t for t in self.successors[node] if g.from_data[t]]
            if len(targets) != 1 or self.flow.types[targets[0]] not in REARRANGING_OPS:
                return node
            node = targets[0]

    def _work_on_shared_gradient(self, node: int, marked: list[int]) -> dict[int, int]:
        """Return the ops that use a dO tensor, of a weight's shape, as the gradient of that weight alone."""
        g = self.gradients
        if marked[node] or g.forward[node] or not g.from_data[node] or not several(g.reach[node]):
            return {}
        shapes = [output.shape for output in self.flow.outputs[node]]
        seeds: dict[int, int] = {}
        for target in self.successors[node]:
            weight = g.reach[target]
            if marked[target] and weight and not several(weight):
                wanted = g.weights[weight.bit_length() - 1].shape
                if any(shape is None or may_equal(shape, wanted) for shape in shapes):
                    seeds |= marks(t for t in self.successors[node] if g.reach[t] == weight)
        return seeds

    def _state_reads(self) -> list[int]:
        """Mark the reads of what only updates use: slots, learning rate, step counter, a decayed weight.

        A loss scale is read by the update too, but dO reads it first: it does not count.
        """
        g = self.gradients
        chain = marks(
            n
            for n, bits in enumerate(g.reach)
            if several(bits) and g.from_data[n] and not g.forward[n] and not g.after[n]
        )
        for weight in g.lone_reads(g.reach):
            chain |= marks(self._meets_forward(weight))
        feeds_chain = g.full.upstream(chain)
        feeds_sink = g.full.upstream(g.all_sinks)
        return [
            read
            for variable in g.variables
            for read in variable.reads
            if feeds_sink[read] and not g.forward[read] and not feeds_chain[read]
        ]

    def _meets_forward(self, weight: int) -> list[int]:
        """Return the ops of a lone weight's backward pass in which dO meets tensors of the forward pass."""
        g = self.gradients
        return [
            n
            for n, bits in enumerate(g.reach)
            if bits == 1 << weight and not g.forward[n] and n not in g.all_sinks
            and any(g.forward[e.source] and g.from_data[e.source] and not e.scalar for e in self.flow.data[n])
        ]  # fmt: skip

    def hands_over(self, node: int) -> int:
        """Return the weights whose gradient this op computes alone, or hands to an update."""
        g = self.gradients
        if not g.from_data[node]:
            return 0
        own = 0 if several(g.reach[node]) else g.reach[node]
        received = (g.reach[t] for t in self.successors[node] if self.is_update[t])
        return own | union(bits for bits in received if not several(bits))

    @cached_property
    def is_backward(self) -> list[bool]:
        """Tell for each op whether gradients are computed from it; forward ops and updates are excluded."""
        g = self.gradients
        outside = [g.forward[n] or self.is_update[n] for n in range(self.size)]
        ends = marks(n for n in range(self.size) if not outside[n] and self.hands_over(n))
        needed = g.needed.upstream(ends)
        return [bool(bit) and not outside[n] and n not in g.handle_nodes for n, bit in enumerate(needed)]

    @cached_property
    def unstashing(self) -> set[int]:
        """Return the ops of a gradient loop that only hand out what the forward loop has stashed."""
        g = self.gradients
        if not g.cyclic:
            return set()
        inside = {n for n, kind in enumerate(self.flow.types) if kind in UNSTASH_OPS and self.is_backward[n]}

        def reads_gradient(node: int) -> bool:
            tensors = [e.source for e in self.flow.data[node] if g.from_data[e.source] and not e.scalar]
            return any(not g.forward[source] and source not in inside for source in tensors)

        while reading := set(filter(reads_gradient, inside)):
            inside -= reading
        return inside

    @cached_property
    def recomputed(self) -> set[int]:
        """Return the ops of the backward pass that run the forward pass again: they compute no gradients.

        ``tf.recompute_grad`` adds a scalar, zero times a gradient, to the layer's input, so that the layer
        waits for the gradient; a tensor that is a gradient is never a sum with the forward pass.
        """
        g = self.gradients
        out: set[int] = set()
        for node in (n for n in g.order if self.is_backward[n]):
            tensors = [e.source for e in self.flow.data[node] if g.from_data[e.source] and not e.scalar]
            of_forward = all(source in out or not self.is_backward[source] for source in tensors)
            begins = bool(tensors) and self.flow.types[node] in {"Add", "AddN", "AddV2"}
            if of_forward and (begins or not out.isdisjoint(tensors)):
                out.add(node)
        return out

    def needed_by(self, group_of_weight: list[int]) -> list[int]:
        """Return for each backward op the groups of weights for whose gradients it is needed, as bits."""
        seeds = {
            node: union(1 << group_of_weight[w] for w in bits_of(self.hands_over(node)))
            for node, backward in enumerate(self.is_backward)
            if backward
        }
        return self.gradients.needed.upstream(seeds, stop=lambda n: not self.is_backward[n])

    @cached_property
    def serves_update(self) -> list[int]:
        """Mark with 1 the ops needed to write what depends on gradients (weights, slots, a loss scale)."""
        g = self.gradients
        ends = dict(g.all_sinks)
        late = marks(read for w in g.weights for read in w.late_reads if not g.forward[read])
        reads_updated = g.full.downstream(late)
        for variable in g.variables:
            # A moving average, or a lookahead copy, is written from a weight's updated value.
            follows = any(g.after[w] or reads_updated[w] for w in variable.writes)
            if follows or any(self.is_update[read] for read in variable.reads):  # a step counter
                ends |= marks(variable.writes)
        return g.needed.upstream(ends)
