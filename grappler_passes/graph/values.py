"""Value flow of one training step: through tensors, one-number edges, and the memory of variables."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from grappler_passes.compat import op_types
from grappler_passes.graph.flow import BACK_EDGE_OP, FlowGraph, Propagation
from grappler_passes.graph.variables import HANDLE_SOURCES, VariableAccess

# The results of these ops depend on a tensor's shape only, not on its value.
METADATA_OPS = frozenset({"Shape", "ShapeN", "Size", "Rank", "VariableShape", "TensorListElementShape"})
# Random numbers drawn from a seed that the graph holds: they vary from step to step as data do,
# whether the seed is a variable (keras.random) or not, and no op of theirs is stateful.
_SAMPLERS = re.compile(
    r"Stateless(Random|TruncatedNormal|ParameterizedTruncatedNormal|Multinomial|Shuffle|Sample)\w*"
)


@dataclass
class ValueFlow:
    """Follows how values flow between the variables of a graph: which op can change which variable."""

    flow: FlowGraph
    order: list[int]
    variables: list[VariableAccess]

    def propagation(
        self,
        *,
        cut_scalars: bool = False,
        cut_memory_of: Collection[int] = frozenset(),
        cut_metadata: bool = True,
    ) -> Propagation:
        """Value flow without handles; it may lack one-number edges, or the memory of some variables."""
        preds: list[list[int]] = [
            []
            if cut_metadata and kind in METADATA_OPS
            else [
                e.source
                for e in edges
                if e.source not in self.handle_nodes and not (cut_scalars and e.scalar)
            ]
            for kind, edges in zip(self.flow.types, self.flow.data, strict=True)
        ]
        for variable in self.variables:
            for read, writes in variable.prepared_read_sources.items():
                preds[read].extend(writes)
            if variable.handle not in cut_memory_of:
                for read, writes in variable.late_read_sources.items():
                    preds[read].extend(writes)
        return Propagation(preds, self.order, self.cyclic)

    @cached_property
    def cyclic(self) -> bool:
        return BACK_EDGE_OP in set(self.flow.types)

    @cached_property
    def handle_nodes(self) -> set[int]:
        """Nodes that hand on a variable's handle."""
        return {
            n for n, outputs in enumerate(self.flow.outputs) if outputs and outputs[0].dtype == "resource"
        }

    @cached_property
    def data_sources(self) -> dict[int, int]:
        """Ops through which data (or randomness) enters: not constants, not variables."""
        reads = {r for v in self.variables for r in v.reads}
        sources = {}
        for node, kind in enumerate(self.flow.types):
            if kind in HANDLE_SOURCES and node not in self.handle_nodes or _SAMPLERS.fullmatch(kind):
                sources[node] = 1
            elif kind in HANDLE_SOURCES or kind in METADATA_OPS or node in reads:
                continue
            elif self.flow.outputs[node] and op_types.is_stateful(kind):
                sources[node] = 1
        return sources

    @cached_property
    def targets_of_outputs(self) -> dict[tuple[int, int], list[int]]:
        """The consumers of each output, (op, port), of the ops that have several of them."""
        targets: dict[tuple[int, int], list[int]] = {}
        for node, edges in enumerate(self.flow.data):
            for edge in edges:
                if len(self.flow.outputs[edge.source]) > 1:
                    targets.setdefault((edge.source, edge.port), []).append(node)
        return targets

    def fed_by_data(self) -> list[int]:
        """1 for each op whose value changes with the data, other than by a boolean (a loss scale's
        switch)."""
        graph = self.propagation()
        preds = [[p for p in graph.preds[n] if not self._is_predicate(p)] for n in range(len(self.flow))]
        return Propagation(preds, self.order, self.cyclic).downstream(self.data_sources)

    def _is_predicate(self, node: int) -> bool:
        outputs = self.flow.outputs[node]
        return bool(outputs) and all(o.dtype == "bool" and o.shape == () for o in outputs)
