"""Lists the passes that run over the graph of a step in each mode, in their order.

| | before the step is planned | to put it in its order |
|---|---|---|
| one device | separate | annotate, order, verify |
| data parallel | separate | annotate and order each step by itself; steps, verify |
| pipeline | plain sums, repeat, read once | placement, constants, joins, order, gather, annotate, verify |
| its evaluation | | placement, local constants, verify |

The result is verified against the original graph.  Plain sums, and ops that run again, are checked by their
own pass; so are the tasks that XLA compiles, after all others.  With a ``dump_dir`` all passes of a graph
write into it, numbered in the order in which they run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.dependencies import SWITCHES, has_side_effects, reached
from grappler_passes.passes.base import Pass, PassPipeline, PassResult, relaxed_by
from grappler_passes.passes.plain_sums import PlainSumsPass
from grappler_passes.passes.repeat import RepeatPass
from grappler_passes.passes.rewrite_plan import AnnotatePass, JoinsPass, OrderPass, PlacementPass, RewritePlan
from grappler_passes.passes.sending import GatherPass, LocalConstantsPass, ReadOncePass
from grappler_passes.passes.separate import SeparatePass
from grappler_passes.passes.steps import Additions, StepsPass
from grappler_passes.passes.verify import VerifyPass
from tf_ooo.rewriting.step_graph import StepGraph

_NEVER = frozenset(
    {"Const", "_Arg", "_Retval", "VarHandleOp", "Merge", "Enter", "Exit", "NextIteration", *SWITCHES}
)
# Smaller tensors (shapes, seeds) do not matter.
_LEAST_BYTES = 1024


def to_repeat(step: StepGraph, layers: Collection[int]) -> tuple[frozenset[str], frozenset[str]]:
    """Return (ops that run again, ops that read them) for the layers' dO and dW in each micro-batch.

    A layer's inputs from others, its weights, and what has state (random numbers) are read as they were.
    """
    index, names = step.index, step.index.names
    forward = {
        index.index[name]: (layer, number)
        for name, (kind, layer, number) in step.where.items()
        if kind == "F" and layer in layers and _may_repeat(step, name)
    }
    readers: set[int] = set()
    again: set[int] = set()
    for name, (kind, layer, number) in step.where.items():
        i = index.index[name]
        if kind not in ("dO", "dW") or layer not in layers or has_side_effects(index.ops[i]):
            continue
        read = [p for p, _ in index.data_preds[i] if forward.get(p) == (layer, number)]
        if read and _is_plain(step, i):
            readers.add(i)
            again.update(read)
    again = reached(again, lambda i: [p for p, _ in index.data_preds[i] if forward.get(p) == forward[i]])
    return frozenset(names[i] for i in again), frozenset(names[i] for i in readers)


def layers_that_cannot(step: StepGraph) -> frozenset[int]:
    """Return the layers with loops, and those whose backward pass reads results that cannot run again."""
    index, sizes = step.index, step.sizes
    fixed = {layer for first, last in step.known.inseparable for layer in range(first, last + 1)}
    for name, (kind, layer, number) in step.where.items():
        if index.contexts[index.index[name]].frame:  # it is in a later loop of a layer
            fixed.add(layer)
        if kind not in ("dO", "dW"):
            continue
        for producer, _ in index.data_preds[index.index[name]]:
            source = index.names[producer]
            of = step.where.get(source)
            large = sizes.get(source, 0) >= _LEAST_BYTES
            weight = index.ops[producer] in ("ReadVariableOp", "Const")
            if of == ("F", layer, number) and large and not weight and not _may_repeat(step, source):
                fixed.add(layer)
    return frozenset(fixed)


def _may_repeat(step: StepGraph, name: str) -> bool:
    i = step.index.index[name]
    op = step.index.ops[i]
    return op not in _NEVER and not has_side_effects(op) and _is_plain(step, i)


def _is_plain(step: StepGraph, i: int) -> bool:
    context = step.index.contexts[i]
    return context.frame == () == context.output_frame and not context.branches


Folder = str | os.PathLike[str] | None


def separating(dump_dir: Folder = None) -> PassPipeline:
    """Make the pass that takes apart ops which compute dO and dW; new nodes are in their step's scope."""
    return PassPipeline([SeparatePass()], dump_dir)


