"""Handles functions as graphs, which can be imported, and as the runtime's definitions, made of nodes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from grappler_passes.analysis.steps import SUM_ATTR, TURN_ATTR
from grappler_passes.compat import graph_protos, runtime
from grappler_passes.compat.graph_protos import split_input
from grappler_passes.compat.shape_inference import ARGUMENT
from tf_ooo.errors import BackendError

# This attribute marks functions, and calls of them, that XLA compiles as a whole.
COMPILED = "_XlaMustCompile"
_RESULT = "_Retval"
_numbers = itertools.count(1)


def captures_of(concrete: Any) -> list[tuple[Any, Any]]:
    """Return pairs (tensor outside, placeholder inside); BackendError if only a call could tell one."""
    graph = concrete.graph
    if getattr(graph, "deferred_external_captures", None):
        raise BackendError("the step reads values that are only known when it is called (deferred captures)")
    return list(graph.captures)


def import_here(
    graph_def: graph_pb2.GraphDef, replaced: dict[str, Any], wanted: Sequence[str], name: str = ""
) -> list[Any]:
    """Import the graph into the function being traced, below ``name``.

    ``replaced`` maps tensor names to tensors.
    """
    graph = tf.compat.v1.get_default_graph()
    inside = {name: graph.capture(t) if hasattr(graph, "capture") else t for name, t in replaced.items()}
    return list(tf.graph_util.import_graph_def(graph_def, inside, list(wanted), name=name))


def captured_here(concrete: Any) -> list[Any]:
    """Capture, in the function being traced, what a traced function captures, with its variables."""
    graph = tf.compat.v1.get_default_graph()
    for variable in concrete.graph.variables:
        graph.watch_variable(variable)
    return [graph.capture(tensor) for tensor in concrete.captured_inputs]


def made_again(op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
    """Make an op of the same type and attributes here, with other inputs; return its results.

    Marks and colocations are not copied: they depend on where the op is made.
    """
    own = {attribute.name for attribute in op.op_def.attr}
    attributes = {name: value for name, value in op.node_def.attr.items() if name in own}
    types = [result.dtype for result in op.outputs]
    again = op.graph.create_op(
        op.type, list(inputs), types, attrs=attributes, name=op.name.rpartition("/")[2]
    )
    return list(again.outputs)


def without_placeholders(graph_def: graph_pb2.GraphDef) -> Any:
    """Return the graph without its inputs, which the importer provides."""
    return graph_protos.with_nodes(graph_def, (n for n in graph_def.node if n.op != "Placeholder"))


def is_within_another() -> bool:
    """Return whether the function being traced is called by another one being traced."""
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return getattr(outer, "outer_graph", None) is not None


def bodies_of(op: tf.Operation) -> list[Any]:
    """Return the FuncGraphs that an op calls: a function's, or a condition's branches; [] for other ops.

    Their ``inputs`` are the op's last inputs: a condition has others before.
    """
    keys = {attr.name for attr in op.op_def.attr} & {"f", "then_branch", "else_branch", "branches"}
    called = tf.nest.flatten([op.get_attr(key) for key in sorted(keys)])
    functions = [op.graph._get_function(function.name) for function in called]
    return [function.graph for function in functions if function is not None]


def captured_by(graph: object) -> dict[int, Any]:
    """Return the tensors that a FuncGraph captures so far, by the ``id`` of their placeholders."""
    return {id(internal): external for external, internal in getattr(graph, "captures", ())}


# These ops change the variable that is their first input.
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")


def written_by(graph: Any) -> set[int]:
    """Return the ``id`` of each outer tensor that stands for a variable which a FuncGraph writes to."""
    return {id(_outside(graph, tensor)) for op in graph.get_operations() for tensor in written_by_op(op)}


def written_by_op(op: tf.Operation) -> Iterator[Any]:
    """Yield the inputs by which an op, or a function that it calls, writes to variables."""
    if op.type.startswith(_WRITES):
        yield op.inputs[0]
    for body in bodies_of(op):
        inside = {id(tensor) for within in body.get_operations() for tensor in written_by_op(within)}
        arguments = zip(body.inputs, op.inputs[len(op.inputs) - len(body.inputs) :], strict=True)
        yield from (outer for inner, outer in arguments if id(inner) in inside)


def _outside(graph: object, tensor: tf.Tensor) -> Any:
    """Follow a captured tensor to the outermost of nested graphs being traced."""
    while id(tensor) in (captured := captured_by(graph)):
        tensor = captured[id(tensor)]
        graph = getattr(tensor, "graph", None)
    return tensor


def captures_so_far(graph: Any) -> set[str]:
    """Return the names of the ops by which a graph being traced knows what is outside of it.

    Small values are constants, which stand for the same value wherever the function meets it again.
    """
    return {internal.op.name for _, internal in graph.captures}


def ops_reached_from(graph: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, type) of the ops of a graph and of all functions that it reaches, old ones too."""
    for op in graph.get_operations():
        yield op.name, op.type
    yield from ops_called_from(graph)


