"""Small graphs of value flow by hand, for the parts of the classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.flow import Edge, FlowGraph, Propagation, memberships
from grappler_passes.graph.variables import VariableAccess

_NUMBER = OutputInfo("float32", None, 4)


def flow_of(
    *rows: str, shapes: Mapping[str, Sequence[object]] = {}, scalars: Sequence[str] = ()
) -> FlowGraph:
    """Nodes ``"name Op: input input:1"`` with one output of unknown shape, but for those in ``shapes``.

    ``shapes`` has a shape for each output of a node; what a node of ``scalars`` hands on is one number.
    """
    heads = [row.partition(":") for row in rows]
    names, types = zip(*(head.split() for head, _, _ in heads), strict=True)
    index = {name: i for i, name in enumerate(names)}

    def edge(text: str) -> Edge:
        name, _, port = text.partition(":")
        return Edge(index[name], int(port or 0), name in scalars)

    data = [[edge(text) for text in inputs.split()] for _, _, inputs in heads]
    outputs = [
        tuple(OutputInfo("float32", shape, 4) for shape in shapes[name])
        if name in shapes
        else (OutputInfo("float32", (), 4) if name in scalars else _NUMBER,)
        for name in names
    ]
    raw = [[one.source for one in edges] for edges in data]
    control: list[list[int]] = [[] for _ in names]
    return FlowGraph(list(names), list(types), [""] * len(names), data, control, outputs, index, raw)


def propagation_of(flow: FlowGraph, cut_scalars: bool = False) -> Propagation:
    """Through all edges, in the order of the nodes; or without those that carry one number."""
    preds = [[edge.source for edge in edges if not (cut_scalars and edge.scalar)] for edges in flow.data]
    return Propagation(preds, range(len(flow)), False)


def bits(flow: FlowGraph, **by_name: int) -> list[int]:
    """A number for each node, 0 for those that are not given."""
    assert by_name.keys() <= flow.index.keys()
    return [by_name.get(name, 0) for name in flow.names]


def ones(flow: FlowGraph, names: str) -> list[int]:
    """1 for these nodes."""
    return bits(flow, **dict.fromkeys(names.split(), 1))


def nodes(flow: FlowGraph, names: str) -> list[int]:
    return [flow.index[name] for name in names.split()]


def names_of(flow: FlowGraph, numbers: Sequence[int]) -> list[str]:
    """Return the names of nodes, in the order of the graph."""
    return [flow.names[number] for number in sorted(numbers)]


def access(
    flow: FlowGraph, name: str, writes: str = "", reads: str = "", late: str = "", **more: object
) -> VariableAccess:
    """A variable: nodes that write it, that read it before a write, and behind all of its writes."""
    fields = {"shape": (3, 4), "trainable": None, "handle": -1} | more
    made = VariableAccess(name=name, **fields)
    made.writes, made.first_reads, made.late_reads = (nodes(flow, names) for names in (writes, reads, late))
    made.late_read_sources = {read: list(made.writes) for read in made.late_reads}
    return made


def facts(flow: FlowGraph, **known: object) -> SimpleNamespace:
    """Return what the parts ask a GradientFlow for; what is not given is empty."""
    none = [0] * len(flow)
    plain = {
        "flow": flow, "weights": [], "variables": [], "all_sinks": {}, "handle_nodes": set(), "cyclic": False,
        "reach": none, "forward": none, "from_data": none, "depends": none, "after": none,
        "full": propagation_of(flow), "needed": propagation_of(flow), "cut": propagation_of(flow, True),
        "lone_reads": lambda reach: {}, "read_bits": memberships(w.reads for w in known.get("weights", ())),
    }  # fmt: skip
    return SimpleNamespace(**(plain | known))