def separating_only(original: graph_pb2.GraphDef) -> PassPipeline:
    """Make the passes for steps that are measured in stock order."""
    return _verified([SeparatePass()], original)


def ordering(
    plan: RewritePlan, original: graph_pb2.GraphDef, separated: PassResult, dump_dir: Folder = None
) -> PassPipeline:
    """Make the passes that order a ``separated`` graph on one device."""
    return _verified([AnnotatePass(plan), OrderPass(plan)], original, dump_dir, separated)


def ordering_one_step(plan: RewritePlan, dump_dir: Folder = None) -> PassPipeline:
    """Make the passes that order the graph of one data-parallel step."""
    return PassPipeline([AnnotatePass(plan), OrderPass(plan)], dump_dir)


def ordering_steps(
    gained: Sequence[Additions], original: graph_pb2.GraphDef, separated: PassResult, dump_dir: Folder = None
) -> PassPipeline:
    """Make the passes that give the graph of all data-parallel steps what each step's has gained."""
    return _verified([StepsPass(gained)], original, dump_dir, separated)


def adding_up(dump_dir: Folder = None) -> PassPipeline:
    """Make the pass that restores sums which TensorFlow has taken apart, for a pipeline."""
    return PassPipeline([PlainSumsPass()], dump_dir)


def changing(step: StepGraph, repeated: Collection[int], dump_dir: Folder = None) -> PassPipeline:
    """Make the pass that reruns the forward of layers for their dO, in a pipeline; no pass without layers."""
    passes = [RepeatPass(*to_repeat(step, repeated))] if repeated else []
    return PassPipeline(passes, dump_dir, ran=1)


def sharing(stands_for: Mapping[str, str], ran: int, dump_dir: Folder = None) -> PassPipeline:
    """Make the pass that shares reads, after ``ran`` others; no pass if there is nothing to share."""
    return PassPipeline([ReadOncePass(stands_for)] if stands_for else [], dump_dir, ran)


def placing(
    plan: RewritePlan,
    available: Sequence[str],
    step: StepGraph,
    shared: PassResult,
    dump_dir: Folder = None,
    ran: int = 1,
    last: Sequence[Pass] = (),
) -> PassPipeline:
    """Make the passes that place a pipeline's step, ``shared`` its reads; ``available``: all devices.

    ``last`` are passes that check themselves.
    """
    placement = PlacementPass(plan, tuple(available))
    ordering = [JoinsPass(plan), OrderPass(plan), GatherPass(), AnnotatePass(plan)]
    passes: list[Pass] = [placement, LocalConstantsPass(), *ordering]
    check = VerifyPass(step.graph_def, shared.replaced, relaxed_by(ReadOncePass, *passes), step.index)
    return PassPipeline([*passes, check, *last], dump_dir, ran)


def placing_forward(
    plan: RewritePlan, available: Sequence[str], original: graph_pb2.GraphDef, dump_dir: Folder = None
) -> PassPipeline:
    """Make the passes that place a pipeline's graph for evaluating or predicting."""
    return _verified([PlacementPass(plan, tuple(available)), LocalConstantsPass()], original, dump_dir)


def _verified(
    passes: Sequence[Pass],
    original: graph_pb2.GraphDef,
    dump_dir: Folder = None,
    separated: PassResult | None = None,
) -> PassPipeline:
    """Add a check that nothing differs from ``original`` but what the passes and the separation declare."""
    before, replaced = ((), frozenset[str]()) if separated is None else ((SeparatePass,), separated.replaced)
    check = VerifyPass(original, replaced, relaxed_by(*before, *passes))
    return PassPipeline([*passes, check], dump_dir, ran=len(before))
