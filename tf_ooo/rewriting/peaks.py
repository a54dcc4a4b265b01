"""Predicted peaks of a step's orders: the one that is planned, and the one TensorFlow would choose."""

from __future__ import annotations

from collections.abc import Sequence

from grappler_passes.graph.liveness import peak_bytes_by_device, unknown_sizes
from grappler_passes.graph.sizes import KnownShapes, with_sizes
from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.errors import MemoryLimitError
from tf_ooo.rewriting.lowering import dependencies
from tf_ooo.rewriting.result import RewriteResult


def highest_peak(graph: TrainingGraph, order: Sequence[str]) -> int:
    """Return the highest peak of all devices: a limit holds for each of them."""
    return max(peak_bytes_by_device(graph, order).values(), default=0)


def require_sizes(graph: TrainingGraph, limit_bytes: int) -> None:
    """Raises MemoryLimitError unless all sizes are known."""
    if unknown := unknown_sizes(graph):
        raise MemoryLimitError(limit_bytes, None, unknown)


def stock_order(graph: TrainingGraph) -> list[str]:
    """The order in which TensorFlow's executor takes ops up, first ready, first run: not rustworkx's."""
    dag = dependencies(graph)
    waiting = [dag.in_degree(op) for op in dag.node_indices()]
    order = [op for op, count in enumerate(waiting) if not count]
    for op in order:  # grows while it is read: a queue
        for reader in sorted(dag.successor_indices(op)):
            waiting[reader] -= 1
            if not waiting[reader]:
                order.append(reader)
    return [dag[op] for op in order]


def stock_peak(graph: TrainingGraph, order: Sequence[str]) -> int:
    """Return the peak of the original order; ``graph`` has sizes, and lacks what was separated."""
    return highest_peak(graph, [name for name in order if name in graph.ops])


def check_memory(result: RewriteResult, known: KnownShapes, limit_bytes: int) -> int:
    """The peak of the stock order with inputs of these shapes; 0 where nothing was planned with a limit.

    Raises MemoryLimitError if what was planned goes over the limit with them.
    """
    if result.orders is None:
        return 0
    graph = with_sizes(result.training_graph, result.graph_def, known)
    require_sizes(graph, limit_bytes)
    peak = highest_peak(graph, result.orders.planned)
    if peak > limit_bytes:
        raise MemoryLimitError(limit_bytes, peak)
    return stock_peak(graph, result.orders.stock)
