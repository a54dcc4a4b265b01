"""Trains pipeline parallel: a model is cut into stages on devices of one process or of several hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_ooo.planning.model.schedule import Task

__all__ = ["tasks_of"]


def tasks_of(graph_def: Any, replicas: int = 1) -> dict[str, Task]:
    """Return the task of each op of a graph that a pipeline runs (``report.rewritten_graph``).

    Sums of gradients belong to the dW that they add; ops that run once belong to the U that they serve. With
    several ``replicas`` the first one's tasks are returned.  A later turn's micro-batches are numbered on.
    """
    from grappler_passes.analysis.steps import steps_of, turns_of  # noqa: PLC0415 - a worker needs no graphs
    from grappler_passes.graph.dependencies import GraphIndex  # noqa: PLC0415
    from tf_ooo.planning.model.schedule import Task  # noqa: PLC0415
    from tf_ooo.planning.model.task import replica_of_part  # noqa: PLC0415

    tasks = {}
    # By name where a graph optimizer dropped the mark, as from a product that it merged with an addition.
    index = GraphIndex(graph_def)
    steps = steps_of(graph_def, index)
    once = max((step for step in steps if step is not None), default=0)
    first = replica_of_part(once, replicas).count(0)
    turns, last_turn = turns_of(graph_def, index, steps, once), 0
    for node, step, turn in zip(graph_def.node, steps, turns, strict=True):
        if "_ooo_stage" in node.attr and step is not None and (step < first or step == once):
            kind, stage = node.attr["_ooo_kind"].s.decode(), int(node.attr["_ooo_stage"].i)
            last_turn = max(last_turn, turn if kind == "U" else 0)
            # A sum of an Embedding's rows over all micro-batches is a dW that comes once.
            kind, number = ("U", 0) if kind == "U" or step == once else (kind, step)
            tasks[node.name] = Task(kind, stage, turn * first + number)
    # Behind the last update there are logs, which are no turn.
    return {name: task for name, task in tasks.items() if task.microbatch < (last_turn + 1) * first}
