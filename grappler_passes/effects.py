"""Which ops have side effects, and on what: the orders that a rewrite may not lose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations

from grappler_passes.dependencies import GraphIndex

# Ops whose effect is on the resource that their first input names.
_ON_RESOURCE = re.compile(
    r"(ReadVariableOp|Resource\w+|Assign\w*VariableOp|VarIsInitializedOp|DestroyResourceOp|VariableShape"
    r"|Iterator\w+|MultiDeviceIterator\w+|Lookup\w+|Queue\w+|TensorArray\w+V3|Stack\w+V2|Barrier\w+"
    r"|Write\w*Summary\w*|FlushSummaryWriter|Mutex\w+|\w*Summary(Scalar|Histogram|Image)\w*)"
)
_READS = re.compile(r"ReadVariableOp|ResourceGather(Nd)?|VarIsInitializedOp|VariableShape")
# Ops with an effect outside the graph or on hidden state: kept in order among themselves.
_ON_THE_WORLD = re.compile(
    r"(Assign\w*|Scatter\w+|Print\w*|Assert|Abort|(Eager)?PyFunc\w*|_?(Host)?(Send|Recv)|_\w*Recv\w*|_\w*Send\w*"
    r"|Collective\w+|Nccl\w+|Horovod\w+|Random(Uniform|StandardNormal|Gamma|Shuffle|UniformInt|Poisson)\w*"
    r"|Multinomial|TruncatedNormal|ParameterizedTruncatedNormal|WriteFile|Save\w*|Restore\w*|MergeV2Checkpoints"
    r"|Infeed\w+|Outfeed\w+|(Stateful)?PartitionedCall|StatefulPartitionedCall|XlaLaunch\w*|NcclAllReduce"
    r"|Barrier|While|If|Case|\w*Dataset\w*|OptionalGetValue|IteratorGetNext\w*)"
)
_COPIES = frozenset({"Identity", "Enter", "RefEnter", "Switch", "RefSwitch", "NextIteration"})
_STATELESS = frozenset({"PartitionedCall"})
WORLD = ""


@lru_cache(maxsize=4096)
def has_side_effects(op_type: str) -> bool:
    """True for an op that reads or changes state, waits for another process, or is seen outside."""
    if op_type in _STATELESS:
        return False
    return bool(_ON_RESOURCE.fullmatch(op_type) or _ON_THE_WORLD.fullmatch(op_type))


@lru_cache(maxsize=4096)
def only_reads(op_type: str) -> bool:
    """True for an op with side effects that changes nothing: two of them may run in any order."""
    return bool(_READS.fullmatch(op_type))


def state_of(index: GraphIndex, i: int) -> str:
    """What the effect of node ``i`` is on: the name of the resource's source, or WORLD."""
    if not _ON_RESOURCE.fullmatch(index.ops[i]) or not index.data_preds[i]:
        return WORLD
    source = index.data_preds[i][0][0]
    while (index.ops[source] in _COPIES or index.ops[source] == "Merge") and index.data_preds[source]:
        source = index.data_preds[source][0][0]
    return index.names[source]


def conflicts(index: GraphIndex) -> Iterator[tuple[int, int]]:
    """Pairs (first, then) of ops on the same state, not both reads, whose order the graph fixes.

    These are the read-after-write, write-after-read and write-after-write hazards.
    """
    by_state: dict[str, list[int]] = {}
    for i in index.order:
        if has_side_effects(index.ops[i]):
            by_state.setdefault(state_of(index, i), []).append(i)
    for members in by_state.values():
        for first, then in combinations(members, 2):
            if only_reads(index.ops[first]) and only_reads(index.ops[then]):
                continue
            if index.implied(first, then):
                yield first, then
