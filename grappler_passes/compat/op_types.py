"""Looks up types of ops in TensorFlow's registry."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorflow.core.framework import node_def_pb2

_COMMUNICATION_PREFIXES = ("Horovod", "Collective", "Nccl", "_Send", "_Recv", "_HostSend", "_HostRecv")


def is_communication(op_type: str) -> bool:
    """Collectives and transfers, told by op type: dataflow cannot see that an op talks."""
    return op_type.startswith(_COMMUNICATION_PREFIXES)


def op_def(op_type: str) -> Any:
    """Return TensorFlow's definition of an op type, None where it knows no such op."""
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(op_type)


def is_known_op(op_type: str) -> bool:
    """Say whether an op of this type is registered; libraries such as Horovod register theirs when loaded."""
    return op_def(op_type) is not None


def is_stateful(op_type: str) -> bool:
    """Return whether TensorFlow registered the op type as having state or side effects; True if unknown."""
    definition = op_def(op_type)
    return definition is None or definition.is_stateful


def has_reference_inputs(op_type: str) -> bool:
    """Say whether the op may change a reference variable that it is given; control flow only hands it on."""
    definition = op_def(op_type)
    return (
        definition is not None
        and not op_type.startswith("Ref")
        and any(argument.is_ref for argument in definition.input_arg)
    )


@lru_cache(maxsize=4096)
def resource_inputs(op_type: str) -> tuple[int, ...]:
    """The places of the inputs that are handles; those behind an input of variable length are left out."""
    from tensorflow.core.framework import types_pb2

    definition = op_def(op_type)
    handles: list[int] = []
    for place, argument in enumerate(() if definition is None else definition.input_arg):
        if argument.number_attr or argument.type_list_attr:
            break
        if argument.type == types_pb2.DT_RESOURCE:
            handles.append(place)
    return tuple(handles)


@lru_cache(maxsize=4096)
def attribute_names(op_type: str) -> frozenset[str]:
    """Return the attributes that an op's definition has; none for an unknown op."""
    definition = op_def(op_type)
    return frozenset(() if definition is None else (attribute.name for attribute in definition.attr))


def output_names(node: node_def_pb2.NodeDef) -> list[str]:
    """Return how a function names the outputs of an op in its body, by port: ``op:result:number``."""
    names: list[str] = []
    for result in op_def(node.op).output_arg:
        count = node.attr[result.number_attr].i if result.number_attr else 1
        if result.type_list_attr:
            count = len(node.attr[result.type_list_attr].list.type)
        names += [f"{node.name}:{result.name}:{number}" for number in range(count)]
    return names


def allows_types(node: node_def_pb2.NodeDef) -> bool:
    """Return whether the types in a node's attributes are among those that its op's definition allows.

    Kernels may know more: oneDNN's convolutions on a CPU take bfloat16.  TensorFlow checks it when it
    imports a graph, not when it runs one.
    """
    definition = op_def(node.op)
    return all(
        node.attr[attribute.name].type in attribute.allowed_values.list.type
        for attribute in (() if definition is None else definition.attr)
        if attribute.type == "type" and attribute.allowed_values.list.type and attribute.name in node.attr
    )


def keeps_random_state(op_type: str) -> bool:
    """Return whether an op draws random numbers from a state that its own kernel keeps (``tf.random.*``)."""
    return (
        op_def(op_type) is not None and is_stateful(op_type) and {"seed", "seed2"} <= attribute_names(op_type)
    )
