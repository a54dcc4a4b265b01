"""The classifier's last steps one at a time: kinds, layers and reasons from facts made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf
from flows import flow_of
from graphs import graph_of, node

from grappler_passes.analysis import classify
from grappler_passes.analysis.classify import _can_inline, _no_weights_message, _results, flatten
from grappler_passes.compat import runtime
from grappler_passes.graph.training_graph import Op, OpKind

F, DO, DW, U, COMM, OTHER = (
    OpKind.FORWARD,
    OpKind.OUTPUT_GRAD,
    OpKind.WEIGHT_GRAD,
    OpKind.UPDATE,
    OpKind.COMMUNICATION,
    OpKind.OTHER,
)


# -- results ---------------------------------------------------------------------------------------


def test_results_are_what_the_caller_names():
    flow = flow_of("x _Arg:", "a Tanh: x", "b Tanh: a", "out _Retval: b")
    assert _results(flow, ["b:0", "gone", "a"]) == ([2, 1], True)
    assert _results(flow, []) == ([], True)


def test_results_are_what_the_graph_returns():
    assert _results(flow_of("x _Arg:", "a Tanh: x", "out _Retval: a"), None) == ([2], True)
    assert _results(flow_of("a Tanh:", "out _Retval: a", "b Tanh:"), None) == ([1], True)
    # A function that returns nothing.
    assert _results(flow_of("x _Arg:", "a Tanh: x"), None) == ([], True)


def test_else_results_are_what_nobody_reads():
    flow = flow_of(
        "x Placeholder:", "a Tanh: x", "b Tanh: x", "c Tanh: b", "write Assign: c", shapes={"write": ()}
    )
    assert _results(flow, None) == ([1], False)


def call(graph, name, function, xla=None):
    made = node(graph, name, "StatefulPartitionedCall")
    made.attr["f"].func.name = function
    if xla is not None:
        made.attr["_XlaMustCompile"].b = xla
    return made


def test_what_xla_compiles_whole_is_not_inlined():
    graph = graph_of("a A:")
    assert flatten(graph) is graph
    hidden = call(graph, "hidden", "inner", xla=True)
    assert not _can_inline(hidden)
    assert flatten(graph) is graph
    assert "hidden inside hidden (jit_compile=True)" in _no_weights_message(graph)
    plain, off = call(graph, "plain", "inner"), call(graph, "off", "inner", xla=False)
    assert _can_inline(plain)
    assert _can_inline(off)
    only = graph_of("a A:")
    call(only, "plain", "inner")
    assert _no_weights_message(only).startswith("not a training graph")
    assert _no_weights_message(graph_of("a A:")).startswith("not a training graph")


def test_what_is_fetched_is_kept_where_calls_are_inlined(monkeypatch):
    """And what nobody reads."""
    monkeypatch.setattr(classify.graph_protos, "inline_graph_def", lambda graph_def, keep: keep)
    graph = graph_of("a A:", "b A: a:1", "c A: ^a")
    call(graph, "call", "inner")
    assert flatten(graph) == ["b", "c", "call"]
    assert flatten(graph, ["a", "call"]) == ["a", "call", "b", "c", "call"]
    # One that cannot be inlined does not keep the others from it.
    call(graph, "hidden", "inner", xla=True)
    assert flatten(graph) == ["b", "c", "call", "hidden"]


def test_functions_without_bodies_stay():
    """Grappler hands such over; one that returns nothing has no more to it."""
    graph = graph_of("a A:")
    call(graph, "call", "inner")
    signature = graph.library.function.add().signature
    signature.name = "inner"
    signature.output_arg.add(name="out")
    assert flatten(graph) is graph


# -- kinds -----------------------------------------------------------------------------------------


def facts(**flags):
    """A backward pass of one node, which is what the flags say."""
    gradients = SimpleNamespace(
        handle_nodes={0} if flags.get("handle") else set(), forward=[flags.get("forward", 0)]
    )
    return SimpleNamespace(
        gradients=gradients,
        is_communication=lambda n: flags.get("talks", False),
        is_backward=[flags.get("backward", False)],
        serves_update=[flags.get("serves", False)],
    )


@pytest.mark.parametrize(
    ("flags", "needed", "update_layer", "kind", "layer", "reason"),
    [
        (
            {"handle": 1, "talks": True, "forward": 1, "backward": True},
            1,
            0,
            OTHER,
            None,
            "a handle, no work",
        ),
        ({"talks": True, "forward": 1, "backward": True}, 0b100, 0, COMM, 2, "communication"),
        ({"talks": True}, 0b1, 3, COMM, 0, "communication"),
        ({"talks": True}, 0b110, 1, COMM, 1, "communication"),
        ({"talks": True}, 0, 1, COMM, 1, "communication"),
        ({"talks": True}, 0, None, COMM, None, "communication"),
        (
            {"forward": 1, "backward": True, "serves": True},
            0b10,
            1,
            F,
            None,
            "no gradient is computed from it",
        ),
        ({"backward": True, "serves": True}, 0b10, 3, DW, 1, "a single layer's gradients need it"),
        ({"backward": True}, 0b1, None, DW, 0, "a single layer's gradients need it"),
        ({"backward": True}, 0b1011, 1, DO, None, "3 layers' gradients need it"),
        ({"backward": True}, 0, 1, DO, None, "0 layers' gradients need it"),
        ({"serves": True}, 0b10, 2, U, 2, "between a gradient and the write of a variable"),
        ({"serves": True}, 0b10, None, U, None, "between a gradient and the write of a variable"),
        ({}, 0b10, 2, OTHER, None, "no gradient and no update depends on it"),
    ],
)
def test_the_kind_of_an_op(flags, needed, update_layer, kind, layer, reason):
    answer = classify._kind(facts(**flags), 0, needed, update_layer)
    assert answer[:2] == (kind, layer)
    assert reason in answer[2]


def op(kind, layer=None):
    return Op("op", "Any", kind, layer=layer)


@pytest.mark.parametrize(
    ("producers", "kind", "layer"),
    [
        ([], OTHER, None),
        ([op(F), op(OTHER)], F, None),
        ([op(F), op(DO)], DO, None),
        ([op(DO), op(F)], DO, None),
        ([op(DW, 1)], DW, 1),
        ([op(DW, 1), op(DW, 1)], DW, 1),
        ([op(DW, 1), op(DW, 2)], U, None),
        ([op(DW, 1), op(DO)], U, None),
        ([op(U, 1), op(DW, 1)], U, 1),
        ([op(U, 1), op(U, 2)], U, None),
        ([op(U, 0), op(F)], U, None),
        ([op(COMM, 1)], COMM, 1),
        ([op(COMM, 1), op(F, 1)], F, 1),
        ([op(OTHER), op(COMM, 1)], COMM, None),
        ([op(DO), op(DO)], DO, None),
    ],
)
def test_a_gate_is_as_late_as_the_latest(producers, kind, layer):
    assert classify._kind_of_gate(producers)[:2] == (kind, layer)


def test_an_op_as_plain_data():
    flow = flow_of("x _Arg:", "y Tanh: x x:1")
    flow.control[1], flow.outputs[1], flow.devices[1] = [0], (), "/device:y"
    op = classify._op(flow, 1, DW, 3, "why")
    assert (op.name, op.type, op.kind, op.layer, op.reason) == ("y", "Tanh", DW, 3, "why")
    assert (op.inputs, op.control_inputs, op.device) == ((("x", 0), ("x", 1)), ("x",), "/device:y")


def test_layers_of_a_kind():
    ops = {"a": op(DW, 1), "b": op(DW, 3), "c": op(DW), "d": op(U, 2), "e": op(DW, 1)}
    assert classify._layers_of(ops, DW) == {1, 3}
    assert classify._layers_of(ops, U) == {2}


def test_the_layer_whose_update_an_op_serves():
    """Two weights of layer 1 and one of layer 0; the sinks' bits as they come back."""
    sinks = {0: [4], 1: [5, 6], 2: [6]}
    seen = []

    def upstream(seeds):
        seen.append(dict(seeds))
        return [0b1, 0b10, 0b11, 0b100, 0]

    gradients = SimpleNamespace(sinks=sinks.get, full=SimpleNamespace(upstream=upstream))
    backward = SimpleNamespace(gradients=gradients)
    assert classify._update_layers(backward, [[1], [0, 2]]) == [0, 1, None, 2, None]
    assert seen == [{4: 0b10, 5: 0b1, 6: 0b11}]


