"""The device of each op of a small forward pass, worked out by hand."""

from __future__ import annotations

import pytest
from tensorflow.core.framework import graph_pb2, types_pb2

from tf_ooo.errors import GraphError
from tf_ooo.rewriting.forward import place_forward

HOME, A, B = (f"/job:localhost/device:CPU:{number}" for number in range(3))


def placed(*rows, sizes=None, frames=None, **variables):
    """``"name Op: input input"`` at home; ``variables``: arguments by their device, read as NAME."""
    graph = graph_pb2.GraphDef()
    for variable, device in variables.items():
        handle = graph.node.add(name=f"{variable}_handle", op="_Arg", device=device)
        handle.attr["T"].type = types_pb2.DT_RESOURCE
        graph.node.add(name=variable, op="ReadVariableOp", input=[handle.name], device=HOME)
    graph.node.add(name="x", op="_Arg", device=HOME).attr["T"].type = types_pb2.DT_FLOAT
    for row in rows:
        head, _, inputs = row.partition(":")
        name, op = head.split()
        node = graph.node.add(name=name, op=op, input=inputs.split(), device=HOME)
        if op == "Enter":
            node.attr["frame_name"].s = (frames or {}).get(name, "loop").encode()
    devices = place_forward(graph, sizes or {})
    return {name: device for name, device in devices.items() if name not in variables}


def test_what_reads_a_weight_is_where_it_is():
    """However large the activation, or smaller another weight; what follows stays there."""
    rows = (
        "first MatMul: x a",
        "act Relu: first",
        "second MatMul: act b",
        "bias Add: second c",
        "out Tanh: bias",
    )
    sizes = {"a": 400, "b": 300, "c": 20, "first": 9000, "act": 9000, "second": 9000, "bias": 9000}
    expected = {"first": A, "act": A, "second": B, "bias": A, "out": A}
    assert placed(*rows, sizes=sizes, a=A, b=B, c=A) == expected


def test_of_several_weights_the_largest_decides():
    rows = ("both FusedBatchNormV3: x a b",)
    assert placed(*rows, sizes={"a": 40, "b": 400}, a=A, b=B) == {"both": B}
    assert placed(*rows, sizes={"a": 400, "b": 40}, a=A, b=B) == {"both": A}


def test_what_is_computed_of_weights_alone_is_a_weight():
    """A tied table goes to nobody: the activation comes to it."""
    rows = ("h MatMul: x b", "p Const:", "t Transpose: a p", "c Cast: t", "out MatMul: h c")
    sizes = {"a": 400, "b": 300, "t": 400, "c": 200, "h": 9000}
    assert placed(*rows, sizes=sizes, a=A, b=B) == {"h": B, "t": A, "c": A, "out": A}


def test_scalars_are_sent():
    """A temperature, or the sum of a penalty."""
    rows = ("h MatMul: x b", "hot Mul: h a", "square Square: b", "sum Sum: square", "loss Add: hot sum")
    sizes = {"a": 4, "b": 400, "h": 100, "hot": 100, "square": 400, "sum": 4}
    assert placed(*rows, sizes=sizes, a=A, b=B) == dict.fromkeys(("h", "hot", "square", "sum", "loss"), B)


def test_what_reads_the_batch_alone_is_where_it_is_read():
    """But for what cuts it: the whole batch would be sent."""
    rows = (
        "n Const:",
        "cast Cast: x",
        "h MatMul: cast a",
        "part Slice: x n n",
        "neg Neg: part",
        "out Add: h neg",
    )
    expected = {"cast": A, "h": A, "part": HOME, "neg": HOME, "out": A}
    assert placed(*rows, sizes={"a": 400, "h": 50, "neg": 20}, a=A) == expected


LOOP = (
    "enter Enter: h", "weight Enter: a", "merge Merge: enter next", "n Const: ^merge", "less Less: merge n",
    "cond LoopCond: less", "switch Switch: merge cond", "body MatMul: switch:1 weight",
    "next NextIteration: body", "exit Exit: switch", "out Tanh: exit",
)  # fmt: skip


def test_a_loop_is_where_its_weights_are():
    devices = placed("h MatMul: x b", *LOOP, sizes={"a": 40, "b": 400, "h": 9000}, a=A, b=B)
    assert devices.pop("h") == B
    assert set(devices.values()) == {A}
    assert "n" not in devices


def test_a_loop_without_weights_is_where_the_largest_tensor_is_that_enters():
    rows = [row.replace("Enter: a", "Enter: small") for row in LOOP]
    sizes = {"a": 40, "b": 400, "h": 9000, "small": 30}
    devices = placed("h MatMul: x b", "small MatMul: x a", *rows, sizes=sizes, a=A, b=B)
    assert devices.pop("small") == A
    assert set(devices.values()) == {B}


def test_a_list_is_made_where_its_loop_is():
    rows = (
        "rows TensorListFromTensor: h",
        "s Const:",
        *LOOP,
        "items Enter: rows",
        "item TensorListGetItem: items merge",
    )
    devices = placed("h MatMul: x b", *rows, sizes={"a": 40, "b": 400, "h": 9000}, a=A, b=B)
    assert devices.pop("h") == B
    assert set(devices.values()) == {A}


def test_a_function_without_variables_is_left_alone():
    with pytest.raises(GraphError, match="reads no variable"):
        placed("h Tanh: x")
