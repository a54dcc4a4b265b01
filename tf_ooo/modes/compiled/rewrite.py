"""Turns the GraphDef of a step into one with dW on side streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tensorflow.core.framework import node_def_pb2

from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.analysis.steps import split_steps
from grappler_passes.compat import graph_protos, shape_inference
from grappler_passes.compat.graph_protos import is_stateful, split_input
from grappler_passes.graph.dependencies import reached
from grappler_passes.graph.training_graph import OpKind, TrainingGraph
from grappler_passes.passes.base import Pass, PassPipeline, PassResult, Relaxation, copy_of, relaxed_by
from grappler_passes.passes.gates import GatesPass
from grappler_passes.passes.verify import VerifyPass
from tf_ooo.errors import GraphError
from tf_ooo.modes.compiled import barriers
from tf_ooo.modes.compiled.barriers import Barrier
from tf_ooo.modes.compiled.calls import Parts, StepToPlan, last_of_main, make_calls
from tf_ooo.modes.compiled.outline import Call, OutlinePass, VerifyStreamsPass
from tf_ooo.modes.compiled.regions import FlatStep, GraphDef, Port, Region, find_regions, is_pure, region_of
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.rewriting.lowering import task_ops
from tf_ooo.rewriting.result import RewriteResult

# Updates may ride on the side stream, as part of the call that computes their dW. A call has one result (XLA
# waits early for a call of several), so only ops that lead from dW to one tensor can ride: the new weight of
# plain gradient descent, the new velocity of momentum. Where a gradient has several readers (Adam's two
# moments, a global norm) the update stays on the main stream.

_ASSIGNMENTS = {"AssignSubVariableOp": "Sub", "AssignAddVariableOp": "AddV2"}
_FLOATS = frozenset({1, 2, 14, 19})  # DT_FLOAT, DT_DOUBLE, DT_BFLOAT16, DT_HALF
_ELEMENTWISE = frozenset(
    {"Mul", "Sub", "Add", "AddV2", "Neg", "RealDiv", "Square", "Sqrt", "Rsqrt", "Maximum", "Minimum", "Cast",
     "Identity", "Reshape", "Sign", "Abs"}
)  # fmt: skip


@dataclass(frozen=True)
class DeadEndsPass(Pass):
    """Drops ops that no result and no state needs, as they read gradients, too.  ``fetches``: the results."""

    fetches: Sequence[str]
    name: ClassVar[str] = "dead_ends"
    relaxes = frozenset({Relaxation.REPLACED_NODES})

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        """Drop them; inputs of the graph stay."""
        nodes = {node.name: node for node in graph_def.node}
        wanted = [split_input(text)[0] for text in self.fetches]
        wanted += [name for name, node in nodes.items() if is_stateful(node.op) or node.op == "Placeholder"]
        needed = reached(wanted, lambda name: [split_input(text)[0] for text in nodes[name].input])
        kept = graph_protos.with_nodes(graph_def, (nodes[name] for name in nodes if name in needed))
        dropped = frozenset(nodes.keys() - needed)
        return PassResult(kept, bool(dropped), replaced=dropped)


@dataclass(frozen=True)
class SingleAssignmentPass(Pass):
    """Turns ``variable -= x`` into ``variable = variable - x``: the same to XLA, bit for bit."""

    name: ClassVar[str] = "single_assignment"
    relaxes = frozenset(
        {Relaxation.NEW_NODES, Relaxation.REPLACED_NODES, Relaxation.OPS, Relaxation.SIDE_EFFECTS}
    )

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        split = copy_of(graph_def)
        chosen = [
            node for node in split.node if node.op in _ASSIGNMENTS and node.attr["dtype"].type in _FLOATS
        ]
        for node in chosen:
            _split(split, node)
        return PassResult(split, bool(chosen), replaced=frozenset(node.name for node in chosen))


def _split(graph_def: GraphDef, node: node_def_pb2.NodeDef) -> None:
    variable, delta, *control = list(node.input)
    name, operation = f"{node.name}/ooo_before", _ASSIGNMENTS[node.op]
    before = graph_def.node.add(name=name, op="ReadVariableOp", input=[variable, *control])
    after = graph_def.node.add(name=f"{node.name}/ooo_after", op=operation, input=[name, delta])
    for added, attribute in ((before, "dtype"), (after, "T")):
        added.attr[attribute].type = node.attr["dtype"].type
        added.device = node.device
    node.op = "AssignVariableOp"
    node.input[:] = [variable, after.name, *control]


def with_updates(step: FlatStep, graph: TrainingGraph, region: Region) -> Region:
    """Return the region with as much of the update as can ride along, possibly nothing."""
    if len(region.outputs) != 1:
        return region
    result, taken = region.outputs[0], set[str]()
    while (following := _only_reader(step, graph, result)) is not None:
        more = _early_part(step, graph, following, result)
        if more is None:
            break
        taken |= {following, *more}
        result = (following, 0)
    if not taken:
        return region
    inside = taken.union(region.ops)
    ops = tuple(name for name in graph.ops if name in inside)
    own = tuple(name for name in graph.ops if name in taken.union(region.own))
    with_update = region_of(step, ops, own)
    return with_update if with_update.outputs == (result,) else region


def _only_reader(step: FlatStep, graph: TrainingGraph, port: Port) -> str | None:
    """Return the update's only elementwise op that reads a tensor and keeps its shape, or None."""
    readers = set(step.readers_of(port))
    if len(readers) != 1 or port in step.fetches:
        return None
    (name,) = readers
    mine, theirs = step.info(port), step.info((name, 0))
    alike = mine is not None and theirs is not None and mine.shape == theirs.shape
    return name if alike and _may_ride(step, graph, name) else None


