from __future__ import annotations

import pytest

from grappler_passes.errors import PlanError
from grappler_passes.graph.training_graph import (
    Op,
    OpKind,
    TrainingGraph,
    freed_after,
    last_uses,
    peak_bytes_by_device,
    unknown_sizes,
)
from tests.memory import memory_curve, peak_bytes


def graph(*rows):
    ops = {}
    for name, output_bytes, *rest in rows:
        inputs = tuple((p, 0) for p in (rest[0] if rest else ""))
        ops[name] = Op(
            name,
            rest[1] if len(rest) > 1 else "MatMul",
            OpKind.FORWARD,
            inputs=inputs,
            output_bytes=output_bytes,
        )
    return TrainingGraph(ops=ops, layers=(), variables=())


# Two layers: f1 -> f2 -> g (loss gradient); o2, o1 are dO; w2, w1 are dW; u2, u1 the updates.
STEP = graph(
    ("a", 10),
    ("f", 7, "a"),
    ("g", 3, "f"),
    ("o", 5, "g"),
    ("w", 20, "fg"),
    ("u", 0, "w"),
    ("v", 30, "ao"),
    ("x", 0, "v"),
)


def test_stock_order_by_hand():
    order = ["a", "f", "g", "w", "u", "o", "v", "x"]
    # a=10; +f 7; +g 3; +w 20 (f dies); u (w dies): g,a,w 33; o: a,g,o 18 (g dies); v: a,o,v 45; x: v 30
    assert memory_curve(STEP, order) == [10, 17, 20, 40, 33, 18, 45, 30]
    assert peak_bytes(STEP, order) == 45


def test_out_of_order_by_hand():
    order = ["a", "f", "g", "o", "w", "v", "u", "x"]
    # o: a,f,g,o 25; w: 45, then f and g die; v: a,o,w,v 65, then a and o die; u: w,v 50; x: v 30
    assert memory_curve(STEP, order) == [10, 17, 20, 25, 45, 65, 50, 30]
    assert peak_bytes(STEP, order, resident_bytes=100) == 165


def test_freed_after_lists_each_tensor_once():
    order = ["a", "f", "g", "o", "w", "v", "u", "x"]
    freed = freed_after(STEP, order)
    assert [sorted(names) for names in freed[:4]] == [[], [], [], []]
    assert [sorted(names) for names in freed[4:]] == [["f", "g"], ["a", "o"], ["u", "w"], ["v", "x"]]


def test_unread_outputs_die_at_once():
    assert memory_curve(graph(("a", 4), ("b", 9)), ["a", "b"]) == [4, 9]


def test_reads_outside_the_order_keep_a_tensor():
    assert memory_curve(STEP, ["a", "f", "g"]) == [10, 17, 20]
    assert last_uses(STEP, ["a", "f", "g"]) == {"a": 3, "f": 3, "g": 3}


def test_views_take_no_memory_and_keep_their_source():
    views = graph(("a", 10), ("b", 10, "a", "Reshape"), ("c", 6), ("d", 1, "b"))
    assert memory_curve(views, ["a", "b", "c", "d"]) == [10, 10, 10 + 0 + 6, 11]


def test_resident_and_unknown_sizes_count_as_nothing():
    ops = graph(("a", 8, "", "_Arg"), ("b", None, "a"), ("c", 2, "b"))
    assert memory_curve(ops, ["a", "b", "c"]) == [0, 0, 2]


def test_each_device_has_its_own_peak():
    ops = {
        "a": Op("a", "MatMul", OpKind.FORWARD, device="/CPU:0", output_bytes=10),
        "b": Op("b", "MatMul", OpKind.FORWARD, inputs=(("a", 0),), device="/CPU:1", output_bytes=3),
        "c": Op("c", "MatMul", OpKind.FORWARD, device="/CPU:1", output_bytes=4),
        "d": Op("d", "MatMul", OpKind.FORWARD, inputs=(("b", 0), ("c", 0)), device="/CPU:1", output_bytes=1),
    }
    step = TrainingGraph(ops=ops, layers=(), variables=())
    # CPU:0 holds a alone.  CPU:1: the copy of a 10; +b 3, then a goes; +c 4: 7; +d 1: 8
    assert peak_bytes_by_device(step, ["a", "b", "c", "d"]) == {"/CPU:0": 10, "/CPU:1": 13}
    # CPU:1: c 4; the copy of a 14; +b 17
    assert peak_bytes_by_device(step, ["c", "a", "b", "d"]) == {"/CPU:0": 10, "/CPU:1": 17}
    assert peak_bytes_by_device(step, []) == {}


def test_on_one_device_both_peaks_are_the_same():
    order = ["a", "f", "g", "o", "w", "v", "u", "x"]
    assert peak_bytes_by_device(STEP, order) == {"": peak_bytes(STEP, order)}


def test_unknown_sizes_are_those_that_take_memory():
    ops = graph(("a", None, "", "_Arg"), ("b", None, "a", "Reshape"), ("c", None, "b"), ("d", 4, "c"))
    assert unknown_sizes(ops) == ["c"]


def test_empty_order():
    assert peak_bytes(STEP, [], resident_bytes=12) == 12


@pytest.mark.parametrize("order", [["a", "a"], ["nobody"]])
def test_bad_orders_are_named(order):
    with pytest.raises(PlanError, match=order[-1]):
        memory_curve(STEP, order)
