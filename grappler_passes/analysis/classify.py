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
from dataclasses import replace

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from grappler_passes.analysis.backward import Backward
from grappler_passes.analysis.gradients import RETURN_OPS, GradientFlow
from grappler_passes.analysis.layers import group_weights
from grappler_passes.compat import graph_protos, shape_inference
from grappler_passes.compat.graph_protos import split_input
from grappler_passes.errors import GraphError
from grappler_passes.graph.dependencies import SWITCHES, GraphIndex
from grappler_passes.graph.flow import (
    CALL_OPS,
    FlowGraph,
    bits_of,
    build_flow_graph,
    memberships,
    several,
    union,
)
from grappler_passes.graph.sizes import output_bytes
from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from grappler_passes.graph.variables import find_variables

HANDED_OVER_REASON = (
    "its result is the dO that goes on and a weight's gradient at once: there is nothing to delay"
)

# Kernels that compute dO and dW together and cannot be taken apart, each with the reason.
_NORM = "one kernel computes both: dO needs the reductions that are the scale and offset gradients"
_RNN = "one kernel runs all time steps backward and sums the weight gradient inside"
_NORM_OPS = (
    "FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3", "_FusedBatchNormGradEx",
    "BatchNormWithGlobalNormalizationGrad", "LayerNormGrad", "_MklFusedBatchNormGrad",
    "_MklFusedBatchNormGradV2", "_MklFusedBatchNormGradV3",
)  # fmt: skip
_RNN_OPS = (
    "CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3", "BlockLSTMGrad", "BlockLSTMGradV2",
    "LSTMBlockCellGrad", "GRUBlockCellGrad",
)  # fmt: skip
# A layer's name lists at most this many of its parts.
_MOST_NAMED = 3
FUSED_REASONS = {**dict.fromkeys(_NORM_OPS, _NORM), **dict.fromkeys(_RNN_OPS, _RNN)}


def assemble(backward: Backward) -> TrainingGraph:
    """Return the kinds and layers of all ops as plain data."""
    groups = group_weights(backward)
    layer_of = [at for _, at in sorted((weight, at) for at, own in enumerate(groups) for weight in own)]
    needed = backward.needed_by(layer_of)
    update_layer = _update_layers(backward, groups)
    g = backward.gradients
    ops: dict[str, Op] = {}
    for node in g.order:
        if g.flow.types[node] == "IdentityN":
            kind, layer, reason = _kind_of_gate([ops[g.flow.names[e.source]] for e in g.flow.data[node]])
        else:
            kind, layer, reason = _kind(backward, node, needed[node], update_layer[node])
        ops[g.flow.names[node]] = _op(g.flow, node, kind, layer, reason)
    mixed = _mixed(backward, needed, update_layer)
    reasons = {g.flow.names[n]: _mixed_reason(g.flow.types[n]) for n in mixed}
    own = union(1 << layer for layer in _layers_of(ops, OpKind.WEIGHT_GRAD))
    handed_over = _handed_over(backward, layer_of, needed, own | union(mixed.values()))
    reasons |= {g.flow.names[n]: HANDED_OVER_REASON for n in handed_over}
    layers = _layers(g, groups, ops, mixed | handed_over)
    return TrainingGraph(
        ops=ops,
        layers=layers,
        variables=_variables(g),
        unclassified=_hidden_updates(g, ops) | _without_gradient(g, layers),
        mixed=reasons,
    )


def _layers_of(ops: Mapping[str, Op], kind: OpKind) -> set[int]:
    return {op.layer for op in ops.values() if op.kind is kind and op.layer is not None}


def _update_layers(backward: Backward, groups: Sequence[Sequence[int]]) -> list[int | None]:
    """Return for each op the one layer whose update it serves; None if it serves none or several."""
    g = backward.gradients
    seeds = memberships([sink for weight in members for sink in g.sinks(weight)] for members in groups)
    return [b.bit_length() - 1 if b and not several(b) else None for b in g.full.upstream(seeds)]


