"""Policies: one file each, one explicit table of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tf_ooo.planning.model.problem import Policy, Problem
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.policies import (
    dualpipe_v,
    fast_forward,
    gpipe,
    in_order,
    interleaved_1f1b,
    layerpipe,
    modulo,
    multi_stream,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    reverse_first_k,
    search,
    v_half,
    v_min,
    zb_auto,
    zb_h1,
    zb_h2,
    zb_v,
)

__all__ = ["BACKWARD_ORDERS", "POLICIES", "Policy", "Problem", "schedules_of"]

# For what is scheduled task by task in Python, in 50 to 300 us each.
_MANY = 10_000

_POLICIES = [
    Policy("in_order", ("single_device", "data_parallel"), in_order.make, ("barrier",)),
    Policy("fast_forward", ("single_device", "data_parallel", "pipeline"), fast_forward.make),
    Policy("gpipe", ("pipeline",), gpipe.make),
    Policy("1f1b", ("pipeline",), one_f_one_b.make),
    Policy("interleaved_1f1b", ("pipeline",), interleaved_1f1b.make, ("chunks",)),
    Policy("modulo", ("pipeline",), modulo.make, ("group",), auto_tasks=_MANY),
    Policy("zb_h1", ("pipeline",), zb_h1.make),
    Policy("zb_h2", ("pipeline",), zb_h2.make),
    Policy("zb_auto", ("pipeline",), zb_auto.make, auto_tasks=_MANY),
    Policy("zb_v", ("pipeline",), zb_v.make, auto_tasks=_MANY),
    Policy("v_half", ("pipeline",), v_half.make, auto_tasks=_MANY),
    Policy("v_min", ("pipeline",), v_min.make, auto_tasks=_MANY),
    Policy("dualpipe_v", ("pipeline",), dualpipe_v.make),
    Policy("multi_stream", ("single_device",), multi_stream.make, multi_stream.OPTIONS),
    Policy("reverse_first_k", ("data_parallel",), reverse_first_k.make, ("k",)),
    Policy(
        "search",
        ("single_device", "data_parallel"),
        search.make,
        search.OPTIONS,
        costs_only=("single_device",),
    ),
    Policy("pipedream", ("layerpipe",), pipedream.make),
    Policy(
        "pipedream_2bw",
        ("layerpipe",),
        pipedream_2bw.make,
        pipedream_2bw.OPTIONS,
        by_name="updates once for several micro-batches: ask for it by name",
    ),
    Policy("layerpipe", ("layerpipe",), layerpipe.make, layerpipe.OPTIONS),
]

POLICIES: Mapping[str, Policy] = {policy.name: policy for policy in _POLICIES}


def schedules_of(mode: str) -> tuple[str, ...]:
    """Names of the policies that a mode can train by."""
    return tuple(policy.name for policy in _POLICIES if mode in policy.trains)


# For the graph of one device: given the layers in the order in which backward reaches them and the
# tasks there are, the order of the backward tasks.
BackwardOrder = Callable[[Sequence[int], frozenset[Task]], list[Task]]
BACKWARD_ORDERS: Mapping[str, BackwardOrder] = {
    "in_order": in_order.backward_order,
    "fast_forward": fast_forward.backward_order,
}
