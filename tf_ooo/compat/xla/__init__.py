"""Every private API and version check of the XLA mode, each with a test.

Seen working on TensorFlow 2.21: an ``XlaCallModule`` becomes an HLO ``call`` that keeps its frontend
attributes, which XLA:GPU turns into an asynchronous call on a stream of its own.
"""

from __future__ import annotations

from tf_ooo.compat.xla.flags import flags_of_process, why_flags_are_fixed, xla_flags
from tf_ooo.compat.xla.loops import barrier, repeated_function
from tf_ooo.compat.xla.ops import (
    MLIR_TYPES,
    MODULE_VERSION,
    OLDEST_TENSORFLOW,
    STREAM_ATTRIBUTE,
    barrier_node,
    call_node,
    constant_node,
    device_name,
    frontend_attributes,
    function_def,
    plain_call_node,
    platform,
    register_functions,
    unique_name,
    why_no_streams,
)
from tf_ooo.compat.xla.tracing import (
    compiled_function,
    flat_graphs,
    flat_trace,
    hlo_of,
    run_errors,
    stream_calls,
    without_placeholders,
)

__all__ = [
    "MLIR_TYPES",
    "MODULE_VERSION",
    "OLDEST_TENSORFLOW",
    "STREAM_ATTRIBUTE",
    "barrier",
    "barrier_node",
    "call_node",
    "compiled_function",
    "constant_node",
    "device_name",
    "flags_of_process",
    "flat_graphs",
    "flat_trace",
    "frontend_attributes",
    "function_def",
    "hlo_of",
    "plain_call_node",
    "platform",
    "register_functions",
    "repeated_function",
    "run_errors",
    "stream_calls",
    "unique_name",
    "why_flags_are_fixed",
    "why_no_streams",
    "without_placeholders",
    "xla_flags",
]
