"""Steps traced as for XLA and compiled."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tf_ooo.xla.compat.ops import STREAM_ATTRIBUTE

_LOWER = "_lower_using_switch_merge"


def flat_trace(function: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """The ConcreteFunction of ``function(*specs)``.  Raises whatever tracing raises.

    It is one that XLA would compile: loops are traced in another way for XLA.
    """
    import tensorflow as tf

    plain = tf.autograph.experimental.do_not_convert(function)
    made = tf.function(plain, autograph=False, jit_compile=True)
    made._omit_frequent_tracing_warning = True
    return made.get_concrete_function(*specs)


def flat_graphs(graph_def: Any, fetches: list[str]) -> tuple[Any, Any]:
    """The graph without calls, once with loops as single ops and once with loops lowered.

    Ops outside of loops have the same names in both.
    """
    from grappler_passes.compat import inline_graph_def

    functional = type(graph_def)()
    functional.CopyFrom(graph_def)
    for nodes in (functional.node, *(f.node_def for f in functional.library.function)):
        for node in nodes:
            node.attr.pop(_LOWER, None)
    return inline_graph_def(functional, fetches), inline_graph_def(graph_def, fetches)


def without_placeholders(graph_def: Any) -> Any:
    """The graph without its inputs, which whoever imports it provides."""
    made = type(graph_def)()
    made.CopyFrom(graph_def)
    del made.node[:]
    made.node.extend(node for node in graph_def.node if node.op != "Placeholder")
    return made


def compiled_function(body: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """A ``tf.function`` that XLA compiles, for these inputs only."""
    import tensorflow as tf

    plain = tf.autograph.experimental.do_not_convert(body)
    made = tf.function(plain, input_signature=list(specs), jit_compile=True, autograph=False)
    made._omit_frequent_tracing_warning = True
    return made


def run_errors() -> tuple[type[BaseException], ...]:
    """What a compiled function raises where XLA cannot compile or start it."""
    import tensorflow as tf

    return (tf.errors.OpError,)


def hlo_of(function: Any, specs: Sequence[Any], stage: str = "hlo") -> str:
    """The HLO text of a compiled function before (``hlo``) or after (``optimized_hlo``) XLA's passes."""
    text: str = function.experimental_get_compiler_ir(*specs)(stage=stage)
    return text


_CALL = re.compile(r"= .* call\(.*" + STREAM_ATTRIBUTE + r'="(\d+)"')


def stream_calls(hlo: str) -> list[int]:
    """The stream of each annotated call in an HLO text."""
    return [int(match[1]) for line in hlo.splitlines() if (match := _CALL.search(line))]
