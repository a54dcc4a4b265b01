"""Holds policies: one file each, and one table. Only this table knows them by name."""

from __future__ import annotations

from importlib import import_module

from tf_ooo.planning.model.problem import Problem as Problem
from tf_ooo.planning.policies import fast_forward, in_order
from tf_ooo.planning.policies.policy import BackwardOrder
from tf_ooo.planning.policies.policy import Policy as Policy

_FILES = (
    "in_order", "fast_forward",
    "gpipe", "one_f_one_b", "interleaved_1f1b", "modulo", "zb_h1", "zb_h2", "zb_auto", "zb_interleaved",
    "zb_search", "zb_v", "v_half", "v_min", "dualpipe_v",
    "multi_stream", "reverse_first_k", "search", "pipedream", "layerpipe",
)  # fmt: skip
_ALL: list[Policy] = [import_module(f"{__name__}.{file}").POLICY for file in _FILES]
POLICIES = {policy.name: policy for policy in _ALL}


def schedules_of(mode: str, streams: bool | None = None) -> tuple[str, ...]:
    """Return names of policies that a mode can train by, either those that need streams or the others."""
    policies = [policy for policy in POLICIES.values() if mode in policy.trains]
    return tuple(policy.name for policy in policies if streams in (None, policy.needs.streams))


# The schedules of each mode are compared with the first of these that is possible.
REFERENCES = {
    "single_device": ("in_order",),
    "data_parallel": ("in_order",),
    "pipeline": ("1f1b", "gpipe"),
    "layerpipe": ("pipedream",),
}
# This runs where nothing is asked for.
DEFAULT_POLICY = fast_forward.POLICY.name
# TensorFlow and stock Horovod run this.
STOCK_ORDER = in_order.POLICY

BACKWARD_ORDERS: dict[str, BackwardOrder] = {
    policy.name: policy.backward_order for policy in POLICIES.values() if policy.backward_order is not None
}
