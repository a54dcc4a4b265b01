"""Steps traced as for XLA and compiled."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tf_ooo.compat.xla.ops import STREAM_ATTRIBUTE

_LOWER = "_lower_using_switch_merge"
_CONDITIONALS = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})


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
    """The graph without calls, once with loops and conditionals as single ops and once with them lowered.

    Traced for XLA a conditional is not marked to be lowered: an optimizer that may skip an update (loss
    scaling, accumulated gradients) would be one op that reads all gradients.  Ops outside of loops and
    conditionals have the same names in both.
    """
    from grappler_passes.compat import inline_graph_def

    functional, lowered = type(graph_def)(), type(graph_def)()
    functional.CopyFrom(graph_def)
    lowered.CopyFrom(graph_def)
    for node in _all_nodes(functional):
        node.attr.pop(_LOWER, None)
    for node in _all_nodes(lowered):
        if node.op in _CONDITIONALS:
            node.attr[_LOWER].b = True
    return inline_graph_def(functional, fetches), inline_graph_def(lowered, fetches)


def _all_nodes(graph_def: Any) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


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
    """The HLO text of a compiled function before (``hlo``) or after (``optimized_hlo``) XLA's passes.

    The device is named, although TensorFlow warns of that: else it finds out by drawing a random number,
    after which the user's own would be others.
    """
    import tensorflow as tf

    with tf.init_scope():
        device = tf.identity(tf.constant(0.0)).device
    ask = function.experimental_get_compiler_ir(*specs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text: str = ask(stage=stage, device_name=device)
    return text


_CALL = re.compile(r"= .* call\(.*" + STREAM_ATTRIBUTE + r'="(\d+)"')


def stream_calls(hlo: str) -> list[int]:
    """The stream of each annotated call in an HLO text."""
    return [int(match[1]) for line in hlo.splitlines() if (match := _CALL.search(line))]
