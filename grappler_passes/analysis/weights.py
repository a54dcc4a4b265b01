"""Finds the variables that a step trains, and which others are an optimizer's slots of one of them.

A *weight* is written with a value that depends on data, and read on the way to a result of the step.  A
*slot* is written too, but all it ever changes is one weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from grappler_passes.graph.bits import memberships, several, union
from grappler_passes.graph.flow import Propagation
from grappler_passes.graph.values import ValueFlow
from grappler_passes.graph.variables import VariableAccess

Slots = dict[int, list[VariableAccess]]


def find_weights(values: ValueFlow, results: Sequence[int]) -> tuple[list[VariableAccess], Slots]:
    """Return the weights, and the slots by the number of their weight."""
    written = [v for v in values.variables if v.writes]
    fed = values.fed_by_data()
    no_memory = values.propagation(cut_memory_of={v.handle for v in values.variables})
    changes = _changes(written, values.propagation())
    ends = _ends(written, results, changes, fed)
    to_end = no_memory.upstream(ends)
    for variable in written:
        _set_preparations_aside(variable, fed, to_end)
    written_fed = [v for v in written if any(fed[w] for w in v.writes)]
    index = {v.handle: i for i, v in enumerate(written)}
    candidates = [
        v
        for v in written_fed
        if v.trainable is not False and any(to_end[r] & ~(2 << index[v.handle]) for r in v.first_reads)
    ]
    if not candidates:
        candidates = _not_dominated(written_fed, index, changes)
    weights = _without_state(values, candidates, ends)
    return weights, _find_slots(values, weights, written)


def _ends(
    written: Sequence[VariableAccess], results: Sequence[int], changes: list[int], fed: list[int]
) -> dict[int, int]:
    """Find where values leave the step: bit 0 for its results, bit i + 1 for ``written[i]`` that changes no
    other."""
    ends = dict.fromkeys(results, 1)
    for i, variable in enumerate(written):
        if changes[i] & ~(1 << i) == 0:
            for n in (write for write in variable.writes if fed[write]):
                ends[n] = ends.get(n, 0) | 2 << i
    return ends


def _set_preparations_aside(variable: VariableAccess, fed: list[int], to_end: list[int]) -> None:
    """Writes that no data change but the forward pass reads are forward (SpectralNormalization).

    So is one behind which all reads of a trainable variable come (tensorflow-addons' WeightNormalization).
    Weight decay is blind to data as well, but only updates read what it wrote.
    """
    from_data = bool(variable.trainable) and not variable.first_reads
    blind = {w for w in variable.writes if from_data or not fed[w]}
    reads = [r for r, seen in variable.late_read_sources.items() if to_end[r] and set(seen) <= blind]
    prepared = {w for r in reads for w in variable.late_read_sources[r]}
    if not prepared or prepared == set(variable.writes):
        return
    for read, seen in list(variable.late_read_sources.items()):
        before, after = [w for w in seen if w in prepared], [w for w in seen if w not in prepared]
        if before:
            variable.prepared_read_sources[read] = before
        variable.late_read_sources[read] = after
        if not after:
            del variable.late_read_sources[read]
            variable.late_reads.remove(read)
            variable.first_reads.append(read)
    variable.writes = [w for w in variable.writes if w not in prepared]


def _changes(written: list[VariableAccess], graph: Propagation) -> list[int]:
    """Return for each written variable the written variables that its value changes."""
    bits = graph.upstream(memberships(v.writes for v in written))
    return [union(bits[r] for r in v.reads) for v in written]


def _without_state(
    values: ValueFlow, candidates: list[VariableAccess], ends: dict[int, int]
) -> list[VariableAccess]:
    """Drops state that forward passes carry along (an RNN's state, a queue of keys): what is
    written there comes straight from the forward pass, and shares no gradient with others."""
    if len(candidates) < 2:
        return candidates
    graph = values.propagation(cut_memory_of={v.handle for v in candidates})
    own_writes = {n for v in candidates for n in v.writes}
    forward = graph.upstream({n: 1 for n in ends if n not in own_writes})
    shared = 0
    reached = graph.upstream(memberships(v.writes for v in candidates))
    for node, here in enumerate(reached):
        if not forward[node]:
            shared |= here if several(here) else 0
    for targets in values.targets_of_outputs.values():
        # A loss op may hand out its gradient as well: of reduction="sum" that is the gradient.
        gradient = 0 if any(forward[t] for t in targets) else union(reached[t] for t in targets)
        shared |= gradient if several(gradient) else 0
    kept = [v for i, v in enumerate(candidates) if shared >> i & 1]
    return kept or candidates


def _find_slots(values: ValueFlow, weights: list[VariableAccess], written: list[VariableAccess]) -> Slots:
    """A slot is read for its weight's update, or one fused op (ResourceApplyAdam) reads and writes both."""
    handles = {w.handle for w in weights}
    bits = values.propagation(cut_memory_of=handles).upstream(memberships(v.writes for v in weights))
    slots: Slots = {}
    for variable in written:
        changed = union(bits[access] for access in (*variable.reads, *variable.writes))
        if variable.handle not in handles and changed and not several(changed):
            slots.setdefault(changed.bit_length() - 1, []).append(variable)
    return slots


def _not_dominated(
    variables: Sequence[VariableAccess], index: dict[int, int], changes: list[int]
) -> list[VariableAccess]:
    """Find the trained variables in a graph that returns nothing: those that are nobody's slot."""
    kept = []
    for v in variables:
        mine = changes[index[v.handle]]
        changed = [changes[index[w.handle]] for w in variables if w is not v and mine >> index[w.handle] & 1]
        is_slot = any(mine != other and mine & ~other == 0 for other in changed)
        if changed and not is_slot and v.trainable is not False:
            kept.append(v)
    return kept
