"""Seconds of all ops of a graph: measured where that was possible, else from shapes, and it is said which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grappler_passes.analysis.backward_tasks import backward_tasks
from grappler_passes.graph.iterations import has_loops, iterations_of_ops
from grappler_passes.graph.sizes import ITERATORS, KnownShapes, outputs_with_sizes
from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.costs.analytic import FREE_OPS, AnalyticOps, analytic_ops
from tf_ooo.costs.devices import DeviceModel, device
from tf_ooo.costs.from_graph import Tasks, forward_layers, graph_costs, places
from tf_ooo.costs.places import Places, counted
from tf_ooo.costs.profile import OpProfile
from tf_ooo.costs.table import CostTable

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

_NAMED = 5
# For the few ops that a profile does not show.
_FILL_IN = "cpu-core"


@dataclass(frozen=True)
class OpSeconds:
    """Seconds by node name, their ``source`` as in CostTable, and the share of ops that was measured."""

    seconds: Mapping[str, float]
    source: str
    measured_share: float
    notes: tuple[str, ...] = ()


def op_seconds(
    graph_def: graph_pb2.GraphDef,
    on: DeviceModel,
    profile: OpProfile | None = None,
    whose: Places | None = None,
) -> OpSeconds:
    """Measured seconds, else calculated ones: of an op in a loop those of all iterations, where it is known
    how often that runs.  What oneDNN merged after planning counts as not measured.

    ``whose``: what notes call ops; None: by their names.
    """
    whose = whose or Places({})
    analytic, times = _calculated(graph_def, on), iterations_of_ops(graph_def)
    calculated = {name: each_s * times.get(name, 1) for name, each_s in analytic.seconds.items()}
    measured = profile.seconds if profile else {}
    names = [node.name for node in graph_def.node]
    computing = [node.name for node in graph_def.node if node.op not in FREE_OPS]
    seconds = {n: measured[n] if n in measured else calculated.get(n) for n in names}
    filled = [n for n in computing if n not in measured and n in calculated]
    # Ops that wait for data take time of the data pipeline, not of the step.
    waiting = {node.name for node in graph_def.node if node.op in ITERATORS}
    unknown = [n for n in computing if n not in measured and n not in calculated]
    missing = [n for n in unknown if n not in waiting]
    share = sum(n in measured for n in computing) / len(computing) if computing else 1.0
    notes = []
    if profile and filled:
        total_s = sum(calculated[n] for n in filled)
        notes.append(
            f"{len(filled)} of {len(computing)} ops were not measured; their {total_s * 1e3:.3g} ms are "
            f"calculated for {on.name or 'the device given'}: {whose.listed(filled)}"
        )
    if missing:
        reasons = "; ".join(dict.fromkeys(whose.told(analytic.unknown[n]) for n in missing[:_NAMED]))
        more = " ..." if len(missing) > _NAMED else ""
        notes.append(f"{counted(len(missing), 'op')} counted as taking no time: {reasons}{more}")
    source = "analytic" if not profile else "mixed" if filled else "measured"
    return OpSeconds({n: s for n, s in seconds.items() if s is not None}, source, share, tuple(notes))


def _calculated(graph_def: graph_pb2.GraphDef, on: DeviceModel) -> AnalyticOps:
    """TensorFlow infers no shapes of what goes around a loop: there those are taken that go into it."""
    outputs = outputs_with_sizes(graph_def, KnownShapes()) if has_loops(graph_def) else None
    return analytic_ops(graph_def, on, outputs)


def step_costs(
    graph_def: graph_pb2.GraphDef,
    graph: TrainingGraph,
    profile: OpProfile | None,
    tasks: Tasks | None = None,
    forward: Mapping[str, int] | None = None,
    factor: float = 1.0,
    on: DeviceModel | None = None,
) -> CostTable:
    """The costs of a step's layers, and the seconds of its ops, times ``factor``.

    What is not measured is calculated for the device ``on``; None: for a core of a usual CPU.
    Ops that the profile does not show and that no formula knows count as 0, and a note names them:
    waiting for the next batch, ops that oneDNN has merged with another.
    """
    tasks = backward_tasks(graph).ops if tasks is None else tasks
    forward = forward_layers(graph) if forward is None else forward
    seconds = op_seconds(graph_def, on or device(_FILL_IN), profile, places(graph, tasks, forward))
    in_graph = {name: seconds.seconds.get(name, 0.0) * factor for name in graph.ops}
    costs = graph_costs(graph, in_graph, tasks, forward)
    notes = (*seconds.notes, *costs.notes)
    return CostTable(costs.layers, source=seconds.source, op_seconds=in_graph, notes=notes)