# -- ops that compute dO and dW together -----------------------------------------------------------


def fused(**changed):
    """Node 0 hands dO on by port 0, read by a dO op, and a gradient of layer 1 by port 1."""
    rows = changed.pop("rows", ("fused Grad:", "on Tanh: fused", "own Tanh: fused:1", "apply Apply: own"))
    flow = flow_of(*rows)
    size = len(flow)
    facts = {
        "is_backward": [True, True, True, False],
        "is_update": [False, False, False, True],
        "needed": [0b11, 0b11, 0b10, 0],
        "update_layer": [None, None, 1, 1],
        "from_data": [1] * size,
    } | changed
    backward = SimpleNamespace(
        size=size,
        flow=flow,
        is_backward=facts["is_backward"],
        is_update=facts["is_update"],
        gradients=SimpleNamespace(from_data=facts["from_data"]),
    )
    return classify._mixed(backward, facts["needed"], facts["update_layer"])


def test_an_op_that_computes_both():
    assert fused() == {0: 0b10}
    # It is one also where an update takes the gradient as it is.
    taken = ("fused Grad:", "on Tanh: fused", "apply Apply: fused:1", "apply2 Apply: on")
    updates = {"is_backward": [True, True, False, False], "is_update": [False, False, True, True]}
    assert fused(rows=taken, update_layer=[None, None, 2, None], **updates) == {0: 0b100}
    # All updates together belong to no layer.
    assert fused(rows=taken, update_layer=[None] * 4, **updates) == {}


