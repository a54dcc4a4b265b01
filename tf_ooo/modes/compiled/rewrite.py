"""GraphDef of a step in, GraphDef with dW on side streams out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import split_steps
from grappler_passes.compat import flattening, shape_inference
from grappler_passes.graph.training_graph import TrainingGraph
from grappler_passes.passes.edit import GraphEditor
from grappler_passes.passes.gates import GatesPass
from tf_ooo.errors import GraphError
from tf_ooo.modes.compiled.barriers import hold_back, join, store_activations
from tf_ooo.modes.compiled.calls import Parts, StepToPlan, last_of_main, make_calls
from tf_ooo.modes.compiled.outline import Call, outline
from tf_ooo.modes.compiled.regions import FlatStep, Port, Region, find_regions
from tf_ooo.modes.compiled.updates import single_assignment, with_updates, without_dead_ends
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.rewriting.lowering import TaskOps, task_ops

Plan = Callable[[StepToPlan], Schedule]


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One step for XLA to compile.

    Attributes:
        graph_def: flat but for loops.
        fetches: the tensors of the results in it, ``node:port``.
        calls: the side streams' calls, in the schedule's order.
        variant: what else tells graphs of the same step apart.
    """

    graph_def: Any
    fetches: tuple[str, ...]
    calls: tuple[Call, ...] = ()
    variant: str = "stock"

    @property
    def key(self) -> Any:
        """Equal for rewrites of one graph that come to the same."""
        return self.variant, tuple((call.name, call.stream, call.waits_for) for call in self.calls)


@dataclass(frozen=True, kw_only=True)
class StreamRewrite(StepGraph):
    """What was done to one graph.

    Attributes:
        left: ``{layer name: why its dW stays on the main stream}``.
        barriers: how many were added.
    """

    training_graph: TrainingGraph
    schedule: Schedule
    left: Mapping[str, str]
    barriers: int
    plan_seconds: float = 0.0

    @property
    def moved_ops(self) -> int:
        """Ops that now run on a side stream."""
        return sum(len(call.region.ops) for call in self.calls)


def unchanged(graph_def: Any, fetches: Sequence[str]) -> StepGraph:
    """The step as it was traced, flat."""
    nodes = list(dict.fromkeys(text.partition(":")[0] for text in fetches))
    functional, _ = flattening.flat_graphs(graph_def, nodes)
    return StepGraph(graph_def=functional, fetches=tuple(fetches))


def rewrite_step(
    graph_def: Any, fetches: Sequence[str], plan: Plan, store: str = "cost", side_updates: bool = False
) -> StreamRewrite:
    """Classifies the step, asks ``plan`` which dW go where, and puts those into calls on streams.

    Args:
        graph_def: of the traced step, or of several unrolled in it; not changed.
        fetches: the tensors of its results, ``node:port``.
        plan: makes the schedule of one step.
        store: who reads stored activations, see ``barriers.store_activations``.
        side_updates: what can of the updates is part of the calls.

    Raises:
        GraphError: not a training step, or none of its dW can be moved; says why.
    """
    started = time.perf_counter()
    nodes = list(dict.fromkeys(text.partition(":")[0] for text in fetches))
    functional, lowered = flattening.flat_graphs(graph_def, nodes)
    functional = GatesPass()(functional).graph_def
    if side_updates:
        functional = single_assignment(without_dead_ends(functional, fetches))
        lowered = single_assignment(lowered)
    step = FlatStep(functional, shape_inference.infer_some_outputs(functional), fetches)
    graphs = split_steps(lowered) or [lowered]
    steps: list[Parts] = []
    left: dict[str, str] = {}
    for number, one in enumerate(graphs):
        graph = classify_graph_def(one, nodes)
        tasks = task_ops(graph)
        regions, left = regions_by_layer(step, graph, tasks)
        if side_updates:
            regions = {i: [with_updates(step, graph, r) for r in found] for i, found in regions.items()}
        if not regions:
            raise GraphError(f"no weight gradient can run on a stream of its own: {_shown(left)}")
        steps.append(Parts(number, graph, tasks, regions))
    _check_same(steps)
    schedule = plan(StepToPlan(step, steps[0], graphs[0]))
    made = apply_schedule(step, steps, schedule, store)
    variant = f"{store}, updates aside" if side_updates else store
    return replace(made, left=left, variant=variant, plan_seconds=time.perf_counter() - started)


def _check_same(steps: Sequence[Parts]) -> None:
    layers = [[sorted(layer.variables) for layer in parts.graph.layers] for parts in steps]
    if any(names != layers[0] for names in layers):
        raise GraphError("the steps of the unrolled graph do not have the same layers")


def regions_by_layer(
    step: FlatStep, graph: TrainingGraph, tasks: TaskOps
) -> tuple[dict[int, list[Region]], dict[str, str]]:
    """The regions of each layer that has any, and for the others the reason."""
    regions: dict[int, list[Region]] = {}
    left: dict[str, str] = {}
    for layer in graph.layers:
        names = tasks.ops.get(Task("dW", layer.index), ())
        found = find_regions(step, graph, names) if names else "it has no dW of its own"
        if isinstance(found, str):
            left[layer.name] = found
        else:
            regions[layer.index] = found
    return regions, left


def _shown(left: Mapping[str, str]) -> str:
    reasons = list(dict.fromkeys(left.values()))
    return "; ".join(reasons[:3]) or "there is no layer with a weight gradient"


def apply_schedule(step: FlatStep, steps: Sequence[Parts], schedule: Schedule, store: str) -> StreamRewrite:
    """The graph with the side lanes' dW in calls, ordered by barriers."""
    by_step = make_calls(step, steps, schedule)
    calls = [call for found in by_step for call in found]
    editor = GraphEditor(step.graph_def)
    kinds = {name: op for parts in steps for name, op in parts.graph.ops.items()}
    moved = store_activations(editor, step, kinds, calls, store)
    moved |= outline(editor, step, calls, moved)
    barriers = hold_back(editor, step, calls, moved)
    behind: dict[Port, Port] = {}
    for parts, found in zip(steps, by_step, strict=True):
        for wave in sorted({call.wave for call in found}):  # one join would wait for itself
            name = f"ooo_join_{parts.number}" + (f"_{wave}" if wave else "")
            waited = [call for call in found if call.wave == wave and not call.delayed]
            last = last_of_main(step, parts.graph, [call for call in found if call.wave >= wave])
            joined = join(editor, step, name, waited, moved, last)
            barriers += bool(joined)
            behind |= joined
    where = {**moved, **behind}
    fetches = tuple("{}:{}".format(*where.get(port, port)) for port in step.fetches)
    made = editor.finish()
    for node in made.node:
        node.attr.pop("_class", None)
    return StreamRewrite(
        graph_def=made,
        fetches=fetches,
        calls=tuple(calls),
        variant=store,
        training_graph=steps[-1].graph,
        schedule=schedule,
        left={},
        barriers=barriers,
    )