def _kind(backward: Backward, node: int, needed: int, update_layer: int | None):
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
    """An IdentityN gets the latest kind among its inputs, because it waits for all of them."""
    order = [OpKind.OTHER, OpKind.COMMUNICATION, *OpKind]
    kinds = {op.kind for op in producers}
    layers = {op.layer for op in producers}
    if OpKind.WEIGHT_GRAD in kinds and len(layers) > 1:
        return OpKind.UPDATE, None, "a gate in front of the updates: it waits for several layers' gradients"
    latest = max(kinds, key=order.index, default=OpKind.OTHER)
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
    """Return the dO ops with an output that serves only one layer: op -> those layers as bits."""
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
        node: alone
        for node, of_port in ports.items()
        if len(set(of_port.values()) - {0}) > 1
        and (alone := union(b for b in of_port.values() if not several(b)))
        # A Switch and its like have several outputs, but do no work that dO and dW would share.
        and backward.flow.types[node] not in (*SWITCHES, "Merge")
    }


def _handed_over(backward: Backward, layer_of: list[int], needed: list[int], own: int) -> dict[int, int]:
    """Return the dO ops that updates of layers not in ``own`` take as the gradient: op -> layers as bits."""
    shared = (node for node, bits in enumerate(needed) if backward.is_backward[node] and several(bits))
    layers = {n: union(1 << layer_of[w] for w in bits_of(backward.hands_over(n))) & ~own for n in shared}
    return {node: bits for node, bits in layers.items() if bits}


def _layers(
    g: GradientFlow, groups: Sequence[Sequence[int]], ops: Mapping[str, Op], mixed: Mapping[int, int]
) -> tuple[Layer, ...]:
    own: dict[tuple[int, OpKind], list[str]] = {}
    for op in ops.values():
        if op.layer is not None:
            own.setdefault((op.layer, op.kind), []).append(op.name)
    for node, layers in mixed.items():
        for layer in bits_of(layers):
            own.setdefault((layer, OpKind.WEIGHT_GRAD), []).append(g.flow.names[node])
    numbered = [
        Layer(
            index=index,
            variables=tuple(g.weights[w].name for w in members),
            weight_grad_ops=tuple(own.get((index, OpKind.WEIGHT_GRAD), ())),
            update_ops=tuple(own.get((index, OpKind.UPDATE), ())),
            communication_ops=tuple(own.get((index, OpKind.COMMUNICATION), ())),
        )
        for index, members in enumerate(groups)
    ]
    return tuple(_told_apart(layer, numbered) for layer in numbered)


def _told_apart(layer: Layer, layers: Sequence[Layer]) -> Layer:
    """Label a layer with its parts if other layers' names begin with its name, as in a model."""
    name = layer.name
    if "/" in name or len(layer.variables) == 1:
        return layer
    beside = (variable for other in layers if other is not layer for variable in other.variables)
    if not any(variable.startswith(f"{name}/") for variable in beside):
        return layer
    within = (variable.removeprefix(f"{name}/") for variable in layer.variables)
    held = list(dict.fromkeys(path.rpartition("/")[0] or path for path in within))
    more = f" + {len(held) - _MOST_NAMED} more" if len(held) > _MOST_NAMED else ""
    return replace(layer, label=f"{name}/{' + '.join(held[:_MOST_NAMED])}{more}")


def _variables(g: GradientFlow) -> tuple[Variable, ...]:
    return tuple(
        Variable(w.name, g.flow.names[w.handle], w.shape, tuple(s.name for s in g.slots.get(i, ())))
        for i, w in enumerate(g.weights)
    )


def _without_gradient(g: GradientFlow, layers: tuple[Layer, ...]) -> dict[str, str]:
    """Return the trainable variables that are written, but that no op computes a gradient for.

    A variable that is only read is frozen: Keras' own ``trainable`` does not reach the ``tf.Variable``.
    """
    with_gradient = {name for layer in layers if layer.weight_grad_ops for name in layer.variables}
    reason = "a trainable variable without a dW: no value written to it was found to depend on its gradient"
    return {v.name: reason for v in g.variables if v.trainable and v.writes and v.name not in with_gradient}