def _may_ride(step: FlatStep, graph: TrainingGraph, name: str) -> bool:
    op = graph.ops.get(name)
    known = op is not None and op.kind is OpKind.UPDATE and name in step.nodes
    return known and step.nodes[name].op in _ELEMENTWISE and is_pure(step, name)


def _early_part(step: FlatStep, graph: TrainingGraph, name: str, port: Port) -> set[str] | None:
    """Return other ops that ``name`` needs and nothing else does, or None if it waits for backward."""
    operands = [producer for producer, number in step.data_inputs(name) if (producer, number) != port]
    before = (graph.ops.get(name) for name in step.above(operands))
    if any(op is not None and op.kind in (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD) for op in before):
        return None
    taken: set[str] = set()
    while operands:
        producer = operands.pop()
        readers = {reader for reader, _ in step.readers[producer]}
        if producer not in taken and _may_ride(step, graph, producer) and not readers - taken - {name}:
            taken.add(producer)
            operands += [before for before, _ in step.data_inputs(producer)]
    return taken


Plan = Callable[[StepToPlan], Schedule]


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """Holds a step for XLA to compile, flat but for loops; ``result``: what rewriting it gave, if any.

    ``fetches`` are the tensors of its results, ``node:port``; ``variant`` distinguishes graphs of the same
    step with equal calls.
    """

    graph_def: GraphDef
    fetches: tuple[str, ...]
    calls: tuple[Call, ...] = ()
    variant: str = "stock"
    result: RewriteResult | None = None

    @property
    def key(self) -> Hashable:
        """Return a key that is equal for equal rewrites of one graph."""
        return self.variant, tuple((call.name, call.stream, call.waits_for) for call in self.calls)


def unchanged(graph_def: GraphDef, fetches: Sequence[str], dump_dir: Path | None = None) -> StepGraph:
    """Return the step as it was traced, flat."""
    functional, _ = graph_protos.flat_graphs(graph_def, _nodes_of(fetches))
    return StepGraph(graph_def=functional, fetches=tuple(fetches))


def rewrite_step(
    graph_def: GraphDef,
    fetches: Sequence[str],
    dump_dir: Path | None = None,
    *,
    plan: Plan,
    store: str = "cost",
    side_updates: bool = False,
) -> StepGraph:
    """Classify the step, ask ``plan`` which dW go where, and put these into calls on streams.

    Args:
        graph_def: the graph of the traced step, or of several unrolled in it.
        dump_dir: folder for the graph after every pass; passes before the plan write to ``prepared``.
        store: who reads stored activations, see ``barriers.activations_to_store``.
        side_updates: whether calls include as much of the updates as possible.

    Raises:
        GraphError: not a training step, or none of its dW can be moved; the message says why.
        PassError: a pass has changed more than it declares.
    """
    started = time.perf_counter()
    step, lowered = _prepared(graph_def, fetches, side_updates, dump_dir)
    graphs = split_steps(lowered) or [lowered]
    steps = [_parts(step, number, graph, fetches, side_updates) for number, graph in enumerate(graphs)]
    names = [[sorted(layer.variables) for layer in parts.graph.layers] for parts in steps]
    if any(own != names[0] for own in names):
        raise GraphError("the steps of the unrolled graph do not have the same layers")
    schedule = plan(StepToPlan(step, steps[0], graphs[0]))
    calls, added, passes, ports = _passes_for(step, steps, schedule, store)
    rewritten = PassPipeline(passes, dump_dir)(step.graph_def).graph_def
    return StepGraph(
        graph_def=rewritten,
        fetches=tuple("{}:{}".format(*ports[port]) for port in step.fetches),
        calls=tuple(calls),
        variant=f"{store}, updates aside" if side_updates else store,
        result=RewriteResult(
            training_graph=steps[-1].graph,
            schedule=schedule,
            graph_def=rewritten,
            moved_ops=sum(len(call.region.ops) for call in calls),
            added_edges=len(added),
            plan_seconds=time.perf_counter() - started,
            mixed=steps[-1].graph.mixed,
            notes=_notes(steps[-1], calls, len(added)),
        ),
    )


