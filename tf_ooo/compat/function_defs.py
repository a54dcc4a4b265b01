"""Functions as TensorFlow's runtime knows them: made of nodes, and called as they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos, op_types, runtime
from grappler_passes.compat.shape_inference import ARGUMENT
from grappler_passes.graph.node_input import split_input

# On functions, and calls of them, that XLA compiles as a whole.
COMPILED = "_XlaMustCompile"
_RESULT = "_Retval"
_numbers = itertools.count(1)


def unique_name(prefix: str) -> str:
    """Return a function name that nothing else in this process has."""
    return f"{prefix}_{next(_numbers)}"


def function_def(
    name: str, nodes: Iterable[Any], inputs: Sequence[tuple[str, str]], outputs: Sequence[tuple[str, str]]
) -> Any:
    """Return a FunctionDef of ``nodes``, NodeDefs that read the inputs by name.

    ``inputs``: (name, dtype name); ``outputs``: (``node:port``, dtype name).  All attributes are there, also
    those with their default.
    """
    function = function_pb2.FunctionDef(node_def=nodes)
    signature, body = function.signature, function.node_def
    signature.name, signature.is_stateful = name, any(op_types.is_stateful(node.op) for node in body)
    for argument, dtype in inputs:
        signature.input_arg.add(name=argument, type=tf.as_dtype(dtype).as_datatype_enum)
    texts = {port: text for text, port in ports_of(function).items()}
    for node in body:
        node.input[:] = [text if text[0] == "^" else texts[split_input(text)] for text in node.input]
    for place, (text, dtype) in enumerate(outputs):
        result = signature.output_arg.add(name=f"r{place}", type=tf.as_dtype(dtype).as_datatype_enum)
        function.ret[result.name] = texts[split_input(text)]
    return function


def ports_of(function: Any) -> dict[str, tuple[str, int]]:
    """Return node and port of each tensor in a FunctionDef, by the text for it inside."""
    ports = {argument.name: (argument.name, 0) for argument in function.signature.input_arg}
    for node in function.node_def:
        ports |= {text: (node.name, port) for port, text in enumerate(op_types.output_names(node))}
    return ports


class OptimizedGraph:
    """A graph as graph optimizers get it, with ``_Arg`` and ``_Retval`` nodes, as a function.

    It is called without being optimized again.  TensorFlow is given the nodes as they are: to import them
    into a graph that Python knows takes ten times as long.

    Args:
        graph_def: the graph; it may call no functions but those that XLA compiles.
        concrete: the traced function that it was made of.
        captured: tensors in the place of those that ``concrete`` captures, in the same order.

    Raises ValueError where the graph lacks an op that the function has to run, or a tensor that one reads.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef, concrete: Any, captured: Sequence[Any]) -> None:
        needed, kept = [op.name for op in concrete.graph.control_outputs], {n.name for n in graph_def.node}
        lacking = [name for name in needed if name not in kept]
        if lacking or any(COMPILED not in function.attr for function in graph_def.library.function):
            raise ValueError(f"it lacks {lacking[0]}" if lacking else "it calls functions")
        try:
            function = _as_function(graph_def, needed)
        except KeyError as error:
            raise ValueError(f"it lacks {':'.join(map(str, error.args[0]))}") from error
        self._captured, self._results = list(captured), len(function.signature.output_arg)
        # Optimizers leave out arguments that nothing reads.
        self._read = [node.attr["index"].i for node in _ends(graph_def, ARGUMENT)]
        self._name = function.signature.name
        self._kept = runtime.kept_functions([*graph_def.library.function, function])

    def __call__(self, *tensors: Any) -> list[Any]:
        """Return the results, flat, for the arguments' tensors."""
        given = [*tensors, *self._captured]
        with runtime.calls_not_optimized():
            return runtime.call_function(self._name, [given[place] for place in self._read], self._results)


def _as_function(graph_def: graph_pb2.GraphDef, needed: Iterable[str]) -> function_pb2.FunctionDef:
    """Return the graph between its ends as a function that also runs the ops ``needed``."""
    arguments, results = _ends(graph_def, ARGUMENT), _ends(graph_def, _RESULT)
    ends = {node.name for node in (*arguments, *results)}
    body = graph_pb2.GraphDef(node=[node for node in graph_def.node if node.name not in ends]).node
    for node in body:
        graph_protos.keep_colocations(node, lambda name: False)  # all have their devices
        if any(text[0] == "^" and text[1:] in ends for text in node.input):  # arguments are there before
            node.input[:] = [text for text in node.input if text[0] != "^" or text[1:] not in ends]
    devices = {node.name: node.device for node in body}
    returned = []
    for node in results:
        text, name = node.input[0], f"{node.name}/where_it_was"
        if node.device and devices.get(split_input(text)[0], node.device) not in ("", node.device):
            copy = body.add(name=name, op="Identity", input=[text], device=node.device)
            copy.attr["T"].type = node.attr["T"].type
            text = name
        returned.append((text, node.attr["T"].type))
    given = [(node.name, node.attr["T"].type) for node in arguments]
    function: function_pb2.FunctionDef = function_def(unique_name("ooo_step"), body, given, returned)
    for place, name in enumerate(needed):
        function.signature.control_output.append(f"c{place}")
        function.control_ret[f"c{place}"] = name
    return function


def _ends(graph_def: graph_pb2.GraphDef, op: str) -> list[node_def_pb2.NodeDef]:
    """Return the arguments or the results of a function, in their order."""
    return sorted((n for n in graph_def.node if n.op == op), key=lambda node: node.attr["index"].i)