def _hidden_updates(g: GradientFlow, ops: Mapping[str, Op]) -> dict[str, str]:
    """Return the calls that cannot be inlined and are given a variable's handle: they may hide updates."""
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
    return FUSED_REASONS.get(op_type, "one op computes dO and dW together")


def classify_graph_def(graph_def: graph_pb2.GraphDef, fetches: Sequence[str] | None = None) -> TrainingGraph:
    """Classify every op of a training step; calls, While and If are inlined first.

    Args:
        graph_def: a ``GraphDef``.
        fetches: names of the ops that produce the step's results; by default the ``_Retval``
            ops, and where there are none the ops that nothing consumes.

    Raises:
        GraphError: a dangling input, an unknown op or a cycle (the node is named); no variable is updated
            from a gradient; all of the step is hidden inside an op (``jit_compile=True``).
    """
    functions = {function.signature.name for function in graph_def.library.function}
    known = {
        op for op in {node.op for node in graph_def.node} if op in functions or graph_protos.is_known_op(op)
    }
    for node in graph_def.node:
        if node.op not in known:
            raise GraphError(f"TensorFlow knows no op {node.op!r}", node.name)
    GraphIndex(graph_def)  # it refuses dangling inputs and cycles
    with shape_inference.graph_errors():
        graph_def = flatten(graph_def, fetches)
        outputs = shape_inference.infer_outputs(graph_def)
    flow = build_flow_graph(graph_def, outputs)
    order = flow.execution_order()
    results, certain = _results(flow, fetches)
    gradients = GradientFlow(flow, order, find_variables(graph_def, flow, order), results, certain)
    if not gradients.weights:
        raise GraphError(_no_weights_message(graph_def))
    return assemble(Backward(gradients))


def flatten(graph_def: graph_pb2.GraphDef, fetches: Sequence[str] | None = None) -> graph_pb2.GraphDef:
    """Return the graph without function calls; the same object if they cannot be inlined."""
    functions = {f.signature.name: f for f in graph_def.library.function}
    calls = [n for n in graph_def.node if n.op in functions or n.op in CALL_OPS]
    if not any(_can_inline(n) for n in calls):
        return graph_def
    if any(_is_stub(functions[name]) for name in graph_protos.called_by(calls) if name in functions):
        return graph_def
    consumed = {split_input(text)[0] for node in graph_def.node for text in node.input}
    unconsumed = [node.name for node in graph_def.node if node.name not in consumed]
    return graph_protos.inline_graph_def(graph_def, [*(fetches or ()), *unconsumed])


def _is_stub(function: function_pb2.FunctionDef) -> bool:
    """Grappler hands over functions without their bodies.  What it has not inlined by then, such as the LSTM
    of Keras 2 that a GPU would replace by cuDNN's, or the loops of a CTC loss, stays one op.  So a graph in
    Grappler's hands is never flattened, which would wait for Grappler."""
    return not function.node_def and not function.ret


def _can_inline(node: node_def_pb2.NodeDef) -> bool:
    return "_XlaMustCompile" not in node.attr or not node.attr["_XlaMustCompile"].b


def _results(flow: FlowGraph, fetches: Sequence[str] | None) -> tuple[list[int], bool]:
    """Return the ops that produce the step's results, and whether the graph or the caller named them."""
    if fetches is not None:
        named = (split_input(name)[0] for name in fetches)
        return [flow.index[name] for name in named if name in flow.index], True
    returned = [n for n, kind in enumerate(flow.types) if kind in RETURN_OPS]
    if returned or "_Arg" in flow.types:
        return returned, True
    return [n for n, targets in enumerate(flow.targets) if not targets and flow.outputs[n]], False


def _no_weights_message(graph_def: graph_pb2.GraphDef) -> str:
    if opaque := [n for n in graph_def.node if n.op in CALL_OPS and not _can_inline(n)]:
        return (
            f"the step is hidden inside {opaque[0].name} (jit_compile=True): XLA compiles it whole; "
            "use jit_compile=False to have it reordered"
        )
    return (
        "not a training graph: no variable is updated with a value that depends on its gradient; "
        "pass the function that calls optimizer.apply, on a model with trainable weights"
    )
