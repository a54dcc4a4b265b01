"""Sorts the ops of a training step into forward, dO, dW, update and communication, by dataflow.

The definitions (out-of-order backprop, EuroSys 2022, in terms of a graph):

- *forward*: what the results of the step that depend on no gradient are computed from;
- *update*: from the first op in which a gradient meets optimizer state, another layer's gradient
  (clipping by global norm) or the result of a communication, to the writes;
- *backward*: everything else that updates depend on.  A backward op that more than one layer's
  gradients need is *dO*, one that a single layer's gradients need is *dW*.

A layer is the set of variables whose gradients start from the same dO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grappler_passes.backward import Backward
from grappler_passes.bits import bits_of, several, union
from grappler_passes.compat import infer_outputs, inline_graph_def
from grappler_passes.errors import GraphError
from grappler_passes.flow import FlowGraph, build_flow_graph
from grappler_passes.gradients import RETURN_OPS, GradientFlow
from grappler_passes.graph import Layer, Op, OpKind, TrainingGraph, Variable
from grappler_passes.layers import group_weights
from grappler_passes.sizes import output_bytes
from grappler_passes.variables import find_variables

CALL_OPS = frozenset(
    {"PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf",
     "Case", "StatelessCase"}
)  # fmt: skip
FUSED_REASON = (
    "one kernel computes dO and dW together: its dO needs the same reductions that are its dW, "
    "so there is nothing to delay"
)


def classify_graph_def(graph_def, fetches: Sequence[str] | None = None) -> TrainingGraph:
    """Classifies every op of a training step.

    Args:
        graph_def: a ``GraphDef``.  Function calls, While and If are inlined first (a graph that
            Grappler hands to a pass is flat already).
        fetches: names of the ops that produce the step's results; by default the ``_Retval``
            ops, and where there are none the ops that nothing consumes.

    Raises:
        GraphError: no variable is updated from a gradient, or all of the step is hidden inside
            an op that cannot be looked into (``jit_compile=True``).
    """
    graph_def = flatten(graph_def, fetches)
    flow = build_flow_graph(graph_def, infer_outputs(graph_def))
    order = flow.execution_order()
    results, certain = _results(flow, fetches)
    gradients = GradientFlow(flow, order, find_variables(graph_def, flow, order), results, certain)
    if not gradients.weights:
        raise GraphError(_no_weights_message(graph_def))
    return _assemble(Backward(gradients))


def flatten(graph_def, fetches: Sequence[str] | None = None):
    """The graph without function calls; the same object when it has none that can be inlined."""
    functions = {f.signature.name for f in graph_def.library.function}
    calls = [n for n in graph_def.node if n.op in functions or n.op in CALL_OPS]
    if not any(_can_inline(n) for n in calls):
        return graph_def
    keep = [*(fetches or ()), *_unconsumed(graph_def)]
    return inline_graph_def(graph_def, keep)


def _can_inline(node) -> bool:
    return not node.attr["_XlaMustCompile"].b if "_XlaMustCompile" in node.attr else True


def _unconsumed(graph_def) -> list[str]:
    consumed = {text.lstrip("^").partition(":")[0] for n in graph_def.node for text in n.input}
    return [n.name for n in graph_def.node if n.name not in consumed]


def _results(flow: FlowGraph, fetches: Sequence[str] | None) -> tuple[list[int], bool]:
    """Ops that produce the step's results, and whether the graph or the caller said so."""
    if fetches is not None:
        named = (name.partition(":")[0] for name in fetches)
        return [flow.index[name] for name in named if name in flow.index], True
    returned = [n for n, kind in enumerate(flow.types) if kind in RETURN_OPS]
    if returned or "_Arg" in flow.types:
        return returned, True
    consumed = {e.source for edges in flow.data for e in edges}
    return [n for n in range(len(flow)) if n not in consumed and flow.outputs[n]], False


def _no_weights_message(graph_def) -> str:
    opaque = [n for n in graph_def.node if n.op in CALL_OPS and not _can_inline(n)]
    if opaque:
        return (
            f"the step is hidden inside {opaque[0].name} (jit_compile=True): XLA compiles it whole; "
            "use jit_compile=False to have it reordered"
        )
    return (
        "not a training graph: no variable is updated with a value that depends on its gradient; "
        "pass the function that calls optimizer.apply, on a model with trainable weights"
    )


def _assemble(backward: Backward) -> TrainingGraph:
    groups = group_weights(backward)
    layer_of = [0] * len(backward.gradients.weights)
    for index, members in enumerate(groups):
        for weight in members:
            layer_of[weight] = index
    needed = backward.needed_by(layer_of)
    update_layer = _update_layers(backward, layer_of)
    g = backward.gradients
    ops: dict[str, Op] = {}
    for node in g.order:
        kind, layer, reason = _kind(backward, node, needed[node], update_layer[node])
        if g.flow.types[node] == "IdentityN":
            kind, layer, reason = _kind_of_gate([ops[g.flow.names[e.source]] for e in g.flow.data[node]])
        ops[g.flow.names[node]] = _op(g.flow, node, kind, layer, reason)
    mixed = _mixed(backward, needed, update_layer)
    return TrainingGraph(
        ops=ops,
        layers=_layers(g, groups, ops, mixed),
        variables=_variables(g),
        unclassified=_unclassified(g, ops),
        mixed={g.flow.names[n]: _mixed_reason(g.flow.types[n]) for n in mixed},
    )


def _update_layers(backward: Backward, layer_of: list[int]) -> list[int | None]:
    """For each op the one layer whose update it serves; None where it serves none or several."""
    g = backward.gradients
    seeds: dict[int, int] = {}
    for weight, layer in enumerate(layer_of):
        for sink in g.sinks(weight):
            seeds[sink] = seeds.get(sink, 0) | 1 << layer
    return [b.bit_length() - 1 if b and not several(b) else None for b in g.full.upstream(seeds)]