def test_ops_that_do_not_compute_both():
    assert fused(needed=[0b10, 0b11, 0b10, 0]) == {}  # a dW op
    assert fused(is_backward=[False, True, True, False]) == {}
    assert fused(from_data=[0, 1, 1, 1]) == {}  # numbers only
    assert fused(needed=[0b11, 0b11, 0b11, 0]) == {}  # both ports serve both layers
    assert fused(needed=[0b11, 0b11, 0, 0]) == {}
    assert fused(needed=[0b11, 0b11, 0b110, 0]) == {}  # the other port serves two layers
    for through in ("Switch", "Merge"):
        rows = (f"fused {through}:", "on Tanh: fused", "own Tanh: fused:1", "apply Apply: own")
        assert fused(rows=rows) == {}
    one_port = ("fused Grad:", "on Tanh: fused", "own Tanh: fused", "apply Apply: own")
    assert fused(rows=one_port) == {}


def test_each_layer_that_a_port_serves_alone():
    """Three ports: one on, one of layer 0, one of layer 1; read by several ops of a layer."""
    rows = ("fused Grad:", "on Tanh: fused", "a Tanh: fused:1", "b Tanh: fused:2", "c Tanh: fused:2")
    many = {"is_backward": [True] * 5, "is_update": [False] * 5, "update_layer": [None] * 5}
    assert fused(rows=rows, needed=[0b11, 0b11, 0b01, 0b10, 0b10], **many) == {0: 0b11}
    assert fused(rows=rows, needed=[0b11, 0b11, 0b01, 0b10, 0b01], **many) == {0: 0b01}


def test_a_gradient_that_is_the_do_itself():
    """Node 1 is handed to the updates of weights 0 and 2; layer 2 has dW ops of its own."""
    handed = {0: 0, 1: 0b101, 2: 0b001}
    backward = SimpleNamespace(is_backward=[True, True, True], hands_over=handed.__getitem__)
    assert classify._handed_over(backward, [1, 0, 2], [0b11, 0b110, 0b010], 0b100) == {1: 0b010}
    assert classify._handed_over(backward, [1, 0, 2], [0b11, 0b110, 0b010], 0b110) == {}
    assert classify._handed_over(backward, [1, 0, 2], [0b11, 0b110, 0b011], 0) == {1: 0b110, 2: 0b010}
    backward.is_backward[1] = False
    assert classify._handed_over(backward, [1, 0, 2], [0b11, 0b110, 0b010], 0) == {}


def test_layers_with_a_dw_are_handed_nothing(monkeypatch):
    """Each of three layers in a row has one; so have those that an op computes together with its dO."""
    seen = []
    monkeypatch.setattr(classify, "_handed_over", lambda *given: seen.append(given[1::2]) or {})
    weights = [tf.Variable(tf.ones(shape), name=f"w{i}") for i, shape in enumerate([(3, 4), (4, 5), (5, 2)])]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    traced = runtime.graph_def_of(step.get_concrete_function(tf.TensorSpec((7, 3))))
    graph = classify.classify_graph_def(*traced)
    assert [layer.variables for layer in graph.layers] == [("w0",), ("w1",), ("w2",)]
    monkeypatch.setattr(classify, "_mixed", lambda *given: {0: 0b1001, 1: 0b100000})
    classify.classify_graph_def(*traced)
    assert seen == [([0, 1, 2], 0b111), ([0, 1, 2], 0b101111)]


