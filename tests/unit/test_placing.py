"""The device of each op of a small step, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tensorflow.core.framework import graph_pb2, types_pb2

from grappler_passes.graph.dependencies import GraphIndex
from tf_ooo.rewriting.placing import Homes, far_slices, one_pipeline, place

HOME, A, B, C, D = (f"/job:localhost/device:CPU:{number}" for number in range(5))
HOMES = one_pipeline([0, 1], [A, B])


def step_of(*rows, where, resources=()):
    """``"name Op: input input"``, all at home; ``where`` is the layer of ops that belong to one."""
    graph = graph_pb2.GraphDef()
    for row in rows:
        head, _, inputs = row.partition(":")
        name, op = head.split()
        node = graph.node.add(name=name, op=op, input=inputs.split(), device=HOME)
        if name in resources:
            node.attr["T"].type = types_pb2.DT_RESOURCE
    tasks = {name: ("F", layer, 0) for name, layer in where.items()}
    return SimpleNamespace(graph_def=graph, index=GraphIndex(graph), where=tasks, sums=frozenset())


BATCH = (
    "batch _Arg:", "rows Const:", "sizes Const:", "part Slice: batch rows sizes", "cast Cast: part",
    "first Tanh: cast", "second Tanh: first",
)  # fmt: skip


@pytest.mark.parametrize("op", ["Slice", "StridedSlice"])
def test_micro_batches_are_cut_off_where_the_batch_is(op):
    """Though the slice belongs to a layer elsewhere: the whole batch would be sent there."""
    rows = [row.replace("Slice", op) for row in BATCH]
    step = step_of(*rows, where={"part": 0, "first": 0, "second": 1})
    assert place(step, HOMES, {}) == {"part": HOME, "cast": HOME, "first": A, "second": B}


WORKER = "/job:worker/device:CPU:0"


@pytest.mark.parametrize(("device", "far"), [(A, []), (WORKER, ["part"])])
def test_slices_that_are_sent_to_another_process_are_in_no_order(device, far):
    step, homes = (
        step_of(*BATCH, where={"part": 0, "first": 0, "second": 1}),
        one_pipeline([0, 1], [device, B]),
    )
    placed = place(step, homes, {})
    left_out = far_slices(step, homes, placed, [0] * len(step.index))
    assert [step.index.names[i] for i in left_out] == far


def test_a_slice_of_something_else_is_where_its_layer_is():
    step = step_of("x _Arg:", "f Tanh: x", "c Const:", "cut Slice: f c c", where={"f": 0, "cut": 1})
    assert place(step, HOMES, {}) == {"f": A, "cut": B}


@pytest.mark.parametrize(
    ("sizes", "expected"), [({"small": 4, "large": 400}, B), ({"small": 401, "large": 400}, A)]
)
def test_what_belongs_to_no_layer_follows_the_largest_tensor_that_it_reads(sizes, expected):
    rows = ("x _Arg:", "small Tanh: x", "large Tanh: x", "both Pack: small large", "then Neg: both")
    placed = place(step_of(*rows, where={"small": 0, "large": 1}), HOMES, sizes)
    assert placed == {"small": A, "large": B, "both": expected, "then": expected}


def test_what_reads_nothing_is_where_it_is_read():
    step = step_of("n NoOp:", "z Zeros:", "f Add: z z", where={"f": 1})
    assert place(step, HOMES, {}) == {"z": B, "f": B}


def test_what_takes_a_variable_is_where_the_variable_is():
    rows = ("w _Arg:", "v Identity: w", "read ReadVariableOp: v", "f Tanh: read")
    step = step_of(*rows, where={"read": 1, "f": 1}, resources=("w", "v"))
    assert place(step, HOMES, {}) == {"v": HOME, "read": HOME, "f": B}


def test_each_replica_has_devices_of_its_own_and_what_comes_once_is_where_the_variable_is():
    """The second replica holds layer 0."""
    homes = Homes([0, 1], [[A, B], [C, D]], [1, 0])
    rows = ("x _Arg:", "f Tanh: x", "g Tanh: f", "u Tanh: f", "v Tanh: g")
    step = step_of(*rows, where={"f": 0, "g": 1, "u": 0, "v": 1})
    assert place(step, homes, {}, [None, 0, 1, None, None]) == {"f": A, "g": D, "u": C, "v": B}


def test_what_adds_up_the_gradients_of_replicas_stays_where_it_was_traced():
    step = step_of("x _Arg:", "f Tanh: x", "sum Add: f f", where={"f": 0})
    step.sums = frozenset({"sum"})
    assert place(step, Homes([0], [[A], [B]], [0]), {}, [None, 1, None]) == {"f": B, "sum": HOME}
