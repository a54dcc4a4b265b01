"""The forward pass: what the results of a step that depend on no gradient are computed from.

A loss that is not returned and what loops only stash lead to no such result; gradients that nobody reads are
none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grappler_passes.graph.bits import several
from grappler_passes.graph.contexts import SWITCHES

if TYPE_CHECKING:
    from grappler_passes.analysis.gradients import GradientFlow

PUSH_OPS = frozenset({"TensorListPushBack", "TensorListSetItem"})
STASH_OPS = PUSH_OPS | {"Merge", *SWITCHES, "Identity", "NextIteration"}


def forward_ops(g: GradientFlow) -> list[int]:
    """1 for each op of the forward pass."""
    fed = g.full.downstream(g.data_sources)
    past = _past_forward(g)
    state = (write for variable in g.variables for write in variable.writes)
    ends = {
        n: 1
        for n in [*g.results, *state]
        if n not in g.all_sinks and fed[n] and not g.after[n] and not past[n]
    }
    known = g.full.upstream(ends)
    seeds = ends | _hidden(g, known)
    known = g.full.upstream(seeds)
    stash = _stashes(g, known)
    return g.full.upstream(seeds | dict.fromkeys(stash, 1)) if stash else known


def _hidden(g: GradientFlow, known: list[int]) -> dict[int, int]:
    """Forward ops that lead to no visible result, such as a loss that is not returned: they change gradients
    of weights on which they do not depend yet.

    In ``h = x @ v; loss = sum((h @ w)**2)`` the op ``h`` depends on v alone and changes the gradients of
    both.
    """
    reads = (read for weight in g.weights for read in weight.reads)
    if not any(several(g.reach[read]) and not known[read] for read in reads):
        return {}
    return {
        node: 1
        for node, reached in enumerate(g.reach)
        if not known[node]
        and g.depends[node]
        and reached & ~g.depends[node]
        and g.from_data[node]
        and not g.after[node]
    }


def _past_forward(g: GradientFlow) -> list[int]:
    """Where nothing says which ops are results, gradients that nobody asked for are among those taken for
    them.

    They come after ops that change fewer weights than they depend on (``d loss / d x`` changes none).
    """
    if g.results_are_certain:
        return [0] * len(g.flow)
    shrunk = {
        n: 1
        for n, reached in enumerate(g.reach)
        if reached and not reached & ~g.depends[n] and reached != g.depends[n]
    }
    return g.full.downstream(shrunk)


def _stashes(g: GradientFlow, known: list[int]) -> list[int]:
    """Loop variables of a forward loop that only collect tensors for the gradient loop.

    The LoopCond that their Switch asks belongs to a loop with a known result.  A gradient loop collects
    tensors as well (gradients of an RNN's inputs), but no forward result waits for its LoopCond.
    """
    if not g.cyclic:
        return []
    stashes: list[int] = []
    for group in g.full.groups:
        types = {g.flow.types[n] for n in group}
        if types & PUSH_OPS and types <= STASH_OPS and _is_run_by(g, group, known):
            stashes += group
            stashes += [t for n in group for t in g.flow.raw_targets[n] if g.flow.types[t] == "Exit"]
    return stashes


def _is_run_by(g: GradientFlow, group: list[int], known: list[int]) -> bool:
    switches = [n for n in group if g.flow.types[n] == "Switch"]
    return any(known[g.flow.data[n][1].source] for n in switches) and not any(known[n] for n in group)
