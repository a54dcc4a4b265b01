"""Checks what must hold of every classified graph, without the classifier's own means."""

from __future__ import annotations

from collections import Counter

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.graph.sizes import KnownShapes, outputs_with_sizes
from grappler_passes.graph.training_graph import OpKind, TrainingGraph
from tests.same_bits import BATCH_SIZE
from tf_ooo.compat import keras_variables
from tf_ooo.costs.analytic import analytic_ops
from tf_ooo.costs.devices import DeviceModel

HEAVY = {
    "MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D", "Conv2DBackpropInput",
    "Conv2DBackpropFilter", "Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput",
    "DepthwiseConv2dNativeBackpropFilter", "_FusedConv2D", "_FusedMatMul", "_FusedBatchMatMulV2",
}  # fmt: skip
BACKWARD = (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD)
_ANY_DEVICE = DeviceModel(flop_per_s=1e9, bytes_per_s=1e9)


def check(graph: TrainingGraph, expected_variables: int) -> None:
    assert sum(len(layer.variables) for layer in graph.layers) == expected_variables
    assert all(layer.weight_grad_ops for layer in graph.layers)
    assert not graph.unclassified
    check_no_weight_gradient_needs_another(graph)
    check_shared_ops_are_output_gradients(graph)
    check_heavy_ops(graph)


def upstream(graph: TrainingGraph, names) -> set[str]:
    """Everything that the named ops depend on, themselves included, by a plain search."""
    seen, stack = set(), list(names)
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            stack.extend(source for source, _ in graph.ops[name].inputs)
    return seen


def check_no_weight_gradient_needs_another(graph: TrainingGraph) -> None:
    for layer in graph.layers:
        own = [n for n in layer.weight_grad_ops if graph.ops[n].kind is OpKind.WEIGHT_GRAD]
        others = {
            n for n in upstream(graph, own)
            if graph.ops[n].kind is OpKind.WEIGHT_GRAD and graph.ops[n].layer != layer.index
        }  # fmt: skip
        assert not others


def check_shared_ops_are_output_gradients(graph: TrainingGraph) -> None:
    needed_by: dict[str, set[int]] = {}
    handed = handed_over(graph)
    for layer in graph.layers:
        for name in upstream(graph, handed[layer.index] | set(layer.weight_grad_ops)):
            needed_by.setdefault(name, set()).add(layer.index)
    for op in graph.ops.values():
        if op.kind in BACKWARD and op.type != "IdentityN":
            is_shared = len(needed_by[op.name]) > 1
            assert is_shared == (op.kind is OpKind.OUTPUT_GRAD), (op, needed_by[op.name])


def handed_over(graph: TrainingGraph) -> dict[int, set[str]]:
    """dO tensors that a layer's update uses directly, as its gradient."""
    out: dict[int, set[str]] = {layer.index: set() for layer in graph.layers}
    for op in graph.ops.values():
        if op.kind is OpKind.UPDATE and op.layer is not None:
            out[op.layer] |= {s for s, _ in op.inputs if graph.ops[s].kind is OpKind.OUTPUT_GRAD}
    return out


def check_heavy_ops(graph: TrainingGraph) -> None:
    heavy = [op for op in graph.ops.values() if op.type in HEAVY and op.kind is not OpKind.OTHER]
    assert heavy
    for op in heavy:
        if is_of_the_tape(op.name):
            assert op.kind in BACKWARD, op
        else:
            assert op.kind in (OpKind.FORWARD, OpKind.UPDATE), op


def is_of_the_tape(name: str) -> bool:
    """TensorFlow's tape names its ops; the classifier may not look at that, the tests may.

    The second name is that of gradients inside the body of a loop.
    """
    return "gradient_tape/" in name or "/gradients/" in name


def classified_share(graph: TrainingGraph, graph_def, known: KnownShapes, dead_ops: bool) -> float:
    """The share of the backward FLOP, as the tape names its ops, that is classified dO or dW.

    ``dead_ops``: the graph still has gradients that nobody reads, which do not count.  A product in a
    loop whose sizes the graph does not tell must be classified.
    """
    outputs = outputs_with_sizes(graph_def, known)
    work = analytic_ops(graph_def, _ANY_DEVICE, outputs).work
    total = classified = 0.0
    for op in graph.ops.values():
        if not is_of_the_tape(op.name) or (dead_ops and op.kind is OpKind.OTHER):
            continue
        if op.type in HEAVY and op.name not in work:
            assert op.kind in BACKWARD, op
        flop = work[op.name].flop if op.name in work else 0.0
        total += flop
        classified += flop if op.kind in BACKWARD else 0.0
    return classified / total


def check_fit(model, rewrites) -> TrainingGraph:
    """The graph as it came in ``fit`` and the one that was planned on; the latter's TrainingGraph."""
    graph_def, result = rewrites[0]
    for graph, nodes in (
        (classify_graph_def(graph_def), graph_def),
        (result.training_graph, result.graph_def),
    ):
        check(graph, len(model.trainable_variables))
        assert classified_share(graph, nodes, KnownShapes(batch_size=BATCH_SIZE), dead_ops=False) >= 0.99
    names = {name for layer in result.training_graph.layers for name in layer.variables}
    assert names == {
        keras_variables.path_of(variable).removesuffix(":0") for variable in model.trainable_variables
    }
    return result.training_graph


def leaf_names(graph: TrainingGraph) -> list[list[str]]:
    """Names of each layer's variables without their path, embeddings left out."""
    names = [sorted(v.rpartition("/")[2] for v in layer.variables) for layer in graph.layers]
    return sorted(group for group in names if group != ["embeddings"])


def counted(graph: TrainingGraph) -> str:
    """The variables of each layer, and of each kind in it how many ops there are of which type."""
    lines = [f"layer {layer.index}: {' '.join(map(_leaf, layer.variables))}" for layer in graph.layers]
    lines += [f"slots of {_leaf(v.name)}: {len(v.slots)}" for v in graph.variables]
    ops = [op for op in graph.ops.values() if op.type not in ("Const", "NoOp", "Placeholder", "Identity")]
    for kind, layer in sorted({(op.kind.value, -1 if op.layer is None else op.layer) for op in ops}):
        own = [op for op in ops if (op.kind.value, -1 if op.layer is None else op.layer) == (kind, layer)]
        types = sorted(Counter(op.type for op in own).items())
        title = kind if layer < 0 else f"{kind} {layer}"
        lines.append(f"{title}: {', '.join(f'{count} {type_}' for type_, count in types)}")
    mixed = sorted(graph.ops[name].type for name in graph.mixed)
    return "\n".join([*lines, f"mixed: {' '.join(mixed)}"]) + "\n"


def _leaf(name: str) -> str:
    return name.rpartition("/")[2]
