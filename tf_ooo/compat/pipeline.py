"""TensorFlow's and Keras' private API of the pipeline mode, each with a test."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from grappler_passes.analysis.microbatches import SUM_ATTR
from tf_ooo.compat import keras_of, shadow, unshadow

# What Grappler's arithmetic optimizer writes on sums that it has looked at: with it, a chain of sums stays
# a chain.  Else it becomes one AddN, which keeps the gradients of all micro-batches alive to the end.
_LEAVE_SUMS = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


@contextlib.contextmanager
def marked_sums() -> Iterator[None]:
    """Ops made inside are sums of gradients, which Grappler leaves as they are."""
    import tensorflow as tf
    from tensorflow.core.framework import attr_value_pb2

    yes = attr_value_pb2.AttrValue(b=True)
    with tf.compat.v1.get_default_graph()._attr_scope({SUM_ATTR: yes, _LEAVE_SUMS: yes}):
        yield


def leave_sums(graph_def: Any) -> None:
    """Marks all sums of a graph: Grappler sorts what it joins by names, which gives each copy other bits."""
    for node in graph_def.node:
        if node.op in ("Add", "AddV2", "AddN"):
            node.attr[_LEAVE_SUMS].b = True


_TWIN = "_ooo_value"


def value_of(variable: Any) -> Any:
    """The ``tf.Variable`` behind a Keras variable.

    Layers of Keras 2 hold a ``tf.Variable`` itself: a twin of it, with the same handle, stands behind it.
    """
    own = _resource(variable)
    if own is None:
        return variable._value
    twin = getattr(own, _TWIN, None)
    if twin is None:
        twin = object.__new__(type(own))
        vars(twin).update(vars(own))
        vars(own)[_TWIN] = twin
    return twin


def set_value_of(variable: Any, value: Any) -> None:
    """Puts another ``tf.Variable`` behind a Keras variable."""
    own = _resource(variable)
    if own is None:
        object.__setattr__(variable, "_value", value)
        return
    own._handle = value._handle
    vars(own)[_TWIN] = value


def _resource(variable: Any) -> Any:
    """The ``tf.Variable`` that a variable of Keras 2 is, or holds for mixed precision; None with Keras 3."""
    import tensorflow as tf

    if not isinstance(variable, tf.Variable):
        return None
    return vars(variable).get("_variable", variable)


def handle_of(variable: Any) -> Any:
    """The handle that ops of the present graph are given for a variable; None if there is none."""
    own = _resource(variable)
    return getattr(getattr(variable, "value", None) if own is None else own, "handle", None)


def copy_on(device: str, variable: Any) -> Any:
    """A new ``tf.Variable`` on a device with the value and the identity of another one.

    Optimizers of Keras know the variables that they were built with by ``_unique_id``.
    """
    import tensorflow as tf

    with tf.init_scope(), tf.device(device):
        new = tf.Variable(
            variable.read_value(),
            trainable=variable.trainable,
            dtype=variable.dtype,
            shape=variable.shape,
            name=variable.name.split(":")[0],
            synchronization=variable.synchronization,
            aggregation=variable.aggregation,
        )
    new._unique_id = variable._unique_id
    return new


def empty(variable: Any) -> None:
    """Frees the memory of a ``tf.Variable`` that nobody needs any more.

    TensorFlow keeps the graphs in which gradients with a gradient of their own were traced (Keras'
    optimizers do so), and with each graph the variables that it reads, as long as the process lives.
    """
    import tensorflow as tf

    with tf.init_scope(), tf.device(variable.device):
        nothing = (
            tf.zeros((0,), variable.dtype) if variable.dtype != tf.string else tf.constant([], tf.string)
        )
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing)


def running_callback_list() -> Any:
    """The ``CallbackList`` that is calling this process' innermost callback; None: nobody calls one.

    Keras hands it to nobody; it is ``self`` of a frame above.
    """
    for frame in _frames_above():
        found = frame.f_locals.get("self")
        if found is not None and isinstance(found, keras_of(found).callbacks.CallbackList):
            return found
    return None


def running_batches() -> Any:
    """What gives the innermost ``fit`` that runs its batches; None: no ``fit`` runs, or it is another Keras.

    Its ``catch_stop_iteration()`` is around all batches of an epoch, and what waits for the last of them.
    Keras hands it to nobody; it is in a frame above.
    """
    for frame in _frames_above():
        for name in ("epoch_iterator", "data_handler"):  # Keras 3, Keras 2
            found = frame.f_locals.get(name)
            if hasattr(found, "catch_stop_iteration"):
                return found
    return None


def _frames_above() -> Iterator[FrameType]:
    """Those of the functions that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def set_on(owner: Any, name: str, method: Any) -> None:
    """Puts a method on one object, past Keras' tracking of attributes; None: the class' method again."""
    if method is not None:
        object.__setattr__(owner, name, method)
    elif name in vars(owner):
        object.__delattr__(owner, name)


