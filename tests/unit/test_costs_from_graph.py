"""Layer costs of hand-made graphs, by hand, with unequal numbers."""

import dataclasses
import math

import pytest

from grappler_passes.graph.training_graph import (
    Layer,
    Op,
    OpKind,
    TrainingGraph,
    Variable,
    forward_layers,
    layers_of_weights_and_readers,
)
from tf_ooo.costs.from_graph import graph_costs
from tf_ooo.costs.keras_model import _left_out
from tf_ooo.errors import CostError
from tf_ooo.rewriting.lowering import tasks_of_ops

F, DO, DW, U, OTHER = (OpKind.FORWARD, OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.UPDATE, OpKind.OTHER)


def _layers(graph, seconds):
    return graph_costs(graph, seconds).layers


def op(name, kind, *inputs, type="Mul", layer=None, size=None):
    return Op(name, type, kind, layer=layer, inputs=tuple((i, 0) for i in inputs), output_bytes=size)


def two_layers(*more):
    """x -> mm0 -> relu0 -> (view) -> mm1 -> loss, backward, a mask that is read by relu0."""
    ops = [
        op("x", OTHER, type="_Arg", size=1000),
        op("h0", OTHER, type="_Arg"),
        op("h1", OTHER, type="_Arg"),
        op("r0", F, "h0", type="ReadVariableOp", size=40),
        op("r1", F, "h1", type="ReadVariableOp", size=60),
        op("c", F, type="Const", size=4),
        op("mask", F, "c", size=7),
        op("mm0", F, "x", "r0", type="MatMul", size=100),
        op("relu0", F, "mm0", "mask", type="Relu", size=110),
        op("view", F, "relu0", type="Reshape", size=110),
        op("mm1", F, "view", "r1", type="MatMul", size=20),
        op("loss", F, "mm1", size=4),
        op("metric", F, "x", size=4),
        op("g1", DO, "mm1", size=21),
        op("w1", DW, "view", "g1", type="MatMul", layer=1, size=60),
        op("g0", DO, "g1", "r1", size=111),
        op("gr0", DO, "g0", "relu0", size=112),
        op("w0", DW, "x", "gr0", type="MatMul", layer=0, size=40),
        op("norm", U, "w0", "w1", size=4),
        op("u0", U, "h0", "w0", "norm", type="AssignSubVariableOp", layer=0),
        op("u1", U, "h1", "w1", "norm", type="AssignSubVariableOp", layer=1),
        op("lr", OTHER, "c", size=4),
        *more,
    ]
    return TrainingGraph(
        {o.name: o for o in ops},
        (Layer(0, ("k0",), ("w0",), ("u0",)), Layer(1, ("k1",), ("w1",), ("u1",))),
        (Variable("k0", "h0", (10,), ("m0",)), Variable("k1", "h1", (15,))),
    )


def powers(graph):
    """Seconds that are told from every sum: powers of two."""
    return {name: 2.0**i for i, name in enumerate(graph.ops)}


def test_forward_ops_count_for_the_highest_layer_they_depend_on():
    layers = forward_layers(two_layers())
    first = {name for name, layer in layers.items() if layer == 0}
    assert first == {"r0", "mm0", "relu0", "view", "mask", "c"}
    assert {name for name, layer in layers.items() if layer == 1} == {"r1", "mm1", "loss", "metric"}
    assert "metric" not in layers_of_weights_and_readers(two_layers())


def test_counts_of_kinds():
    assert two_layers().counts() == {"F": 10, "dO": 3, "dW": 2, "U": 3, "comm": 0, "other": 4}


