"""How many kernels the parts of a step launch, and what they would lose outside of CUDA graphs."""

from __future__ import annotations

from tf_ooo.costs.devices import GRAPH_LAUNCH_S, device
from tf_ooo.costs.from_graph import forward_layers, ops_by_task
from tf_ooo.modes.compiled.barriers import DEVICE
from tf_ooo.modes.compiled.calls import StepToPlan
from tf_ooo.modes.compiled.captured import CompiledModule
from tf_ooo.modes.compiled.regions import CONTRACTIONS, VIEWS
from tf_ooo.planning.building.capture import Capture


def capture_of(what: StepToPlan, stock: CompiledModule | None) -> Capture | None:
    """What the schedule's launches cost; None where nothing is captured anyway.

    Kernels are scaled to the number in ``stock``, what XLA made of the step in stock order, and the launch
    time to its share in CUDA graphs.  None: not known, all of it is taken to be captured.
    """
    kernels = kernels_by_task(what)
    share = 1.0
    if stock is not None:
        if not stock.launches or not stock.in_graphs:
            return None
        share = stock.share_in_graphs or 0.0
        counted = sum(kernels.values())
        scale = stock.launches / counted if counted else 1.0
        kernels = {task: count * scale for task, count in kernels.items()}
    movable = {f"dW:{layer}" for layer in what.movable}
    for task in [task for task in kernels if task.startswith("dW:") and task not in movable]:
        of_main = task.replace("dW", "dO")  # it stays there
        kernels[of_main] = kernels.get(of_main, 0.0) + kernels.pop(task)
    kernels = {task: count for task, count in kernels.items() if not task.startswith("U:")}
    return Capture(kernels, share * (device(DEVICE).launch_s - GRAPH_LAUNCH_S))


def kernels_by_task(what: StepToPlan) -> dict[str, float]:
    """``{"dO:3": 2.0}``: each matrix product or convolution is one, all else of a task together one more."""
    graph, tasks = what.parts.graph, what.parts.tasks
    by_task = ops_by_task(graph, tasks.by_layer, forward_layers(graph))
    kernels = {}
    for (kind, layer), names in by_task.items():
        types = [graph.ops[name].type for name in names if name in graph.ops]
        heavy = sum(op in CONTRACTIONS for op in types)
        light = any(op not in CONTRACTIONS and op not in VIEWS for op in types)
        kernels[f"{kind}:{layer}"] = float(heavy + light)
    return kernels
