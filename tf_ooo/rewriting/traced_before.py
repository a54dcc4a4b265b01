"""The step that was traced, optimized and taken apart, placed and run again: no second trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grappler_passes.compat import graph_protos
from tf_ooo.compat import func_graphs, nests
from tf_ooo.compat.graph_functions import OptimizedGraph
from tf_ooo.errors import GraphError
from tf_ooo.rewriting import passes
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.staged import StagedPlan, rewrite_taken
from tf_ooo.rewriting.unrolled_tasks import Step


@dataclass(frozen=True)
class TracedBefore:
    """A step as TensorFlow's optimizers left it on one device, and the function that was traced for it.

    ``signature``: of the batches that it takes.
    """

    step: Step
    concrete: Any
    signature: Any

    def placed(
        self, plan: StagedPlan, moved: Mapping[int, Any], dump_dir: passes.Folder = None
    ) -> tuple[Callable[[Any], Any], RewriteResult]:
        """Return a function of a batch that runs the step as planned, and what was rewritten.

        ``moved``: variables in the place of others, by the ``id`` of those' handles.  Raises GraphError where
        only another trace can tell, BackendError as :func:`tf_ooo.compat.func_graphs.captures_of`, PassError.
        """
        outside = [tensor for tensor, _ in func_graphs.captures_of(self.concrete)]
        captured = [moved[id(tensor)].handle if id(tensor) in moved else tensor for tensor in outside]
        devices = dict(enumerate(captured, len(self.concrete.graph.inputs) - len(captured)))
        graph_def = graph_protos.copy_of(self.step.graph_def)
        for node in graph_def.node:
            handle = devices.get(node.attr["index"].i) if node.op == "_Arg" else None
            if handle is not None and handle.dtype == "resource":
                node.device = handle.device
        result = rewrite_taken(dataclasses.replace(self.step, graph_def=graph_def), plan, dump_dir)
        try:
            function = OptimizedGraph(result.graph_def, self.concrete, captured)
        except ValueError as error:
            raise GraphError(f"the optimized graph is no whole function: {error}") from error
        results, batches = nests.Packed(self.concrete.graph.structured_outputs), nests.Packed
        return lambda batch: results.unpack(function(*batches(batch).tensors)), result