def test_tasks_of_ops_leave_out_constants_and_what_the_backward_pass_does_not_need():
    graph = two_layers()
    added = dataclasses.replace(graph.ops["view"], type="Add")
    tasks = tasks_of_ops(dataclasses.replace(graph, ops={**graph.ops, "view": added}))
    of_tasks = {}
    for name, task in tasks.items():
        of_tasks.setdefault(str(task), set()).add(name)
    assert of_tasks == {
        "F:0": {"r0", "mm0", "relu0", "mask", "view"}, "F:1": {"r1", "mm1"}, "dO:1": {"g1"},
        "dO:0": {"g0", "gr0"}, "dW:0": {"w0"}, "dW:1": {"w1"}, "U:0": {"u0"}, "U:1": {"u1"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("told", "first"),
    [
        # A loop is in the layer of its highest op, and so is what reads it.
        ({"together": [("mask", "mm1", "g1")]}, {"r0", "mm0"}),
        ({"together": [("r0", "mm0"), ("metric", "c")]}, {"r0", "mm0", "relu0", "view", "mask", "c"}),
        ({"joins": {"view": 1}}, {"r0", "mm0", "relu0", "mask", "c"}),
        ({"joins": {"view": 0, "mask": 1}}, {"r0", "mm0"}),
    ],
)
def test_loops_and_joins_raise_what_depends_on_them(told, first):
    layers = forward_layers(two_layers(), **told)
    assert {name for name, layer in layers.items() if layer == 0} == first
    assert set(layers.values()) == {0, 1}


@pytest.mark.parametrize(
    ("variables", "label", "name"),
    [
        (("conv1/kernel", "conv1/bias"), "", "conv1"),
        (("net/conv1/kernel", "net/conv1/bias", "net/conv1/more/gain"), "", "net/conv1"),
        (("net/conv1/kernel",), "", "net/conv1/kernel"),
        (("a/kernel", "b/kernel"), "", "a/kernel, b/kernel"),
        (("a/kernel", "a/bias"), "shared", "shared"),
    ],
)
def test_a_layer_is_called_what_its_variables_have_in_common(variables, label, name):
    assert Layer(0, variables, label=label).name == name


def test_seconds_by_hand():
    graph = two_layers()
    s = powers(graph)
    first, second = _layers(graph, s)
    assert first.forward_s == sum(s[name] for name in ("r0", "mm0", "relu0", "view", "mask", "c"))
    assert second.forward_s == s["r1"] + s["mm1"] + s["loss"] + s["metric"]
    assert second.output_grad_s == s["g1"]
    assert first.output_grad_s == s["g0"] + s["gr0"]
    assert (first.weight_grad_s, second.weight_grad_s) == (s["w0"], s["w1"])
    assert (first.update_s, second.update_s) == (s["u0"], s["u1"])


def test_nothing_is_lost_and_nothing_counts_twice():
    graph = two_layers()
    s = powers(graph)
    costs = graph_costs(graph, s)
    in_layers = sum(c.forward_s + c.output_grad_s + c.weight_grad_s + c.update_s for c in costs.layers)
    assert costs.left_out_s["U"] == s["norm"]
    assert in_layers + sum(costs.left_out_s.values()) == sum(s.values())
    assert set(costs.left_out_s) == {"U", "other"}


def test_bytes_by_hand():
    first, second = graph_costs(two_layers(), powers(two_layers())).layers
    # relu0 is read by dW of layer 1, through a view: there it counts; mm1 by dO of layer 1.
    assert second.activation_bytes == max(110 + 20, 110 + 21) == 131
    assert second.weight_grad_bytes == 110 + 21
    # Layer 0 keeps only x, which is there anyway, and dW reads the gradient.
    assert first.activation_bytes == first.weight_grad_bytes == 112
    assert (first.output_bytes, second.output_bytes) == (110, 0)
    assert (first.weight_bytes, first.slot_bytes) == (40, 40)
    assert (second.weight_bytes, second.slot_bytes) == (60, 0)
    assert (first.inputs, second.inputs) == ((), (0,))


def test_skip_connection_is_an_input():
    graph = two_layers()
    ops = dict(graph.ops)
    ops["h2"] = op("h2", OTHER, type="_Arg")
    ops["r2"] = op("r2", F, "h2", type="ReadVariableOp", size=8)
    ops["mm2"] = op("mm2", F, "mm1", "r2", "mm0", size=30)
    ops["w2"] = op("w2", DW, "mm2", layer=2, size=8)
    graph = TrainingGraph(
        ops, (*graph.layers, Layer(2, ("k2",), ("w2",))), (*graph.variables, Variable("k2", "h2", (2,)))
    )
    costs = _layers(graph, powers(graph))
    assert costs[2].inputs == (0, 1)
    assert costs[0].output_bytes == 110 + 100


def test_missing_op_is_named():
    graph = two_layers()
    seconds = powers(graph)
    del seconds["gr0"]
    with pytest.raises(CostError, match=r"op 'gr0' \(Mul\): its seconds are missing"):
        _layers(graph, seconds)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_seconds_are_named(bad):
    graph = two_layers()
    with pytest.raises(CostError, match="op 'w1'"):
        _layers(graph, powers(graph) | {"w1": bad})


def test_constants_and_ops_outside_layers_need_no_seconds():
    graph = two_layers()
    seconds = powers(graph)
    for name in ("c", "lr", "norm", "x"):
        del seconds[name]
    assert len(_layers(graph, seconds)) == 2


def test_unknown_sizes_are_noted():
    graph = two_layers()
    ops = dict(graph.ops)
    ops["mm1"] = op("mm1", F, "view", "r1", type="MatMul")
    ops["r1"] = op("r1", F, "h1", type="ResourceGather")
    costs = graph_costs(TrainingGraph(ops, graph.layers, graph.variables), powers(graph))
    assert any(note.endswith("of unknown size, taken as 0 bytes: forward pass of k1") for note in costs.notes)
    assert any("the size of variable 'k1' is not known: 4 bytes an element" in note for note in costs.notes)
    assert costs.layers[1].weight_bytes == 60


def test_parts_that_a_gradient_is_added_up_from():
    """The parts are as of an unrolled RNN; the sum of micro-batches, which reads one of them, has none."""
    parts = [op(f"part{n}", DW, "view", "g1", type="MatMul", layer=1, size=50 + n) for n in range(3)]
    added = op("added", DW, "part0", "part1", "part2", type="AddN", layer=1, size=60)
    summed = op("summed", DW, "added", "earlier", type="AddV2", layer=1, size=60)
    graph = two_layers(*parts, added, op("earlier", OTHER, type="_Arg", size=60), summed)
    names = ("w1", "part0", "part1", "part2", "added", "summed")
    second = dataclasses.replace(graph.layers[1], weight_grad_ops=names)
    graph = dataclasses.replace(graph, layers=(graph.layers[0], second))
    assert [layer.summand_bytes for layer in _layers(graph, powers(graph))] == [0, 50 + 51 + 52]


def test_what_no_layer_owns_is_one_note_in_words():
    assert _left_out({}) == []
    assert _left_out({"U": 1.5e-5, "other": 2e-5}) == [
        "not in the plan, as no layer owns it: 0.015 ms of updates that serve all layers, such as step "
        "counters; 0.02 ms of work beside training, such as metrics"
    ]
    assert all(_left_out({kind.value: 1.0}) for kind in OpKind)
