"""Finds ops with side effects and what these act on: a rewrite may not lose their order.

TensorFlow says which ops have state (``op_def.is_stateful``); the tables here are the exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations

from grappler_passes.compat import op_types
from grappler_passes.graph.contexts import SWITCHES
from grappler_passes.graph.dependencies import GraphIndex

# Registered as stateful so that they are not folded or shared, but they only name or hand on a value.
_HARMLESS = frozenset({"_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "VarHandleOp", "_VarHandlesOp"})
# Not registered as stateful, and yet seen outside.
_HARMFUL = frozenset({"Abort"})
# They read a variable (or its shape) and change nothing.
_READS = re.compile(r"ReadVariableOp|_ReadVariablesOp|ResourceGather(Nd)?|VarIsInitializedOp|VariableShape")
_HANDLE_COPIES = frozenset({"Identity", "Enter", "RefEnter", *SWITCHES, "NextIteration", "Merge"})
WORLD = ""


@lru_cache(maxsize=4096)
def has_side_effects(op_type: str) -> bool:
    """True for an op that reads or changes state, waits for another process, or is seen outside.

    Also for an op that is unknown, and for assignments to reference variables (TensorFlow 1).
    """
    if op_type in _HARMLESS:
        return False
    return op_type in _HARMFUL or op_types.is_stateful(op_type) or op_types.has_reference_inputs(op_type)


@lru_cache(maxsize=4096)
def only_reads(op_type: str) -> bool:
    """Return True for an op with side effects that changes nothing: two of them may run in any order."""
    return bool(_READS.fullmatch(op_type))


def states_of(index: GraphIndex, i: int) -> set[str]:
    """Return what the effect of node ``i`` is on: the names of the resources' sources, or WORLD."""
    inputs = index.data_preds[i]
    sources = [inputs[place][0] for place in op_types.resource_inputs(index.ops[i]) if place < len(inputs)]
    return {index.names[_source_of_handle(index, source)] for source in sources} or {WORLD}


def _source_of_handle(index: GraphIndex, source: int) -> int:
    while index.ops[source] in _HANDLE_COPIES and index.data_preds[source]:
        source = index.data_preds[source][0][0]
    return source


def conflicts(index: GraphIndex) -> Iterator[tuple[int, int]]:
    """Pairs (first, then) of ops on the same state, not both reads, whose order the graph fixes.

    These are the read-after-write, write-after-read and write-after-write hazards.
    """
    by_state: dict[str, list[int]] = {}
    for i in index.order:
        if has_side_effects(index.ops[i]):
            for state in states_of(index, i):
                by_state.setdefault(state, []).append(i)
    met: set[tuple[int, int]] = set()
    for members in by_state.values():
        for first, then in combinations(members, 2):
            if only_reads(index.ops[first]) and only_reads(index.ops[then]):
                continue
            if (first, then) not in met and index.implied(first, then):
                met.add((first, then))
                yield first, then
