"""The training graph as plain data."""

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph


def graph_of(*layers):
    """Each layer has a dW op named after its first variable."""
    ops = {
        f"dW/{names[0]}": Op(f"dW/{names[0]}", "MatMul", OpKind.WEIGHT_GRAD, layer=n)
        for n, names in enumerate(layers)
    }
    rows = tuple(Layer(n, names, (f"dW/{names[0]}",)) for n, names in enumerate(layers))
    return TrainingGraph({"F": Op("F", "MatMul", OpKind.FORWARD), **ops}, rows, ())


def test_numbered_as():
    graph = graph_of(("a",), ("b", "c"), ("d",))
    other = graph.numbered_as([{"a"}, {"d"}, {"c", "b"}])
    assert [(layer.index, layer.variables) for layer in other.layers] == [
        (0, ("a",)),
        (1, ("d",)),
        (2, ("b", "c")),
    ]
    assert {name: op.layer for name, op in other.ops.items()} == {"F": None, "dW/a": 0, "dW/b": 2, "dW/d": 1}
    assert other.layers[2].weight_grad_ops == ("dW/b",)
    assert graph.numbered_as([{"a"}, {"b", "c"}, {"d"}]) == graph


def test_numbered_as_other_layers():
    graph = graph_of(("a",), ("b",))
    assert graph.numbered_as([{"a"}]) is None
    assert graph.numbered_as([{"a"}, {"c"}]) is None
    assert graph.numbered_as([{"a"}, {"b"}, {"c"}]) is None
