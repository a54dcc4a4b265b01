"""Occupancy of a hand-made graph's tasks, by hand."""

import pytest

from grappler_passes.graph.training_graph import Layer, Op, OpKind, TrainingGraph, Variable
from tf_ooo.costs.devices import DeviceModel, Work
from tf_ooo.costs.from_graph import with_occupancy
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import CostError

DEVICE = DeviceModel(flop_per_s=10, bytes_per_s=10, launch_s=1, parallel_width=4)
GRAPH = TrainingGraph(
    {
        op.name: op
        for op in (
            Op("h", "_Arg", OpKind.OTHER),
            Op("view", "Reshape", OpKind.FORWARD, inputs=(("h", 0),)),
            Op("f", "MatMul", OpKind.FORWARD, inputs=(("view", 0),)),
            Op("f2", "Relu", OpKind.FORWARD, inputs=(("f", 0),)),
            Op("w", "MatMul", OpKind.WEIGHT_GRAD, layer=0, inputs=(("f", 0),)),
        )
    },
    (Layer(0, ("k",), ("w",)),),
    (Variable("k", "h", (1,)),),
)
WORK = {
    "view": Work(pieces=1),
    "f": Work(flop=80, pieces=2),  # 8 s on a full device, 16 on half of it, 1 to launch
    "f2": Work(moved_bytes=20),  # 2 s, 1 to launch
    "w": Work(flop=30, pieces=1),  # 3 s, 12 on a quarter, 1 to launch
}


def test_by_hand():
    (layer,) = with_occupancy([LayerCosts(5, 6, 7)], GRAPH, WORK, DEVICE)
    assert layer.occupancy == (10 / 20, 1, 3 / 13)
    assert (layer.forward_s, layer.output_grad_s, layer.weight_grad_s) == (5, 6, 7)


def test_other_number_of_layers():
    with pytest.raises(CostError, match="2 layers have costs, the graph has 1"):
        with_occupancy([LayerCosts(1, 1, 1)] * 2, GRAPH, WORK, DEVICE)
