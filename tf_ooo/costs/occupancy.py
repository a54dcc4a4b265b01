"""How much of a device the tasks of a graph keep busy: what a second stream could gain, calculated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from grappler_passes.analysis.backward_tasks import backward_tasks
from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.costs.devices import DeviceModel, Work
from tf_ooo.costs.from_graph import Tasks, forward_layers, ops_by_task
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import CostError


def with_occupancy(
    layers: Sequence[LayerCosts],
    graph: TrainingGraph,
    work: Mapping[str, Work],
    device: DeviceModel,
    tasks: Tasks | None = None,
) -> tuple[LayerCosts, ...]:
    """The layers with the shares of the device that their F, dO and dW keep busy; their seconds stay."""
    if len(layers) != len(graph.layers):
        raise CostError(f"{len(layers)} layers have costs, the graph has {len(graph.layers)}")
    by_task = ops_by_task(graph, backward_tasks(graph).ops if tasks is None else tasks, forward_layers(graph))

    def share(kind: str, index: int) -> float:
        kernels = [work[n] for n in by_task.get((kind, index), ()) if n in work]
        return device.occupancy(kernel for kernel in kernels if kernel.flop or kernel.moved_bytes)

    return tuple(
        replace(layer, occupancy=(share("F", index), share("dO", index), share("dW", index)))
        for index, layer in enumerate(layers)
    )
