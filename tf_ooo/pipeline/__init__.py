"""Pipeline parallel: a model cut into stages on several devices, of one process or of several hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_ooo.schedule import Task

__all__ = ["tasks_of"]


def tasks_of(graph_def: Any) -> dict[str, Task]:
    """The task of each op of a graph that a pipeline runs (``report.rewritten_graph``).

    Sums of gradients belong to the dW that they add, what comes once to the U that it serves.
    """
    from grappler_passes.steps import STEP_ATTR  # noqa: PLC0415 - a worker needs no graphs
    from tf_ooo.schedule import Task  # noqa: PLC0415

    found = {}
    for node in graph_def.node:
        if "_ooo_stage" in node.attr and STEP_ATTR in node.attr:
            kind = node.attr["_ooo_kind"].s.decode()
            microbatch = 0 if kind == "U" else int(node.attr[STEP_ATTR].i)
            found[node.name] = Task(kind, int(node.attr["_ooo_stage"].i), microbatch)
    return found