def _kind(backward: Backward, node: int, needed: int, update_layer: int | None):
    """(kind, layer, reason) of one op."""
    g = backward.gradients
    own = needed.bit_length() - 1 if needed and not several(needed) else None
    if node in g.handle_nodes:
        return OpKind.OTHER, None, "a handle, no work"
    if backward.is_communication(node):
        return OpKind.COMMUNICATION, own if own is not None else update_layer, "communication"
    if g.forward[node]:
        return OpKind.FORWARD, None, "a result that depends on no gradient is computed from it"
    if backward.is_backward[node] and own is not None:
        return OpKind.WEIGHT_GRAD, own, "a single layer's gradients need it"
    if backward.is_backward[node]:
        return OpKind.OUTPUT_GRAD, None, f"{needed.bit_count()} layers' gradients need it"
    if backward.serves_update[node]:
        return OpKind.UPDATE, update_layer, "between a gradient and the write of a variable"
    return OpKind.OTHER, None, "no gradient and no update depends on it"


def _kind_of_gate(producers: Sequence[Op]) -> tuple[OpKind, int | None, str]:
    """An IdentityN is as late as the latest of what it hands on: it waits for all of it."""
    order = [OpKind.OTHER, OpKind.FORWARD, OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.UPDATE]
    kinds = {op.kind for op in producers}
    layers = {op.layer for op in producers}
    if OpKind.WEIGHT_GRAD in kinds and len(layers) > 1:
        return OpKind.UPDATE, None, "a gate in front of the updates: it waits for several layers' gradients"
    latest = max(kinds, key=lambda k: order.index(k) if k in order else 0, default=OpKind.OTHER)
    return latest, layers.pop() if len(layers) == 1 else None, "a gate: as late as what it hands on"


def _op(flow: FlowGraph, node: int, kind: OpKind, layer: int | None, reason: str) -> Op:
    return Op(
        name=flow.names[node],
        type=flow.types[node],
        kind=kind,
        reason=reason,
        layer=layer,
        inputs=tuple((flow.names[e.source], e.port) for e in flow.data[node]),
        control_inputs=tuple(flow.names[c] for c in flow.control[node]),
        device=flow.devices[node],
        output_bytes=output_bytes(flow.types[node], flow.outputs[node]),
    )


def _mixed(backward: Backward, needed: list[int], update_layer: list[int | None]) -> dict[int, int]:
    """dO ops with an output that serves one layer only: op -> those layers as bits."""
    ports: dict[int, dict[int, int]] = {}
    for node in range(backward.size):
        bits = needed[node] if backward.is_backward[node] else 0
        layer = update_layer[node]
        if backward.is_update[node] and layer is not None:
            bits = 1 << layer
        for edge in backward.flow.data[node]:
            source_is_shared = backward.is_backward[edge.source] and several(needed[edge.source])
            if source_is_shared and backward.gradients.from_data[edge.source]:
                of_source = ports.setdefault(edge.source, {})
                of_source[edge.port] = of_source.get(edge.port, 0) | bits
    return {
        node: union(b for b in of_port.values() if not several(b))
        for node, of_port in ports.items()
        if len(of_port) > 1 and len({b for b in of_port.values() if b}) > 1
        and union(b for b in of_port.values() if not several(b))
        and not _is_pass_through(backward, node)
    }  # fmt: skip


def _is_pass_through(backward: Backward, node: int) -> bool:
    """Switch and friends: several outputs, but no work that dO and dW would share."""
    return backward.flow.types[node] in ("Switch", "Merge")


def _layers(g: GradientFlow, groups, ops: Mapping[str, Op], mixed: Mapping[int, int]) -> tuple[Layer, ...]:
    own: dict[tuple[int, OpKind], list[str]] = {}
    for op in ops.values():
        if op.layer is not None:
            own.setdefault((op.layer, op.kind), []).append(op.name)
    for node, layers in mixed.items():
        for layer in bits_of(layers):
            own.setdefault((layer, OpKind.WEIGHT_GRAD), []).append(g.flow.names[node])
    return tuple(
        Layer(
            index=index,
            variables=tuple(g.weights[w].name for w in members),
            weight_grad_ops=tuple(own.get((index, OpKind.WEIGHT_GRAD), ())),
            update_ops=tuple(own.get((index, OpKind.UPDATE), ())),
            communication_ops=tuple(own.get((index, OpKind.COMMUNICATION), ())),
        )
        for index, members in enumerate(groups)
    )


def _variables(g: GradientFlow) -> tuple[Variable, ...]:
    return tuple(
        Variable(w.name, g.flow.names[w.handle], w.shape, tuple(s.name for s in g.slots.get(i, ())))
        for i, w in enumerate(g.weights)
    )


def _unclassified(g: GradientFlow, ops: Mapping[str, Op]) -> dict[str, str]:
    """Ops that hide what they do to variables: calls that cannot be inlined and are given a handle."""
    hidden = {
        node: edge.source
        for node, edges in enumerate(g.flow.data)
        for edge in edges
        if g.flow.types[node] in CALL_OPS and edge.source in g.handle_nodes
    }
    return {
        g.flow.names[node]: f"a call that cannot be inlined and uses {g.flow.names[handle]}: "
        "which gradients it computes or applies cannot be told"
        for node, handle in hidden.items()
        if ops[g.flow.names[node]].kind is not OpKind.FORWARD
    }


def _mixed_reason(op_type: str) -> str:
    if op_type in CALL_OPS:
        return "XLA compiles this call whole (jit_compile=True inside the step): dO and dW leave it together"
    return FUSED_REASON
