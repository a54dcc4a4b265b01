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

from collections.abc import Sequence

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from grappler_passes.analysis.backward import Backward
from grappler_passes.analysis.gradients import RETURN_OPS, GradientFlow
from grappler_passes.analysis.kinds import assemble
from grappler_passes.compat import flattening, op_types, shape_inference
from grappler_passes.errors import GraphError
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.flow import CALL_OPS, FlowGraph, build_flow_graph
from grappler_passes.graph.node_input import split_input
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.graph.variables import find_variables


def classify_graph_def(graph_def: graph_pb2.GraphDef, fetches: Sequence[str] | None = None) -> TrainingGraph:
    """Classifies every op of a training step; calls, While and If are inlined first.

    Args:
        graph_def: a ``GraphDef``.
        fetches: names of the ops that produce the step's results; by default the ``_Retval``
            ops, and where there are none the ops that nothing consumes.

    Raises:
        GraphError: a dangling input, an unknown op or a cycle (the node is named); no variable is updated
            from a gradient; all of the step is hidden inside an op (``jit_compile=True``).
    """
    _check(graph_def)
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


def _check(graph_def: graph_pb2.GraphDef) -> None:
    """GraphError names the node with an unknown op, a dangling input, or on a cycle."""
    functions = {function.signature.name for function in graph_def.library.function}
    known = {op for op in {node.op for node in graph_def.node} if op in functions or op_types.is_known_op(op)}
    for node in graph_def.node:
        if node.op not in known:
            raise GraphError(f"TensorFlow knows no op {node.op!r}", node.name)
    GraphIndex(graph_def)


def flatten(graph_def: graph_pb2.GraphDef, fetches: Sequence[str] | None = None) -> graph_pb2.GraphDef:
    """The graph without function calls; the same object when they cannot be inlined."""
    functions = {f.signature.name: f for f in graph_def.library.function}
    calls = [n for n in graph_def.node if n.op in functions or n.op in CALL_OPS]
    if not any(_can_inline(n) for n in calls):
        return graph_def
    if any(_is_stub(functions[name]) for name in flattening.called_by(calls) if name in functions):
        return graph_def
    keep = [*(fetches or ()), *_unconsumed(graph_def)]
    return flattening.inline_graph_def(graph_def, keep)


def _is_stub(function: function_pb2.FunctionDef) -> bool:
    """Grappler hands over functions without their bodies.  What it has not inlined by then, such as the LSTM
    of Keras 2 that a GPU would replace by cuDNN's, or the loops of a CTC loss, stays one op.  So a graph in
    Grappler's hands is never flattened, which would wait for Grappler."""
    return not function.node_def and not function.ret


def _can_inline(node: node_def_pb2.NodeDef) -> bool:
    return not node.attr["_XlaMustCompile"].b if "_XlaMustCompile" in node.attr else True


def _unconsumed(graph_def: graph_pb2.GraphDef) -> list[str]:
    consumed = {split_input(text)[0] for n in graph_def.node for text in n.input}
    return [n.name for n in graph_def.node if n.name not in consumed]


def _results(flow: FlowGraph, fetches: Sequence[str] | None) -> tuple[list[int], bool]:
    """Return ops that produce the step's results, and whether the graph or the caller said so."""
    if fetches is not None:
        named = (split_input(name)[0] for name in fetches)
        return [flow.index[name] for name in named if name in flow.index], True
    returned = [n for n, kind in enumerate(flow.types) if kind in RETURN_OPS]
    if returned or "_Arg" in flow.types:
        return returned, True
    return [n for n, targets in enumerate(flow.targets) if not targets and flow.outputs[n]], False


def _no_weights_message(graph_def: graph_pb2.GraphDef) -> str:
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
