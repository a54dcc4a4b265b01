"""The plug-in requests of data parallel training: unrolled steps are looked at, or put in an order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from grappler_passes import plugin
from grappler_passes.passes.base import PassResult
from tf_ooo.modes.data_parallel.ordering import (
    FLIGHT_BYTES,
    LayerKey,
    ScheduleFor,
    order_steps,
)
from tf_ooo.rewriting import passes
from tf_ooo.rewriting.request import ResultT, RewriteRequest
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.unrolled_tasks import is_unrolled

if TYPE_CHECKING:
    import keras
    from tensorflow.core.framework import graph_pb2

_LOG = logging.getLogger("tf_ooo")


def request_to_look(model: keras.Model) -> RewriteRequest[PassResult]:
    """Keeps the largest graph of unrolled steps as TensorFlow runs it.

    Its ops are separated as those of ordered steps will be, so that what is measured is what will run.
    ``model`` names its variables.  Raises BackendError: unsupported TensorFlow, or no plug-in.
    """

    def look(graph_def: graph_pb2.GraphDef) -> PassResult:
        return passes.separating_only(graph_def)(graph_def)

    def is_larger(result: PassResult, before: PassResult) -> bool:
        return len(result.graph_def.node) >= len(before.graph_def.node)

    return _request(model, look, is_larger)


def request_to_order(
    model: keras.Model,
    schedule_for: ScheduleFor,
    flight_bytes: float = FLIGHT_BYTES,
    planned_for: Sequence[LayerKey] | None = None,
    dump_dir: passes.Folder = None,
) -> RewriteRequest[RewriteResult]:
    """Orders unrolled steps; keeps what was done to the graph in which most ops moved.

    Args:
        model: names its variables.
        schedule_for, flight_bytes, planned_for, dump_dir: see :func:`order_steps`.

    Raises:
        BackendError: unsupported TensorFlow, or the plug-in cannot be loaded.
    """

    def order(graph_def: graph_pb2.GraphDef) -> RewriteResult:
        result = order_steps(graph_def, schedule_for, flight_bytes, planned_for, dump_dir)
        _LOG.info("ordered the steps by %s in %.2f s", result.schedule.policy, result.plan_seconds)
        return result

    return _request(model, order, lambda result, before: result.moved_ops >= before.moved_ops)


def _request(
    model: keras.Model,
    rewrite: Callable[[graph_pb2.GraphDef], ResultT],
    replaces: Callable[[ResultT, ResultT], bool],
) -> RewriteRequest[ResultT]:
    return RewriteRequest(
        "tf_ooo-parallel",
        lambda graph_def: rewrite(graph_def) if is_unrolled(graph_def) else None,
        replaces,
        lambda request: "TensorFlow handed no graph over to be ordered",
        plugin.describe_keras(model),
    )