# -- layers and what is said of variables ----------------------------------------------------------


def weight(name, handle=0, trainable=True, writes=(1,)):
    return SimpleNamespace(name=name, handle=handle, shape=(3,), trainable=trainable, writes=list(writes))


def test_layers_with_their_ops():
    weights = [weight("a"), weight("b"), weight("c")]
    flow = flow_of("g Grad:", "h Grad:")
    gradients = SimpleNamespace(weights=weights, flow=flow)
    ops = {
        name: Op(name, "Any", kind, layer=layer)
        for name, kind, layer in [
            ("w0", DW, 0), ("w1", DW, 1), ("v1", DW, 1), ("u1", U, 1), ("c0", COMM, 0),
            ("f", F, None), ("u", U, None),
        ]
    }  # fmt: skip
    layers = classify._layers(gradients, [[2, 0], [1]], ops, {0: 0b11, 1: 0b10})
    assert [(x.index, x.variables, x.weight_grad_ops, x.update_ops, x.communication_ops) for x in layers] == [
        (0, ("c", "a"), ("w0", "g"), (), ("c0",)),
        (1, ("b",), ("w1", "v1", "g", "h"), ("u1",), ()),
    ]


@pytest.mark.parametrize(
    ("variables", "beside", "label"),
    [
        ("net/a/k net/b/k", "net/c/k", "net/a + b"),
        ("net/a/k net/b/k", "network/c/k", ""),
        ("net/a/k net/a/b", "net/a/k", ""),  # its name has a place in the model
        ("net", "net/c", ""),
        ("net/k net/b", "net/c/k", "net/k + b"),
        ("net/a/k net/a/b net/b/k net/c/k", "net/f/k", "net/a + b + c"),
        ("net/a/k net/b/k net/c/k net/d/k net/e/k", "net/f/k", "net/a + b + c + 2 more"),
    ],
)
def test_a_layer_called_like_the_model_is_told_by_its_parts(variables, beside, label):
    names = [*variables.split(), beside]
    gradients = SimpleNamespace(weights=[weight(name) for name in names], flow=flow_of("g Grad:"))
    *own, other = range(len(names))
    assert [layer.label for layer in classify._layers(gradients, [own, [other]], {}, {})] == [label, ""]


def test_variables_with_their_slots():
    flow = flow_of("ha V:", "hb V:")
    gradients = SimpleNamespace(
        weights=[weight("a", 1), weight("b", 0)], flow=flow, slots={1: [weight("m"), weight("v")]}
    )
    trained = [(v.name, v.handle, v.shape, v.slots) for v in classify._variables(gradients)]
    assert trained == [("a", "hb", (3,), ()), ("b", "ha", (3,), ("m", "v"))]


def test_trainable_variables_without_a_gradient():
    variables = [
        weight("has"), weight("lacks"), weight("frozen", trainable=False), weight("read", writes=()),
        weight("bare"),
    ]  # fmt: skip
    layers = (
        SimpleNamespace(variables=("has",), weight_grad_ops=("w",)),
        SimpleNamespace(variables=("bare",), weight_grad_ops=()),
    )
    lacking = classify._without_gradient(SimpleNamespace(variables=variables), layers)
    assert list(lacking) == ["lacks", "bare"]
    assert "a trainable variable without a dW" in lacking["bare"]


def test_calls_that_hide_what_they_do():
    flow = flow_of("h V:", "x A:", "call StatefulPartitionedCall: x h", "f If: h", "t Tanh: h", "c While: x")
    ops = {name: Op(name, "Any", F if name == "f" else DW) for name in flow.names}
    hidden = classify._hidden_updates(SimpleNamespace(flow=flow, handle_nodes={0}), ops)
    assert list(hidden) == ["call"]
    assert hidden["call"].startswith("a call that cannot be inlined and uses h: ")


def test_why_an_op_is_mixed():
    assert "XLA compiles this call whole" in classify._mixed_reason("PartitionedCall")
    assert classify._mixed_reason("Anything") == "one op computes dO and dW together"
