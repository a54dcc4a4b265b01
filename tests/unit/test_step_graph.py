"""A step after passes that copied ops and rewired them: what was known of it stays, by name."""

from __future__ import annotations

from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import Layer, TrainingGraph
from grappler_passes.passes.repeat import RepeatPass, repeats
from tf_ooo.rewriting.step_graph import Known, StepGraph

EACH = "tf_ooo_step_each"
WHERE = {f"{EACH}/f": ("F", 0), f"{EACH}/d": ("dO", 0), "tf_ooo_step_once/u": ("U", 0)}


def step_of_two():
    """Each of two micro-batches has an op of F and one of dO that reads it; the update reads both."""
    graph = graph_pb2.GraphDef()
    graph.node.add(name="x", op="_Arg")
    for number in range(2):
        graph.node.add(name=f"tf_ooo_step_{number}/f", op="Tanh", input=["x"])
        graph.node.add(name=f"tf_ooo_step_{number}/d", op="Tanh", input=[f"tf_ooo_step_{number}/f"])
    graph.node.add(name="tf_ooo_step_2/u", op="AddV2", input=["tf_ooo_step_0/d", "tf_ooo_step_1/d"])
    index = GraphIndex(graph)
    known = Known(
        TrainingGraph({}, (Layer(0, ("v",)),), ()), graph, frozenset(WHERE), WHERE, {f"{EACH}/f": 8}
    )
    general = {"x": "x", "tf_ooo_step_2/u": "tf_ooo_step_once/u"}
    general |= {f"tf_ooo_step_{number}/{op}": f"{EACH}/{op}" for number in range(2) for op in "fd"}
    return StepGraph(graph, index, [None, 0, 0, 1, 1, 2], [0] * 6, 2, known, general)


def test_ops_that_run_again_are_of_the_backward_pass_of_their_micro_batch():
    step = step_of_two()
    repeated = RepeatPass(frozenset({"tf_ooo_step_1/f"}), frozenset({"tf_ooo_step_1/d"}))
    graph_def = repeated(step.graph_def).graph_def
    after = step.after(graph_def, repeats(graph_def))
    assert after.where == {**step.where, "tf_ooo_step_1/f/repeated": ("dO", 0, 1)}
    assert step.where == {
        "tf_ooo_step_0/f": ("F", 0, 0),
        "tf_ooo_step_0/d": ("dO", 0, 0),
        "tf_ooo_step_1/f": ("F", 0, 1),
        "tf_ooo_step_1/d": ("dO", 0, 1),
        "tf_ooo_step_2/u": ("U", 0, 1),
    }
    assert list(zip(after.index.names, after.steps, strict=True))[-1] == ("tf_ooo_step_1/f/repeated", 1)
    assert after.sizes == {**step.sizes, "tf_ooo_step_1/f/repeated": 8}
    copy = after.index.index["tf_ooo_step_1/f/repeated"]
    assert after.index.data_preds[after.index.index["tf_ooo_step_1/d"]] == [(copy, 0)]
