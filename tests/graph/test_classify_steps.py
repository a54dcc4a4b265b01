"""Every op of some small steps: its kind and layer as written down, and as other definitions say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tensorflow as tf
from classification import check
from classified_steps import STEPS, traced

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.compat import runtime
from grappler_passes.graph.training_graph import OpKind

GOLDEN = Path(__file__).parents[1] / "golden" / "classified"
# Constants and reads say nothing that their readers do not.
_LEFT_OUT = ("Const", "NoOp", "_Arg", "Placeholder")
needs_this_tensorflow = pytest.mark.skipif(
    not tf.__version__.startswith("2.21."), reason="names of ops are not those of TensorFlow before 2.21"
)


@pytest.fixture(scope="module")
def classified():
    """The training graph of a step, by name; each is traced once."""
    graphs, kept = {}, []

    def of(name):
        if name not in graphs:
            concrete, function = traced(name)
            kept.append(function)
            graphs[name] = classify_graph_def(*runtime.graph_def_of(concrete))
        return graphs[name]

    return of


def as_text(graph):
    """Layers and slots, then each op by name: its kind, its layer where it has one, its type."""
    lines = [f"layer {layer.index}: {' '.join(layer.variables)}" for layer in graph.layers]
    lines += [f"slots of {v.name}: {' '.join(v.slots)}" for v in graph.variables if v.slots]
    for op in sorted(graph.ops.values(), key=lambda op: op.name):
        if op.type not in _LEFT_OUT:
            kind = op.kind.value if op.layer is None else f"{op.kind.value} {op.layer}"
            lines.append(f"{kind:7}{op.name} {op.type}")
    lines += [f"mixed {name}" for name in sorted(graph.mixed)]
    lines += [f"unclassified {name}" for name in sorted(graph.unclassified)]
    return "\n".join(lines) + "\n"


@needs_this_tensorflow
@pytest.mark.parametrize("name", STEPS)
def test_each_op_is_what_was_written_down(classified, name):
    text, file = as_text(classified(name)), GOLDEN / f"{name}.txt"
    if os.environ.get("TF_OOO_WRITE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text.splitlines() == file.read_text().splitlines()


# Nothing tells the last product of a loss that is not returned from dO: it depends on all weights, and
# changes the gradients of all.  The memory is trainable and has no gradient; a product is computed again.
@pytest.mark.parametrize("name", sorted(STEPS.keys() - {"nothing_returned", "carried_state", "recomputed"}))
def test_definitions_hold(classified, name):
    graph = classified(name)
    check(graph, len(graph.variables))
    # The loss is no gradient's, and each weight is written.
    assert {op.kind for op in graph.ops.values()} >= {OpKind.FORWARD, OpKind.WEIGHT_GRAD, OpKind.UPDATE}