def functions_of(model: Any) -> dict[str, Any]:
    """The functions that a model keeps for evaluate and predict; {} for a layer."""
    return {
        name: getattr(model, name) for name in ("test_function", "predict_function") if hasattr(model, name)
    }


def set_functions_of(model: Any, functions: dict[str, Any]) -> None:
    """Sets what :func:`functions_of` gave; None: to be made anew."""
    for name, function in functions.items():
        setattr(model, name, function)


def make_on_demand(function: Any) -> Any:
    """A ``tf.function`` without autograph; TensorFlow does not warn that there are several."""
    import tensorflow as tf

    made = tf.function(tf.autograph.experimental.do_not_convert(function))
    made._omit_frequent_tracing_warning = True
    return made


def batch_normalizations(model: Any) -> list[str]:
    """Paths of the layers that normalize over the rows of a batch; with Keras 2 their names."""
    kind = keras_of(model).layers.BatchNormalization
    layers = model._flatten_layers(include_self=False, recursive=True)
    return [getattr(layer, "path", layer.name) for layer in layers if isinstance(layer, kind)]


def stateful_layers(model: Any) -> list[str]:
    """Paths of the recurrent layers that keep their rows' states from batch to batch; with Keras 2 names."""
    kind = keras_of(model).layers.RNN
    layers = model._flatten_layers(include_self=False, recursive=True)
    return [getattr(x, "path", x.name) for x in layers if isinstance(x, kind) and x.stateful]


@contextlib.contextmanager
def weighted_means(model: Any, weight: float) -> Iterator[None]:
    """Inside the block a number that a ``Mean`` of the model is given counts ``weight``.

    If nothing else is said; so that a micro-batch's mean counts as much as its share of the batch.
    """
    kind = keras_of(model).metrics.Mean
    means = [] if weight == 1.0 else [metric for metric in model.metrics if type(metric) is kind]
    for metric in means:
        shadow(metric, "update_state", functools.partial(_update_mean, metric.update_state, weight))
    try:
        yield
    finally:
        for metric in means:
            unshadow(metric, "update_state")


def _update_mean(update: Any, weight: float, values: Any, sample_weight: Any = None) -> Any:
    import tensorflow as tf

    single = sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0
    return update(values, sample_weight=weight if single else sample_weight)


def masks(model: Any) -> list[str]:
    """Paths of the layers that make masks, and names of losses that divide by something else than rows."""
    layers = model._flatten_layers(include_self=False, recursive=True)
    masking = keras_of(model).layers.Masking
    found = [x for x in layers if getattr(x, "mask_zero", False) or isinstance(x, masking)]
    return [getattr(layer, "path", layer.name) for layer in found] + [
        loss.name
        for loss in _losses(model)
        if _ignored_class(loss) is not None or loss.reduction == "mean_with_sample_weight"
    ]


def _ignored_class(loss: Any) -> Any:
    """With Keras 2 it is an argument of the loss function."""
    return getattr(loss, "ignore_class", getattr(loss, "_fn_kwargs", {}).get("ignore_class"))


def summed_losses(model: Any) -> list[str]:
    """Names of the losses given to ``compile`` that add up a batch instead of averaging it.

    Where a loss has no reduction, the gradient is that of the sum, unless the model's own code averages it.
    """
    summed = {"sum"} if _has_own_loss_code(model, keras_of(model)) else {"sum", "none", None}
    return [loss.name for loss in _losses(model) if loss.reduction in summed]


def _losses(model: Any) -> list[Any]:
    """The loss objects given to ``compile``."""
    import tensorflow as tf

    losses = tf.nest.flatten(getattr(model, "loss", None))
    return [loss for loss in losses if isinstance(loss, keras_of(model).losses.Loss)]


def _has_own_loss_code(model: Any, keras: Any) -> bool:
    kind = type(model)
    return any(
        getattr(kind, name, None) is not getattr(keras.Model, name, None)
        for name in ("train_step", "compute_loss")
    )
