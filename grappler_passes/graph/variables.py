"""Finds variables of a flat graph, and how values flow through them: which reads see which writes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos, runtime
from grappler_passes.graph.dependencies import SWITCHES, only_reads
from grappler_passes.graph.flow import BACK_EDGE_OP, FlowGraph, Propagation

VARIABLE_ATTR = runtime.VARIABLE_ATTR
HANDLE_SOURCES = ("_Arg", "Placeholder", "VarHandleOp")
HANDLE_FORWARDERS = ("Identity", "Enter", "RefEnter", *SWITCHES, "Merge", "Exit", "NextIteration")


@dataclass
class VariableAccess:
    """Holds all accesses to one variable, as node indices into the FlowGraph.

    ``trainable`` is None if the graph does not say.  ``late_reads`` come after a write in the same step,
    ``first_reads`` do not.  ``prepared_read_sources`` maps a read to the writes of the forward pass that it
    sees; these writes are not in ``writes``.
    """

    handle: int
    name: str
    shape: tuple[int, ...] | None
    trainable: bool | None
    writes: list[int] = field(default_factory=list)
    first_reads: list[int] = field(default_factory=list)
    late_reads: list[int] = field(default_factory=list)
    late_read_sources: dict[int, list[int]] = field(default_factory=dict)
    prepared_read_sources: dict[int, list[int]] = field(default_factory=dict)

    @property
    def reads(self) -> list[int]:
        return self.first_reads + self.late_reads


def find_variables(graph_def: graph_pb2.GraphDef, flow: FlowGraph, order: list[int]) -> list[VariableAccess]:
    """Return variables that some op of the graph reads or writes, in node order of their handles.

    An op on a handle writes if it has no output and reads otherwise; one op reads a generator's counter and
    moves it on.
    """
    handles = _handle_of(flow, order)
    accesses = {
        handle: VariableAccess(handle, **_describe(graph_def.node[handle], flow.names[handle]))
        for handle in sorted(set(handles.values()))
    }
    for node in order:
        for handle in {handles[e.source] for e in flow.data[node] if e.source in handles}:
            if node in handles or flow.types[node] == "VariableShape":
                continue
            access = accesses[handle]
            if flow.outputs[node]:
                access.first_reads.append(node)
            if not flow.outputs[node] or _changes_what_it_reads(flow.types[node]):
                access.writes.append(node)
    used = [a for a in accesses.values() if a.first_reads or a.writes]
    for access in used:
        access.shape = access.shape if access.shape is not None else _shape_from_use(flow, access)
    _split_reads(flow, order, used)
    return [a for a in used if not _is_iterator(flow, a)]


def _changes_what_it_reads(op_type: str) -> bool:
    """Tell whether an op may change the state that it reads, as RngReadAndSkip or an unknown call."""
    return 0 in graph_protos.resource_inputs(op_type) and not only_reads(op_type)


def _handle_of(flow: FlowGraph, order: list[int]) -> dict[int, int]:
    """Return for each node that passes on a variable's handle the handle's source."""
    handles: dict[int, int] = {}
    for node in order:
        outputs = flow.outputs[node]
        if not outputs or outputs[0].dtype != "resource":
            continue
        if flow.types[node] in HANDLE_SOURCES:
            handles[node] = node
        elif flow.types[node] in HANDLE_FORWARDERS:
            sources = [handles[e.source] for e in flow.data[node] if e.source in handles]
            if sources:
                handles[node] = sources[0]
    return handles


def _is_iterator(flow: FlowGraph, access: VariableAccess) -> bool:
    """Tell whether a handle is an iterator, a table or a stack, which no op reads as a variable."""
    touched = {flow.types[n] for n in access.reads + access.writes}
    return all("Iterator" in t or "Dataset" in t or "Table" in t or "Stack" in t for t in touched)


def _describe(node: node_def_pb2.NodeDef, default_name: str) -> dict[str, Any]:
    info = json.loads(node.attr[VARIABLE_ATTR].s) if VARIABLE_ATTR in node.attr else {}
    shapes = list(node.attr["_handle_shapes"].list.shape[:1]) if "_handle_shapes" in node.attr else []
    if "shape" in node.attr and node.op == "VarHandleOp":
        shapes.append(node.attr["shape"].shape)
    known = (tuple(dim.size for dim in shape.dim) for shape in shapes if not shape.unknown_rank)
    shape = next(known, None)
    name = info.get("name") or default_name
    return {"name": name, "shape": shape, "trainable": info.get("trainable")}


def _shape_from_use(flow: FlowGraph, access: VariableAccess) -> tuple[int, ...] | None:
    """Return the shape of a whole read or a whole assignment; None if there is neither, or it is unknown."""
    whole = [flow.outputs[r][0].shape for r in access.first_reads if flow.types[r] == "ReadVariableOp"]
    values = [flow.data[write][1] for write in access.writes if flow.types[write].startswith("Assign")]
    whole += [flow.outputs[value.source][value.port].shape for value in values]
    known = (
        tuple(d for d in shape if d is not None) for shape in whole if shape is not None and None not in shape
    )
    return next(known, None)


def _split_reads(flow: FlowGraph, order: list[int], variables: list[VariableAccess]) -> None:
    """Sort reads into those before and those after a write of the same variable, by all edges."""
    write_bits: dict[int, int] = {}
    for variable in variables:
        for write in variable.writes:
            write_bits[write] = 1 << len(write_bits)
    past = Propagation(flow.waits, order, cyclic=False).downstream(write_bits)
    for variable in variables:
        for read in variable.first_reads:
            if seen := [w for w in variable.writes if w != read and past[read] & write_bits[w]]:
                variable.late_read_sources[read] = seen
        variable.late_reads = [r for r in variable.first_reads if r in variable.late_read_sources]
        variable.first_reads = [r for r in variable.first_reads if r not in variable.late_read_sources]


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
        """Return value flow without handles; one-number edges and variables' memory may be left out."""
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
        """Return the nodes that hand on a variable's handle."""
        return {
            n for n, outputs in enumerate(self.flow.outputs) if outputs and outputs[0].dtype == "resource"
        }

    @cached_property
    def data_sources(self) -> dict[int, int]:
        """Return the ops through which data (or randomness) enter: no constants, no variables."""
        reads = {r for v in self.variables for r in v.reads}
        sources = {}
        for node, kind in enumerate(self.flow.types):
            if kind in HANDLE_SOURCES and node not in self.handle_nodes or _SAMPLERS.fullmatch(kind):
                sources[node] = 1
            elif kind in HANDLE_SOURCES or kind in METADATA_OPS or node in reads:
                continue
            elif self.flow.outputs[node] and graph_protos.is_stateful(kind):
                sources[node] = 1
        return sources

    @cached_property
    def targets_of_outputs(self) -> dict[tuple[int, int], list[int]]:
        """Return the consumers of each output, (op, port), of ops with several consumers."""
        targets: dict[tuple[int, int], list[int]] = {}
        for node, edges in enumerate(self.flow.data):
            for edge in edges:
                if len(self.flow.outputs[edge.source]) > 1:
                    targets.setdefault((edge.source, edge.port), []).append(node)
        return targets

    def fed_by_data(self) -> list[int]:
        """Return 1 for each op that changes with the data, except by a boolean (a loss scale's switch)."""
        graph = self.propagation()
        preds = [[p for p in graph.preds[n] if not self._is_predicate(p)] for n in range(len(self.flow))]
        return Propagation(preds, self.order, self.cyclic).downstream(self.data_sources)

    def _is_predicate(self, node: int) -> bool:
        outputs = self.flow.outputs[node]
        return bool(outputs) and all(o.dtype == "bool" and o.shape == () for o in outputs)