def _notes(parts: Parts, calls: Sequence[Call], added: int) -> tuple[str, ...]:
    streams = len({call.stream for call in calls})
    stays = (f"{layer}: dW stays on the main stream: {reason}" for layer, reason in parts.stays.items())
    return f"{len(calls)} calls on {streams} side streams, {added} barriers", *stays


def _nodes_of(fetches: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(text.partition(":")[0] for text in fetches))


def _prepared(
    graph_def: GraphDef, fetches: Sequence[str], side_updates: bool, dump_dir: Path | None
) -> tuple[FlatStep, GraphDef]:
    """Return the step with loops as single ops, and the graph with loops lowered."""
    functional, lowered = graph_protos.flat_graphs(graph_def, _nodes_of(fetches))
    aside: list[Pass] = [DeadEndsPass(fetches), SingleAssignmentPass()] if side_updates else []
    functional = _checked(functional, [GatesPass(), *aside], dump_dir and dump_dir / "prepared")
    if side_updates:
        lowered = _checked(lowered, [SingleAssignmentPass()])
    return FlatStep(functional, shape_inference.infer_some_outputs(functional), fetches), lowered


def _checked(graph_def: GraphDef, passes: Sequence[Pass], dump_dir: Path | None = None) -> GraphDef:
    check = VerifyPass(graph_def, frozenset(), relaxed_by(*passes))
    return PassPipeline([*passes, check], dump_dir)(graph_def).graph_def


def _parts(
    step: FlatStep, number: int, graph_def: GraphDef, fetches: Sequence[str], side_updates: bool
) -> Parts:
    graph = classify_graph_def(graph_def, _nodes_of(fetches))
    tasks = task_ops(graph)
    regions: dict[int, list[Region]] = {}
    stays: dict[str, str] = {}
    for layer in graph.layers:
        names = tasks.ops.get(Task("dW", layer.index), ())
        of_layer = find_regions(step, graph, names) if names else "it has no dW of its own"
        if isinstance(of_layer, str):
            stays[layer.name] = of_layer
        else:
            regions[layer.index] = [with_updates(step, graph, r) if side_updates else r for r in of_layer]
    if not regions:
        reasons = (
            "; ".join([*dict.fromkeys(stays.values())][:3]) or "there is no layer with a weight gradient"
        )
        raise GraphError(f"no weight gradient can run on a stream of its own: {reasons}")
    return Parts(number, graph, tasks, regions, stays)


def _passes_for(
    step: FlatStep, steps: Sequence[Parts], schedule: Schedule, store: str
) -> tuple[list[Call], list[Barrier], list[Pass], dict[Port, Port]]:
    """Make the passes that put side lanes' dW into calls ordered by barriers; map results to their places."""
    by_step = make_calls(step, steps, schedule)
    calls = [call for own in by_step for call in own]
    kinds = {name: op for parts in steps for name, op in parts.graph.ops.items()}
    stored = barriers.activations_to_store(step, kinds, calls, store)
    moved = {port: place for barrier in stored for port, place in barrier.behind.items()}
    moved |= {port: (call.name, number) for call in calls for number, port in enumerate(call.region.outputs)}
    holds, joins = barriers.holds_of(calls), list(_joins(step, steps, by_step, moved))
    passes = [
        barriers.StorePass(step, stored, {}),
        OutlinePass(step, calls, moved),
        barriers.HoldBackPass(step, holds, moved),
        barriers.JoinPass(step, joins, moved),
        ColocationsPass(),
    ]
    now = moved | {port: place for join in joins for port, place in join.behind.items()}
    ports = {port: now.get(port, port) for port in step.fetches}
    check = VerifyStreamsPass(step.graph_def, calls, ports, relaxed_by(*passes))
    return calls, [*holds, *joins], [*passes, check], ports


def _joins(
    step: FlatStep, steps: Sequence[Parts], by_step: Sequence[Sequence[Call]], moved: Mapping[Port, Port]
) -> Iterator[Barrier]:
    """Yield a join for each wave of each step's calls: a single one would wait for itself."""
    for parts, calls in zip(steps, by_step, strict=True):
        for wave in sorted({call.wave for call in calls}):
            name = f"ooo_join_{parts.number}" + (f"_{wave}" if wave else "")
            waited = [call for call in calls if call.wave == wave and not call.delayed]
            last = last_of_main(step, parts.graph, [call for call in calls if call.wave >= wave])
            if (join := barriers.join_of(step, name, waited, last, moved)) is not None:
                yield join


@dataclass(frozen=True)
class ColocationsPass(Pass):
    """Drops the colocations of nodes: XLA places nothing."""

    name: ClassVar[str] = "colocations"
    relaxes = frozenset({Relaxation.NOTES})

    def run(self, graph_def: GraphDef, training_graph: TrainingGraph | None) -> PassResult:
        free = copy_of(graph_def)
        placed = [node for node in free.node if node.attr.pop("_class", None) is not None]
        return PassResult(free, bool(placed))
