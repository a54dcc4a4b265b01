"""Layers that are cut between their ops: parts follow the data, weights stay together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tf_ooo.rewriting.loops import LoopTask
from tf_ooo.rewriting.parts import LEAST_SHARE, WHOLE, divided, layer_of_part, least_share

F = OpKind.FORWARD


def op(name, kind_of_op, *inputs, size=4):
    return Op(name, kind_of_op, F, inputs=tuple((source, 0) for source in inputs), output_bytes=size)


def graph_of(ops, layers=("w",)):
    variables = tuple(Variable(f"{name}/kernel", f"{name}/handle") for name in layers)
    of_layers = tuple(Layer(i, (f"{name}/kernel",)) for i, name in enumerate(layers))
    return TrainingGraph({one.name: one for one in ops}, of_layers, variables)


def chain(frozen, tail, narrow=()):
    """So many products with frozen weights, one with a weight that trains, and so many ops behind it."""
    ops, last = [op("x", "_Arg"), op("w/handle", "_Arg"), op("w/read", "ReadVariableOp", "w/handle")], "x"
    for i in range(frozen):
        ops += [op(f"f{i}/handle", "_Arg"), op(f"f{i}/read", "ReadVariableOp", f"f{i}/handle", size=900)]
        ops.append(op(f"f{i}", "MatMul", last, f"f{i}/read", size=1 if i in narrow else 8))
        last = f"f{i}"
    ops += [op("w/cast", "Cast", "w/read"), op("product", "MatMul", last, "w/cast")]
    last = "product"
    for i in range(tail):
        ops.append(op(f"t{i}", "Tanh", last))
        last = f"t{i}"
    return graph_of(ops)


def seconds_of(graph, times=None):
    handles = {one for one in graph.ops if "/" in one}
    return {
        name: 0.0 if name in handles else (times or {}).get(name, 1.0) for name in graph.ops if name != "x"
    }


def loop_of(graph, first, last, inseparable=(0, 0)):
    """A forward loop of some of the ops, by place."""
    return LoopTask(tuple(graph.ops)[first : last + 1], "F", 0, inseparable)


def test_frozen_layers_before_the_weights_and_ops_behind_them():
    graph = chain(frozen=6, tail=5)
    divided_graph, forward = divided(graph, dict.fromkeys(graph.ops, 0), seconds_of(graph))
    names = [layer.name for layer in divided_graph.layers]
    assert names == [
        *(f"before w/kernel ({i})" for i in range(1, 7)),
        "w/kernel",
        *(f"behind w/kernel ({i})" for i in range(1, 6)),
    ]
    assert [layer.index for layer in divided_graph.layers] == list(range(12))
    assert [forward[f"f{i}"] for i in range(6)] == [0, 1, 2, 3, 4, 5]
    # A frozen weight is read where it is used; what trains is read where it is updated.
    assert [forward[f"f{i}/read"] for i in range(6)] == [0, 1, 2, 3, 4, 5]
    assert forward["w/read"] == forward["w/cast"] == forward["product"] == 6


def test_the_cut_is_where_least_is_sent():
    graph = chain(frozen=80, tail=0, narrow=(6,))
    _, forward = divided(graph, dict.fromkeys(graph.ops, 0), seconds_of(graph))
    ends = [i for i in range(79) if forward[f"f{i}"] != forward[f"f{i + 1}"]]
    # A part is at least 81 / 16 long, and half as much more where that sends less: here the first.
    assert ends[:3] == [6, 12, 18]


def test_layers_that_take_little_stay_whole():
    graph = chain(frozen=2, tail=2)
    times = {"product": 40.0}
    divided_graph, forward = divided(graph, dict.fromkeys(graph.ops, 0), seconds_of(graph, times))
    assert divided_graph is graph
    assert set(forward.values()) == {0}


def test_what_stands_between_two_uses_of_a_weight_stays():
    ops = [op("x", "_Arg"), op("w/handle", "_Arg"), op("w/read", "ReadVariableOp", "w/handle")]
    ops += [op("one", "MatMul", "x", "w/read"), op("mid0", "Tanh", "one"), op("mid1", "Tanh", "mid0")]
    ops += [op("two", "MatMul", "mid1", "w/read"), op("end0", "Tanh", "two"), op("end1", "Tanh", "end0")]
    graph = graph_of(ops)
    divided_graph, forward = divided(graph, dict.fromkeys(graph.ops, 0), seconds_of(graph))
    assert len({forward[name] for name in ("w/read", "one", "mid0", "mid1", "two")}) == 1
    assert [forward["end0"], forward["end1"]] == [1, 2]
    assert len(divided_graph.layers) == 3


def test_a_layer_with_a_loop_stays_whole():
    graph = chain(frozen=6, tail=5)
    divided_graph, _ = divided(graph, dict.fromkeys(graph.ops, 0), seconds_of(graph), [loop_of(graph, 2, 4)])
    assert divided_graph is graph


def test_a_layer_of_several_loops_is_cut_between_them():
    graph = chain(frozen=0, tail=12)
    names = list(graph.ops)
    loops = [loop_of(graph, 2, 4), loop_of(graph, 5, 7), loop_of(graph, 9, 10)]
    divided_graph, forward = divided(graph, dict.fromkeys(graph.ops, 0), seconds_of(graph), loops)
    assert [layer.name for layer in divided_graph.layers[1:]] == [
        f"later in {graph.layers[0].name} ({i})" for i in (1, 2)
    ]
    assert [bool(layer.variables) for layer in divided_graph.layers] == [True, False, False]
    assert [forward[name] for name in names] == [number >= 5 for number in range(9)] + [2] * (len(names) - 9)
    assert layer_of_part(divided_graph.layers[2].name) == graph.layers[0].name


def test_loops_that_read_other_weights_stay_whole():
    graph = chain(frozen=0, tail=12)
    graph = graph_of(graph.ops.values(), ("w", "v"))
    loops = [loop_of(graph, 2, 4), loop_of(graph, 5, 7, inseparable=(0, 1))]
    divided_graph, _ = divided(graph, dict.fromkeys(graph.ops, 0), seconds_of(graph), loops)
    assert divided_graph is graph


def test_more_devices_have_smaller_parts():
    shares = [least_share(devices) for devices in (1, 2, 4, 8, 16, 32, 1000)]
    assert shares == [1 / 16, 1 / 16, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    graph = chain(frozen=0, tail=63)
    for devices in (4, 8, 16):
        divided_graph, _ = divided(
            graph, dict.fromkeys(graph.ops, 0), seconds_of(graph), share=least_share(devices)
        )
        assert len(divided_graph.layers) == 4 * devices


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_parts_follow_the_data(data):
    """Random graphs of two layers: no op is in a part before one that it reads; parts are long enough."""
    count = data.draw(st.integers(2, 30))
    ops = [op("x", "_Arg")]
    for name in ("w", "v"):
        ops += [op(f"{name}/handle", "_Arg"), op(f"{name}/read", "ReadVariableOp", f"{name}/handle")]
    uses = {data.draw(st.integers(0, count - 1)): "w/read"}
    split = data.draw(st.integers(0, count))
    forward = {"w/read": 0, "v/read": 1}
    for i in range(count):
        earlier = ["x", *(f"n{j}" for j in range(i))]
        inputs = data.draw(st.lists(st.sampled_from(earlier), min_size=1, max_size=3, unique=True))
        inputs += [uses[i]] if i in uses else []
        inputs += ["v/read"] if i == split else []
        ops.append(op(f"n{i}", "AddN", *inputs, size=data.draw(st.integers(0, 9))))
        forward[f"n{i}"] = int(i >= split)
    graph = graph_of(ops, ("w", "v"))
    seconds = {f"n{i}": data.draw(st.integers(0, 5)) for i in range(count)}
    share = data.draw(st.sampled_from([LEAST_SHARE, least_share(8), least_share(64), 0.3, WHOLE]))
    divided_graph, numbered = divided(graph, forward, seconds, share=share)
    assert numbered.keys() == forward.keys()
    for name, layer in numbered.items():
        for producer, _ in graph.ops[name].inputs:
            assert numbered.get(producer, 0) <= layer or forward[producer] > forward[name]
    least_s = share * sum(seconds.values())
    parts = [layer for layer in divided_graph.layers if layer.label]
    for part in parts:
        assert sum(seconds.get(name, 0) for name, layer in numbered.items() if layer == part.index) >= least_s
    if share == WHOLE:
        assert not parts
    assert [layer.index for layer in divided_graph.layers] == list(range(len(divided_graph.layers)))
    assert [layer.variables for layer in divided_graph.layers if not layer.label] == [
        ("w/kernel",),
        ("v/kernel",),
    ]
