"""Finds the ops that run again where layers run their forward again before their dO."""

from __future__ import annotations

from collections.abc import Collection

from grappler_passes.graph.contexts import SWITCHES
from grappler_passes.graph.effects import has_side_effects
from tf_ooo.rewriting.step_graph import StepGraph

_NEVER = frozenset(
    {"Const", "_Arg", "_Retval", "VarHandleOp", "Merge", "Enter", "Exit", "NextIteration", *SWITCHES}
)
# Smaller tensors do not matter: shapes, seeds.
_LEAST_BYTES = 1024


def to_repeat(step: StepGraph, layers: Collection[int]) -> tuple[frozenset[str], frozenset[str]]:
    """(ops that run again, ops that read these), for the layers' dO and dW of each micro-batch.

    What a layer reads of others, its weights, and what has state (random numbers) is read as it was.
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
    waiting = list(again)
    while waiting:
        i = waiting.pop()
        above = {p for p, _ in index.data_preds[i] if forward.get(p) == forward[i]} - again
        again |= above
        waiting += above
    return frozenset(names[i] for i in again), frozenset(names[i] for i in readers)


def layers_that_cannot(step: StepGraph) -> frozenset[int]:
    """Return layers of loops, and those whose backward reads results that cannot be computed again."""
    index, sizes = step.index, step.sizes
    fixed = {layer for first, last in step.known.inseparable for layer in range(first, last + 1)}
    for name, (kind, layer, number) in step.where.items():
        if index.contexts[index.index[name]].frame:  # of a later loop of a layer
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
    """Return whether an op is in no loop and no branch."""
    context = step.index.contexts[i]
    return context.frame == () == context.output_frame and not context.branches