def ops_called_from(graph: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, type) of the ops of all functions that a graph reaches."""
    for function in graph._functions.values():
        definition = function.cached_definition
        for node in definition.node_def:
            yield f"{definition.signature.name}/{node.name}", node.op


def set_random_numbers(graph: Any, number: float = 0.37) -> None:
    """Make all ops of a graph being traced read one number instead of random ones.

    Ops that shuffle rows reverse them instead.  Functions that the graph calls keep their random numbers.
    """
    for op in graph.get_operations():
        if "Random" not in op.type or op.type.startswith("StatelessRandomGet") or not op.outputs:
            continue
        old = op.outputs[0]
        if not (old.dtype.is_floating or old.dtype.is_integer):
            continue
        readers = old.consumers()
        if op.type.endswith("Shuffle"):
            new = tf.reverse(op.inputs[0], [0])
        else:
            new = tf.fill(tf.shape(old), tf.cast(number, old.dtype))
        for reader in readers:
            for place in [place for place, tensor in enumerate(reader.inputs) if tensor is old]:
                reader._update_input(place, new)


# This attribute numbers the communications of a gradient that travels in slices.
PART_ATTR = "_ooo_part"
# This attribute holds the name of the message that an op belongs to.
_MESSAGE_ATTR = "_ooo_message"
# Grappler's arithmetic optimizer sets this on sums that it has looked at: with it, a chain of sums stays a
# chain. Without it the chain becomes one AddN, which keeps the gradients of all micro-batches alive to the
# end.
_LEAVE_SUMS = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def _marked(attributes: Mapping[str, AttrValue]) -> AbstractContextManager[None]:
    scope: AbstractContextManager[None] = tf.compat.v1.get_default_graph()._attr_scope(attributes)
    return scope


@contextlib.contextmanager
def numbered_step(number: int, attribute: str, scope: str) -> Iterator[None]:
    """Mark ops made inside with the number of their step: by an attribute, and by a scope if given.

    Blocks may be nested.  TensorFlow's graph optimizers look at names: in a scope the same step may differ in
    the last bit.
    """
    named = tf.name_scope(f"{scope}{number}/") if scope else contextlib.nullcontext()
    with _marked({attribute: AttrValue(i=number)}), named:
        yield


def numbered_turn(number: int) -> AbstractContextManager[None]:
    """Mark ops made inside with the number of updates in their step that come before."""
    return _marked({TURN_ATTR: AttrValue(i=number)})


def numbered_part(number: int) -> AbstractContextManager[None]:
    """Mark ops made inside with the number of their slice; does nothing if ops run eagerly."""
    return contextlib.nullcontext() if tf.executing_eagerly() else _marked({PART_ATTR: AttrValue(i=number)})


def named_message(name: str) -> AbstractContextManager[None]:
    """Mark ops made inside with the message they belong to; does nothing if ops run eagerly.

    Grappler merges ops that compute the same, Horovod's too, unless their attributes differ.  If two weights
    have the same gradient it may see this only in one rank's graph, for example because it knows the size of
    a batch there: the other ranks would wait for a message that is gone.
    """
    mark = {_MESSAGE_ATTR: AttrValue(s=name.encode())}
    return contextlib.nullcontext() if tf.executing_eagerly() else _marked(mark)


def marked_sums() -> AbstractContextManager[None]:
    """Mark ops made inside as sums of gradients, which Grappler leaves as they are."""
    return _marked(dict.fromkeys((SUM_ATTR, _LEAVE_SUMS), AttrValue(b=True)))


def leave_sums(graph_def: graph_pb2.GraphDef) -> None:
    """Mark all sums of a graph: Grappler sorts what it joins by name, which gives each copy other bits."""
    for node in graph_def.node:
        if node.op in ("Add", "AddV2", "AddN"):
            node.attr[_LEAVE_SUMS].b = True


def unique_name(prefix: str) -> str:
    """Return a function name that is unique in this process."""
    return f"{prefix}_{next(_numbers)}"


def function_def(
    name: str, nodes: Iterable[Any], inputs: Sequence[tuple[str, str]], outputs: Sequence[tuple[str, str]]
) -> Any:
    """Return a FunctionDef of ``nodes``, which are NodeDefs that read the inputs by name.

    ``inputs``: (name, dtype name); ``outputs``: (``node:port``, dtype name).  All attributes are set, also
    those with default values.
    """
    function = function_pb2.FunctionDef(node_def=nodes)
    signature, body = function.signature, function.node_def
    signature.name, signature.is_stateful = name, any(graph_protos.is_stateful(node.op) for node in body)
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
    """Return node and port of each tensor in a FunctionDef, by the text used for it inside."""
    ports = {argument.name: (argument.name, 0) for argument in function.signature.input_arg}
    for node in function.node_def:
        ports |= {text: (node.name, port) for port, text in enumerate(graph_protos.output_names(node))}
    return ports


class OptimizedGraph:
    """Calls a graph in the form graph optimizers get it, with ``_Arg`` and ``_Retval`` nodes, as a function.

    It is not optimized again.  TensorFlow is given the nodes as they are: importing them into a graph that
    Python knows takes ten times as long.

    Args:
        graph_def: the graph; it may only call functions that XLA compiles.
        concrete: the traced function that the graph was made from.
        captured: tensors that replace the ones that ``concrete`` captures, in the same order.

    Raises ValueError if the graph lacks an op that the function has to run, or a tensor that an op reads.
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
        # Optimizers remove arguments that nothing reads.
        self._read = [node.attr["index"].i for node in _ends(graph_def, ARGUMENT)]
        self._name = function.signature.name
        self._kept = runtime.kept_functions([*graph_def.library.function, function])

    def __call__(self, *tensors: Any) -> list[Any]:
        """Return the results, flat, for the tensors of the arguments."""
        given = [*tensors, *self._captured]
        with runtime.calls_not_optimized():
            return runtime.call_function(self._name, [given[place] for place in self._read], self._results)


def _as_function(graph_def: graph_pb2.GraphDef, needed: Iterable[str]) -> function_pb2.FunctionDef:
    """Return the graph between its arguments and results as a function that also runs the ops ``needed``."""
    arguments, results = _ends(graph_def, ARGUMENT), _ends(graph_def, _RESULT)
    ends = {node.name for node in (*arguments, *results)}
    body = graph_pb2.GraphDef(node=[node for node in graph_def.node if node.name not in ends]).node
    for node in body:
        graph_protos.keep_colocations(node, lambda name: False)  # all nodes have devices
        if any(text[0] == "^" and text[1:] in ends for text in node.input):  # arguments are there earlier
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
    """Return the arguments or the results of a function, in order."""
    return sorted((n for n in graph_def.node if n.op == op), key=lambda node: node.attr["index"].i)
