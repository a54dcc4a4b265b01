"""TensorFlow's private API that the plug-in uses, on the versions in ``versions.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load_library(path: str) -> None:
    """Loads a graph optimizer.  A second one for the same device type aborts the process.

    Goes below ``load_pluggable_device_library``, which also rescans the devices and so forgets
    what the user chose with ``set_visible_devices`` and ``set_memory_growth``.
    """
    from tensorflow.python.client import pywrap_tf_session

    pywrap_tf_session.TF_LoadPluggableDeviceLibrary(path)


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU; does not initialize it."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def runtime_devices() -> frozenset[str]:
    """Full names of the devices of this process and of the cluster it is connected to."""
    from tensorflow.python.eager import context

    return frozenset(context.context().devices())


def func_graph_transforms() -> list[Callable[[Any], None]]:
    """The functions that TensorFlow calls with each ``FuncGraph`` it has traced."""
    from tensorflow.python.eager.polymorphic_function import transform

    transforms: list[Callable[[Any], None]] = transform.FUNC_GRAPH_TRANSFORMS
    return transforms


def set_string_attr(op: Any, name: str, value: str) -> None:
    """Sets an attribute of an op that is in a graph already."""
    from tensorflow.core.framework import attr_value_pb2

    op._set_attr(name, attr_value_pb2.AttrValue(s=value.encode()))


def variable_of_keras(variable: Any) -> Any:
    """The ``tf.Variable`` of a Keras 3 variable; a Keras 2 variable is one already.

    Not the public ``value``: inside an autocast scope that adds a Cast to the graph and returns it.
    """
    return getattr(variable, "_value", variable)


def path_of_keras(variable: Any) -> str | None:
    """What Keras 3 calls a variable; None of Keras 2, which has no names of its own."""
    path: str | None = getattr(variable, "path", None)
    return path


def has_gradient(dtype: Any) -> bool:
    """Whether a variable of this dtype can be trained: no integers."""
    import tensorflow as tf

    real = tf.as_dtype(dtype).base_dtype
    return bool(real.is_floating or real.is_complex)


def op_def(op_type: str) -> Any:
    """What TensorFlow registered for an op type, None where it knows no such op."""
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(op_type)


def keeps_random_state(op_type: str) -> bool:
    """Whether an op draws random numbers from a state that its own kernel keeps (``tf.random.*``)."""
    definition = op_def(op_type)
    if definition is None or not definition.is_stateful:
        return False
    return {"seed", "seed2"} <= {attribute.name for attribute in definition.attr}


def tensor_proto(value: Any) -> Any:
    """A value as it stands in a constant node."""
    import tensorflow as tf

    return tf.make_tensor_proto(value)


def host_device(device: str) -> str:
    """The CPU of the machine that a full device name is on."""
    import tensorflow as tf

    spec = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0)
    name: str = spec.to_string()
    return name


def parse_graph_def(data: bytes) -> Any:
    """A GraphDef from its serialized form."""
    from tensorflow.core.framework import graph_pb2

    return graph_pb2.GraphDef.FromString(data)


def is_graph_def(value: Any) -> bool:
    """Whether a value is a GraphDef message."""
    from tensorflow.core.framework import graph_pb2

    return isinstance(value, graph_pb2.GraphDef)
